"""Number of drawn cases: a few fixed ones in the tests, new ones in `make fuzz`."""

from hypothesis import HealthCheck, settings

_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
_COMMON = {"deadline": None, "database": None, "suppress_health_check": _SLOW}
settings.register_profile("few", max_examples=12, derandomize=True, **_COMMON)
settings.register_profile("fuzz", max_examples=100, **_COMMON)
settings.load_profile("few")
