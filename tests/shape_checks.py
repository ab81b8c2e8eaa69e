"""The checks of annotations in tests, which pyproject.toml names: beartype's."""

from collections.abc import Callable
from typing import Any

import jax
from beartype import BeartypeConf, FrozenDict, beartype

# Where steps are only compiled (`Slots.shapes`), these stand for arrays, here and inside JAX.
_ARRAY = jax.Array | jax.ShapeDtypeStruct | jax.stages.ArgInfo

_check = beartype(
    conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({jax.Array: _ARRAY}))
)


def check(function: Callable) -> Callable:
    """Checks what a function takes, or only what it returns if its result is annotated.

    jaxtyping has two functions checked at every call, both with all parameters: the first has `Any`
    as its result, the second the annotated one. Both know the same sizes of axes. Functions within
    functions are not checked: they would be wrapped at every call, a twentieth of the tests' time.
    """
    if "<locals>" in function.__qualname__:
        return function
    hints = function.__annotations__
    if hints.get("return", Any) is not Any:
        hints.update((name, Any) for name in hints if name != "return")
    return _check(function)
