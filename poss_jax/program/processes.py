"""Several processes of one program: joining them."""

import os
from typing import Any

from poss_jax.config.reading import UserError

# Set by launchers of several processes: a process count, or a list of hosts.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")


def start_processes() -> None:
    """Joins the other processes of the run, if the environment names any.

    Reads `JAX_COORDINATOR_ADDRESS` (with `JAX_NUM_PROCESSES` and `JAX_PROCESS_ID`, unless the
    cluster provides them), SLURM, Open MPI, or a TPU pod. Call it before anything uses devices.

    Raises:
      UserError: the others cannot be joined.
    """

    def read_number(name: str) -> int | None:
        return int(os.environ[name]) if name in os.environ else None

    try:
        if not expects_processes(os.environ):
            return
        import jax  # not for `--help`

        if jax.distributed.is_initialized():
            return
        jax.distributed.initialize(
            num_processes=read_number("JAX_NUM_PROCESSES"), process_id=read_number("JAX_PROCESS_ID")
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"cannot join the other processes: {' '.join(str(error).split())[:300]}; set "
            "JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID in each"
        ) from error
    if jax.default_backend() == "cpu":
        # Cached programs run a step's collectives in any order, and deadlock.
        jax.config.update("jax_enable_compilation_cache", False)


def expects_processes(environment: Any) -> bool:
    """True if the environment says that there are several processes."""
    return (
        "JAX_COORDINATOR_ADDRESS" in environment
        or "MEGASCALE_COORDINATOR_ADDRESS" in environment
        or any(int(environment.get(name) or 1) > 1 for name in _COUNTS)
        or any("," in environment.get(name, "") for name in _LISTS)
    )
