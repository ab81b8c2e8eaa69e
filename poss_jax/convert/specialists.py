"""A PosS start: every missing specialist is a copy of the last one a trained draft has."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from poss_jax.checkpoint import ModelRecord, describe_item, load_item, new_record, read_record
from poss_jax.config import DraftConfig, UserError
from poss_jax.convert.plan import Conversion, Row
from poss_jax.model.parameters import flatten_item, item_shapes
from poss_jax.shapes import Params


def plan_specialists(
    draft: str | Path,
    positions_per_specialist: tuple[int, ...],
    *,
    trained_depth: int | None = None,
) -> Conversion:
    """Plans a draft with more specialists than the given one.

    Args:
      draft: model folder of the draft to start from.
      positions_per_specialist: of the new draft.
      trained_depth: by default that of the given draft: copying trains nothing.

    Raises:
      UserError: not a draft, or fewer specialists than it already has.
    """
    draft = Path(draft)
    record = read_record(draft)
    if not isinstance(record.config, DraftConfig):
        raise UserError(f"{draft}: want a draft, got a target; give the folder of a draft")
    have, want = record.config.num_specialists, len(positions_per_specialist)
    if want < have:
        raise UserError(
            f"{draft} has {have} specialists, got {want} positions per specialist; "
            f"give at least {have} counts"
        )
    config = replace(
        record.config,
        positions_per_specialist=positions_per_specialist,
        trained_depth=trained_depth or record.config.trained_depth,
    )
    origins = {name: _origin(name, have) for name in item_shapes(config)}
    return Conversion(
        record=new_record(
            config,
            record.target,
            tokenizer_from=draft,
            draft_vocabulary=record.draft_vocabulary,
        ),
        rows=_rows(draft, record, origins),
        items=_items(draft, record, origins),
        num_items=len(origins),
        tokenizer_from=draft,
    )


def _origin(name: str, have: int) -> str:
    """The existing item that becomes item `name`."""
    group, _, index = name.partition("/")
    return f"{group}/{min(int(index), have - 1)}" if index else name


def _items(
    draft: Path, record: ModelRecord, origins: dict[str, str]
) -> Iterator[tuple[str, Params]]:
    for name, origin in origins.items():
        yield name, load_item(draft, record, origin)


def _rows(draft: Path, record: ModelRecord, origins: dict[str, str]) -> list[Row]:
    return [
        Row("/".join((origin, *path)), "/".join((name, *path)), array.shape, array.dtype.name)
        for name, origin in origins.items()
        for path, array in flatten_item(describe_item(draft, record, origin)).items()
    ]
