"""Prepares data and dtype for both stages of training."""

import logging
from collections.abc import Callable
from itertools import groupby
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from poss_jax.config.models import LlamaConfig
from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError, printable_lines
from poss_jax.config.training import TrainConfig
from poss_jax.data.prepared import Prepared, prepare
from poss_jax.data.rows import Rows
from poss_jax.data.sources import Documents
from poss_jax.program.running import text_marks

from .devices import broadcast_from_first

_SAMPLE_TOKENS = 300
_LOG = logging.getLogger(__name__)


def run_dtype(config: TrainConfig, mesh: Mesh) -> Any:
    """The dtype everything is computed in on these devices."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return jnp.dtype(config.dtype or ("float32" if is_cpu else "bfloat16"))


def prepare_rows(
    folder: AnyPath,
    config: TrainConfig,
    tokenizer: Any,
    llama: LlamaConfig,
    load: Callable[[], Documents] | None = None,
) -> Prepared:
    """Makes training rows and held-out rows.

    Process 0 makes them and the others read its file. In a dry run each process has its own folder
    and makes them itself.

    Args:
      folder: folder of the run, keeps the rows.
      load: reads the documents if the rows are not made yet.

    Raises:
      UserError: the data cannot be used.
    """
    settings = config.data, tokenizer, llama.vocab_size, load, llama.eos_token_ids
    made: list[Prepared] = []
    broadcast_from_first(lambda: made.append(prepare(folder, *settings)))
    prepared = made[0] if made else prepare(folder, *settings)
    length = config.data.sequence_length
    if length > llama.max_position_embeddings:
        _LOG.warning(
            "data.sequence_length %d is more than the %d positions that the target is made for",
            length,
            llama.max_position_embeddings,
        )
    return prepared


def check_held_out(config: TrainConfig, rows: Rows) -> None:
    """Raises UserError if held-out rows do not fill a batch, or have nothing to validate with."""
    held_out, length = len(rows), config.data.sequence_length
    if held_out < config.batch_size:
        raise UserError(
            f"held-out documents fill {held_out} rows of {length} tokens, a batch needs "
            f"{config.batch_size}; give more documents, raise data.validation_fraction, or lower "
            "batch_size (batch_size=1)"
        )
    if not rows[: num_validation_rows(config, held_out)].loss_mask.any():
        raise UserError(
            "held-out rows: none of those that are validated with has a token to train on; raise "
            "validation_rows or data.sequence_length"
        )


def num_validation_rows(config: TrainConfig, available: int) -> int:
    """Held-out rows per validation: as many as the config wants, in full batches."""
    size = config.batch_size
    return min(-(-config.validation_rows // size), available // size) * size


def describe_data(report: dict[str, Any]) -> list[str]:
    """Describes how a data set was used, by the report of `Prepared`, in lines for people."""
    dropped = sum(report["dropped"].values())
    lines = [
        f"data      {report['source']}: {report['records']:,} records of {report['kind']}, "
        f"{dropped:,} of them dropped"
    ]
    if dropped:
        lines.append(f"dropped   {_counts(report['dropped'])}; first {report['first_dropped'][0]}")
    if report["used_in_part"]:
        lines.append(f"in part   {_counts(report['used_in_part'])}")
    if report["template"]:
        lines.append(f"template  {report['template']}")
    if not report["ends_turns"]:
        lines.append(" " * 10 + "no special token ends its answers: the model cannot learn to stop")
    if "features" in report:
        lines.append(f"features  {report['features']}")
    for name, key in (("training", "train"), ("held out", "validation")):
        stats = report[key]
        lengths = ", ".join(f"{key} {value:,}" for key, value in stats["lengths"].items())
        lines += [
            f"{name}  {stats['documents']:,} documents, {stats['tokens']:,} tokens, "
            f"{stats['learnt']:.1%} of them trained on",
            f"          lengths {lengths}; {stats['truncated']:,} cut to a row",
        ]
        if stats["split_by_answer"]:
            lines.append(
                f"          {stats['split_by_answer']:,} chats have a document per answer, because "
                "the template rewrites earlier turns"
            )
        lines.append(
            f"          {stats['rows']:,} rows, packing {report['packing']}, "
            f"{stats['filled']:.1%} filled"
        )
    return lines


def describe_sample(rows: Rows, tokenizer: Any) -> list[str]:
    """Shows the first document of the first row, marking the trained tokens."""
    mark, end_mark = text_marks()
    document = (rows.documents[0] == 1).nonzero()[0]
    begin = max(0, int(rows.loss_mask[0].argmax()) - _SAMPLE_TOKENS // 2)
    shown = document[begin : begin + _SAMPLE_TOKENS]
    parts = []
    for is_trained, group in groupby(shown, lambda index: rows.loss_mask[0, index]):
        text = printable_lines(tokenizer.decode(rows.tokens[0, list(group)]))
        parts.append(f"{mark}{text}{end_mark}" if is_trained else text)
    return [f"sample    {mark}this{end_mark} is trained on", "".join(parts).rstrip("\n")]


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
