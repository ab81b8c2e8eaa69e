"""Draft families, one file each; a new one is a `Family` and a line here."""

from poss_jax.config.models import FIRST_FAMILY, DraftConfig
from poss_jax.config.reading import UserError
from poss_jax.model.families.eagle import EAGLE
from poss_jax.model.families.eagle3 import EAGLE3
from poss_jax.model.families.mtp import MTP
from poss_jax.model.specialists import Family
from poss_jax.shapes import Array, Params

FAMILIES: dict[str, Family] = {"eagle": EAGLE, "eagle3": EAGLE3, "mtp": MTP}
"""The families by their name in a draft's config."""


def family_of(config: DraftConfig) -> Family:
    """Finds the family of a draft; refuses one that has no such drafts."""
    family = find_family(config.family)
    items = {path.partition("/")[0] for path in family.parameters}
    has_layers = "further" in items and (family.is_trained_in_chains or not config.is_looped)
    for key, is_unfit in (
        ("has_embedding", config.has_embedding and "embed" not in items),
        ("mask_token", config.mask_token is not None and "mask" not in items),
        ("layers_per_specialist", config.num_further and not has_layers),
    ):
        if is_unfit:
            raise UserError(f"{key}: the family {config.family} has no such drafts; leave it out")
    return family


def find_family(name: str) -> Family:
    """Finds a family by its name."""
    if name not in FAMILIES:
        raise UserError(f"draft family: want one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def method_of(config: DraftConfig) -> str:
    """Names the method of a draft, by family, spans, layers and trained depth."""
    family, spans = family_of(config), config.positions_per_specialist
    deep = f"-deep{config.num_further + 1}" if config.num_further else ""
    if len(spans) == 1:
        return family.method(config) + deep
    digits = spans[:1] if len({*spans}) == 1 else spans
    suffix = "" if config.family == FIRST_FAMILY else f"-{config.family}"
    return f"poss{''.join(map(str, digits))}{deep}{suffix}"


def init_draft(config: DraftConfig, key: Array) -> Params:
    """Draws a random draft; see its family's `init`."""
    return family_of(config).init(config, key)
