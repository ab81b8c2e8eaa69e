"""Loads the models of a program's settings, by default the bundled ones."""

from poss_jax.bundled.conversion import find_model
from poss_jax.bundled.default import default_drafts, default_target
from poss_jax.config.decoding import SMOLLM2, AnswerConfig
from poss_jax.config.paths import as_path
from poss_jax.engine.engine import Engine
from poss_jax.engine.trees import read_trees
from poss_jax.program.arguments import check_depths


def load_engine(config: AnswerConfig) -> Engine:
    """Loads the models of a config, converted if need be; the default target comes with a draft.

    Raises:
      UserError: what `find_model`, `Engine.load` or `read_trees` refuses.
    """
    target, draft = config.target, config.draft
    if target == SMOLLM2:
        target = default_target()
        draft = next(iter(default_drafts().values()), None) if draft is None else draft
    target = find_model(str(target))
    draft = None if draft is None else find_model(str(draft), target=target)
    trees = {} if config.trees is None else read_trees(as_path(config.trees))
    check_depths(trees.values())
    return Engine.load(
        target,
        draft,
        tree=trees or config.tree,
        max_length=config.max_length,
        drafting=config.drafting,
        allow_target_mismatch=config.allow_target_mismatch,
        draft_vocabulary=config.draft_vocabulary,
        draft_window=config.draft_window,
        quantise=config.quantise,
        mesh=config.mesh,
    )
