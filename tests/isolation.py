"""The environment that a run of the tests begins with: what a user has set changes no test.

It has XLA's older emitters, where XLA still has them: they compile in a third of the time. A
program's kernels go through LLVM together: in 32 parts, small programs cost a fifth more. Two
passes over loops are left out, a fifth of the compilation of a program that decodes.
"""

import atexit
import os
import shutil
import tempfile
from importlib.metadata import version
from importlib.util import find_spec

KEPT = ("JAX_PLATFORMS", "POSS_JAX_FIXTURES", "POSS_JAX_FIXTURES_E3")
# A libtpu, or an XLA, that does not know the flags ends the process.
QUICK_COMPILATION = (
    "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_disable_hlo_passes=simplify-while-loops,while-loop-invariant-code-motion"
    if version("jaxlib").startswith("0.10.") and not find_spec("libtpu")
    else ""
)


def isolate() -> None:
    """Drops settings of the libraries and of ours, and gives the run a home of its own."""
    compiled = os.environ.get("JAX_COMPILATION_CACHE_DIR", "")
    for name in [*os.environ]:
        if name.startswith(("HF_", "JAX_", "POSS_", "XDG_")) and name not in KEPT:
            del os.environ[name]
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # programs that tests start find ours compiled
    home = tempfile.mkdtemp(prefix="poss_jax-tests-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ["HOME"] = home
    # Several runs may share what they compile, in a folder where made-up rates mislead nobody.
    shared = f"{compiled if os.path.isdir(compiled) else home}/tests"
    os.environ["JAX_COMPILATION_CACHE_DIR"] = shared
