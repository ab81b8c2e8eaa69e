"""Draft families, one file each; a new one is a `Family` and a line here."""

from poss_jax.config.models import DraftConfig
from poss_jax.config.reading import UserError
from poss_jax.model.families.eagle import EAGLE
from poss_jax.model.families.eagle3 import EAGLE3
from poss_jax.model.families.mtp import MTP
from poss_jax.model.specialists import Family
from poss_jax.shapes import Array, Params

FAMILIES: dict[str, Family] = {"eagle": EAGLE, "eagle3": EAGLE3, "mtp": MTP}
"""The families by their name in a draft's config."""


def family_of(config: DraftConfig) -> Family:
    """Finds the family of a draft; see `find_family`."""
    return find_family(config.family)


def find_family(name: str) -> Family:
    """Finds a family by its name.

    Raises:
      UserError: no family has this name.
    """
    if name not in FAMILIES:
        raise UserError(f"draft family: want one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def init_draft(config: DraftConfig, key: Array) -> Params:
    """Draws a random draft; see its family's `init`."""
    return family_of(config).init(config, key)
