"""The checks of annotations in tests, which pyproject.toml names: beartype's."""

import jax
from beartype import BeartypeConf, FrozenDict, beartype

# Where steps are only compiled (`Slots.shapes`), these stand for arrays, here and inside JAX.
_ARRAY = jax.Array | jax.ShapeDtypeStruct | jax.stages.ArgInfo

_CONFIG = BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({jax.Array: _ARRAY}))
check = beartype(conf=_CONFIG)
