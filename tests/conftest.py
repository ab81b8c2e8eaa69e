"""What every test runs under: eight CPU devices, one compilation cache, no silent promotion."""

import atexit
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network
# Workers and the programs that tests start inherit the folder: what one compiled, all have.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="poss_jax-compiled-")
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of the recorded models and numbers."""
    return FIXTURES


@pytest.fixture(scope="module", autouse=True)
def whole_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles quickly in the tests of whole programs (those with `tiny_runs`), and watches trees.

    Their numbers are compared with each other only. What is compared with recorded or exact
    numbers, and the texts of every shape of tree, is compiled as users compile it.
    """
    if not hasattr(request.module, "tiny_runs"):
        yield
        return
    from watch import Watch  # not before pytest has hooked the type checks into poss_jax

    watch = Watch()
    with pytest.MonkeyPatch.context() as patch, watch.tracing():
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # for programs that tests start
        _optimise(False)
        yield
    _optimise(True)
    watch.check(at_least=0)


def _optimise(is_wanted: bool) -> None:
    jax.config.update("jax_disable_most_optimizations", not is_wanted)
    jax.clear_caches()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run."""
    has_torch = importlib.util.find_spec("torch") is not None
    for item in items:
        if item.get_closest_marker("torch") and not has_torch:
            item.add_marker(pytest.mark.skip(reason="needs torch: make test-torch"))
        if item.get_closest_marker("device") and jax.default_backend() == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs an accelerator: JAX_PLATFORMS=cuda"))
