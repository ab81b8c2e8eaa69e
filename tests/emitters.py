"""XLA's older emitters, where it still has them: they compile in a third of the time."""

from importlib.metadata import version
from importlib.util import find_spec

# A libtpu, or an XLA, that does not know the flag ends the process.
OLDER_EMITTERS = (
    "--xla_cpu_use_fusion_emitters=false"
    if version("jaxlib").startswith("0.10.") and not find_spec("libtpu")
    else ""
)
