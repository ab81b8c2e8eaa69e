"""Loads the models of a program's settings, by default the bundled ones, and settles sampling."""

import logging
from dataclasses import replace

from poss_jax.bundled.default import default_drafts, find_model, with_bundled
from poss_jax.config.decoding import SMOLLM2, AnswerConfig, SamplingConfig, SamplingOptions
from poss_jax.config.paths import as_path
from poss_jax.engine.engine import Engine
from poss_jax.engine.trees import default_lookup, read_trees

_LOG = logging.getLogger(__name__)


def load_engine(config: AnswerConfig) -> Engine:
    """Loads the models of a config, converted if need be; the default target comes with a draft.

    Raises:
      UserError: what `find_model`, `Engine.load` or `read_trees` refuses.
    """
    if config.draft is None and config.target == SMOLLM2:
        config = replace(config, draft=next(iter(default_drafts()), None))
    if config.lookup and config.trees == "none":  # copies alone
        config = replace(config, draft=None, trees=None)
    config = with_bundled(config)
    target = find_model(str(config.target))
    draft = None if config.draft is None else find_model(config.draft, target=target)
    trees = {} if config.trees is None else read_trees(as_path(config.trees))
    lookup = config.lookup
    if lookup is None:
        lookup = 0 if draft is None else default_lookup(config.drafting)
    settings = config.for_engine(lookup=lookup, tree=trees or config.tree)
    return Engine.load(target, draft, settings, mesh=config.mesh)


def choose_sampling(options: SamplingOptions, engine: Engine) -> SamplingConfig:
    """Returns how a program samples: as the user says, else as the model's authors do; logs it."""
    sampling = options.over(engine.recommended)
    defaults = [name for name in sampling.changed if getattr(options, name) is None]
    _LOG.warning(
        "sampling: %s%s", sampling, f" (the model's own {', '.join(defaults)})" if defaults else ""
    )
    return sampling
