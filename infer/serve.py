r"""Serves a target with OpenAI's API, speculatively if a draft is given.

MODEL is a model folder, or a checkpoint that is converted once: a folder, a GGUF file or a Hub id;
without it the model that `make chat` fetches is served. Listens at 127.0.0.1:8000;
http://127.0.0.1:8000/ is a chat page. If the environment variable POSS_API_KEY is set, requests
must carry it. SIGTERM lets running answers finish, SIGINT cuts them; a second signal exits at once.
Needs `pip install 'poss-jax[serve]'`.

With several processes (start them as in docs/training.md, "Several hosts"), the model is split
over all their devices, and the first process listens.

    poss serve
    poss serve MODEL --draft DRAFT --batch-size 32
    curl http://127.0.0.1:8000/v1/chat/completions \
        -H 'Content-Type: application/json' -d \
        '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'
"""

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.models import MeshConfig
from poss_jax.config.reading import UserError
from poss_jax.data.progress import progress_bar
from poss_jax.program.arguments import read_arguments
from poss_jax.program.output import print_summary, waiting
from poss_jax.program.running import run_program, start_processes

_ACTIONS = {
    "--precompile-only": {
        "action": "store_true",
        "help": "Compile all programs into the cache folder and exit, as for a container's image.",
    }
}
_SWITCH_SECONDS = 0.0005  # the thread that feeds the device must not wait for HTTP


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments and serves until a signal comes."""
    start_processes()  # before options ask for the device's default tree
    config, args = read_arguments(
        ServeConfig, arguments, prog="infer.serve", doc=__doc__, actions=_ACTIONS
    )
    with waiting("importing JAX ..."):
        import jax

        from poss_jax.engine.leader import follow
        from poss_jax.engine.warm_up import WarmUp
        from poss_jax.program.options import load_engine

        try:
            from poss_jax.serving.app import create_app, make_slots
            from poss_jax.serving.guard import read_api_key
            from poss_jax.serving.server import DrainingServer, listen
        except ImportError as error:
            raise UserError(f"{error.name} is missing; pip install 'poss-jax[serve]'") from error
    config, key = _on_all_devices(config), read_api_key()
    if args.precompile_only:
        compilation = WarmUp(make_slots(load_engine(config), config).shapes())
        for _ in progress_bar(compilation, desc="compiling"):
            pass
        folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # see `run_program`
        brief = {"programs": len(compilation), "folder": folder}
        print_summary(brief, f"{compilation}, in {folder}")
        return
    if jax.process_index() > 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # process 0 drains, and then dismisses
        follow(make_slots(load_engine(config), config))
        return
    sys.setswitchinterval(_SWITCH_SECONDS)
    # A port that is taken shows before models are loaded.
    with closing(listen(config.host, config.port)) as sock:
        with waiting("loading the models ..."):
            slots = make_slots(load_engine(config), config)
        logging.getLogger("poss_jax.access").setLevel(logging.INFO)
        app = create_app(config, slots=slots)
        server = DrainingServer(app, config, api_key=key)
        server.run(sockets=[sock])
    if server.error is not None:
        raise SystemExit(1)  # the log has it


def _on_all_devices(config: ServeConfig) -> ServeConfig:
    """Gives several processes one grid of all devices, unless the config has one."""
    import jax

    if jax.process_count() == 1:
        return config
    mesh = config.mesh or MeshConfig(data=1, tensor=-1)
    if mesh.sizes(jax.device_count()) == (1, 1, 1):
        raise UserError(
            f"mesh {mesh.name}: want all {jax.device_count()} devices of {jax.process_count()} "
            "processes; leave mesh out, or set mesh.tensor to -1"
        )
    return replace(config, mesh=mesh)


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
