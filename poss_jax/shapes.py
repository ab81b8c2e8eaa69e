"""The axis letters used by every einsum, shape annotation and comment in this project.

    B batch            T query length        S cache length       D model width
    N query heads      K key/value heads     G query heads per key/value head (N = K * G)
    H head width (half: H/2; NH: N * H)
    F MLP width           V vocabulary         L target layers
    E specialists      R rollout depth       W tree.top_k         C drafted candidates
    M tree.total_tokens, root included       A longest acceptance of a round, root included

A dimension that is a product or a slice is written out where it occurs. Struct fields carry their
shape as a comment, because run-time shape checking of constructors breaks `jax.tree.map`.
"""

from typing import Any

from jaxtyping import Array, Bool, Float, Int, UInt

Params = dict[str, Any]
"""A nested dict of arrays: what Flax modules and Orbax items hold."""

__all__ = ["Array", "Bool", "Float", "Int", "Params", "UInt"]
