"""Settings of the programs that examine the drafts of a benchmark: tune, lossless."""

import argparse
import logging
from collections.abc import Sequence
from dataclasses import replace

from poss_jax.config.bench import BenchConfig
from poss_jax.config.reading import UserError
from poss_jax.program.arguments import Actions, read_arguments
from poss_jax.program.output import waiting

_LOG = logging.getLogger(__name__)


def read_settings(
    kind: type[BenchConfig],
    arguments: Sequence[str] | None,
    *,
    prog: str,
    doc: str | None,
    actions: Actions,
) -> tuple[BenchConfig, argparse.Namespace]:
    """Reads a command line of drafts, with the first of several temperatures and seeds."""
    config, args = read_arguments(kind, arguments, prog=prog, doc=doc, actions=actions)
    if args.output is not None:
        _LOG.warning("%s prints its report; nothing is written to --output", prog)
    sampling = replace(
        config.sampling,
        temperature=(*config.temperatures, config.sampling.temperature)[0],
        seed=(*config.seeds, config.sampling.seed)[0],
    )
    with waiting("importing JAX ..."):
        from .measure import with_default_models
    config = with_default_models(replace(config, sampling=sampling))
    if not config.drafts:
        raise UserError("want at least one draft; give --draft NAME=DIR")
    if config.drafting == "sampled":
        raise UserError("drafting: sampled drafts change texts; choose coupled or argmax")
    if config.methods:
        raise UserError("want drafts alone, got methods, which may change texts; leave them out")
    return config, args
