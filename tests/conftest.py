"""The setting of every test: eight CPU devices, one compilation cache, no silent promotion."""

import gc
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from isolation import QUICK_COMPILATION, isolate

# Workers and the programs that tests start inherit the folders: what one compiled, all have.
if "PYTEST_XDIST_WORKER" not in os.environ:
    isolate()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8", QUICK_COMPILATION]
)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs a network
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"  # else an operation keeps its 100 callers
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # until a test wants otherwise

import jax
import pytest

if TYPE_CHECKING:
    from programs import Runs
    from watch import Watch

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

gc.set_threshold(50_000, 20, 100)  # tracing makes many objects, and nearly none in cycles

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """Folder of the recorded models and numbers."""
    return FIXTURES


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Attention and norms on a CPU are XLA's, which it can count."""
    from poss_jax.model import kernel

    jax.clear_caches()
    monkeypatch.setattr(kernel, "has_kernel", lambda: False)
    yield
    jax.clear_caches()


@pytest.fixture
def asks_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process was started with --json, so programs print their whole result."""
    monkeypatch.setattr("sys.argv", ["program", "--json"])


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> "Runs":
    """Folders of the tiny models, which all workers share: nothing may write into them."""
    from programs import tiny_runs  # not before pytest has hooked the type checks into poss_jax

    base = tmp_path_factory.getbasetemp()
    was_optimised = set_optimised(False)  # whichever test is first, all compare with the same bits
    runs = tiny_runs(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base)
    set_optimised(was_optimised)
    return runs


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny target's checkpoint, `source`, and of its conversion, `target`."""
    from convert_sources import convert_tiny  # not before pytest has hooked the type checks

    return convert_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session", autouse=True)
def device_rates() -> None:
    """Keeps made-up rates of this device, which take long to measure in unoptimised programs."""
    from infer.bench import rates  # not before pytest has hooked the type checks into poss_jax

    device = rates.Device(rates.device_name(), 1e10, 1e11, memory_bytes=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rates, "measure_roofline", lambda: rates.Roofline(device, {"int8": 2e11}))
        rates.find_roofline()


@pytest.fixture(scope="module", autouse=True)
def watched_programs(request: pytest.FixtureRequest) -> Iterator["Watch | None"]:
    """Watches the trees of all programs in modules that say `WATCHED = True`.

    JAX keeps no watched program in its cache, so that every worker compiles its own.
    """
    if not getattr(request.module, "WATCHED", False):
        yield None
        return
    from watch import Watch  # not before pytest has hooked the type checks into poss_jax

    watch = Watch()
    with watch.tracing():
        yield watch
    watch.check(at_least=0)


@pytest.fixture(scope="module", autouse=True)
def rows_of_caches(request: pytest.FixtureRequest) -> Iterator[None]:
    """Gives caches the rows that a module names `LEAST_ROWS`: one program for all lengths."""
    with pytest.MonkeyPatch.context() as patch:
        if rows := getattr(request.module, "LEAST_ROWS", None):
            patch.setattr("poss_jax.engine.device._LEAST_ROWS", rows)
        yield


@pytest.fixture
def fresh_programs() -> Iterator[None]:
    """Isolates a test from programs traced or compiled before and after it."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def room_for_programs() -> Iterator[None]:
    """Drops compiled programs before they reach the kernel's limit of memory maps (65,530)."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 40_000:
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles with few optimisations, which halves the time, except what is marked."""
    set_optimised(is_optimised(item))


def set_optimised(is_on: bool) -> bool:
    """Sets how this process, and programs that tests start, compile; returns how they did."""
    was_on = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0"
    if is_on != was_on:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not is_on))
        jax.config.update("jax_disable_most_optimizations", not is_on)
        jax.clear_caches()
    return was_on


def pytest_collection_finish() -> None:
    """Spares the garbage collector what was imported and collected, which stays to the end."""
    gc.freeze()


def is_optimised(item: pytest.Item) -> bool:
    """True if a test compiles as users do."""
    return any(map(item.get_closest_marker, ("optimised", "device")))


def drops_programs(item: pytest.Item) -> bool:
    """True if a test drops all that was compiled before it."""
    return not {"fresh_programs", "without_kernel"}.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run; what drops compiled programs runs before there are many.

    A change of what is optimised drops them, too.
    """
    items.sort(key=lambda item: (not is_optimised(item), not drops_programs(item)))
    has_torch = importlib.util.find_spec("torch") is not None
    for item in items:
        if item.get_closest_marker("torch") and not has_torch:
            item.add_marker(pytest.mark.skip(reason="needs torch: make test-torch"))
        if item.get_closest_marker("device") and jax.default_backend() == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs an accelerator: JAX_PLATFORMS=cuda,cpu"))
