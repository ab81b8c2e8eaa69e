"""Acceptance of one-stream drafts whose later specialists do not see the context.

PosS on EAGLE-3 is trained with one stream of keys and values: every specialist attends the context
as specialist 0 projected it. The authors' inference code seems to give each specialist a cache of
its own, of which only specialist 0's is filled with the context. This script changes drafting from
outside in these ways, and measures what each costs:

    one stream    as trained
    own caches    a specialist writes only the rows that it drafts, and attends all rows of its own
                  cache: zeros, or what it once drafted at that position (chains only)
    zeros         the same, but each round begins with zeros in the caches of later specialists
    masked        later specialists attend only the rows that they drafted in this round

Rounds are counted whole, up to the one in which a text grows beyond --max-new-tokens. Decoding
stays lossless in all of these ways, and outputs are compared with autoregressive ones. Prints a
table, and as its last line one JSON object; --output keeps report.json and report.md.

    python -m benchmarks.context --target T --draft PosS-3=P --prompts prompts.jsonl
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from benchmarks.batches import read_tree
from benchmarks.reports import tree_name, write_report
from infer.bench import first_prompts, load_decoders, read_questions
from infer.measure import Decoder
from poss_jax.checkpoint.record import provenance
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.decode import drafting
from poss_jax.decode.metrics import mean_acceptance_length
from poss_jax.decode.tree import Beam
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.model.cache import KVCache
from poss_jax.program.options import at_least, read_pairs
from poss_jax.program.running import Parser, run_program
from poss_jax.shapes import Array, Params

ONE_STREAM, OWN_CACHES, ZEROS, MASKED = WAYS = ("one stream", "own caches", "zeros", "masked")
TREES = ("8/1/9", "4/4/16", "8/10/60")


# --------------------------------------------------------------------------------------------------
# Drafting, changed from outside: specialists have caches of their own, see `own_caches`


def commit_to_the_first(
    params: Params, config: DraftConfig, cache: KVCache, x: Array, num_pairs: Array
) -> KVCache:
    """Appends pairs to the context of specialist 0 alone."""
    return _commit_pairs(params, replace(config, kv="shared"), cache, x, num_pairs)


def enter_level(
    params: Params, config: DraftConfig, cache: KVCache, rows: Array, depth: int
) -> KVCache:
    """Writes the newest level to the cache of the specialist that drafts it, and no earlier one."""
    num_rows, width = rows.shape[1], rows.shape[1] // depth
    first = num_rows - width
    positions = jnp.broadcast_to((cache.length + depth - 1)[:, None], (len(rows), width))
    index = config.specialist_at(depth)
    layer = drafting._specialist(params, config, index)
    return drafting._write_keys_values(
        layer, cache, index, rows[:, first:], positions, cache.length + first
    )


def begin_with_zeros(
    params: Params, config: DraftConfig, tree: TreeConfig, cache: KVCache, *rest: Any
) -> Any:
    """Empties the caches of later specialists and drafts."""
    k, v = ([part[0], *map(jnp.zeros_like, part[1:])] for part in (cache.k, cache.v))
    return _draft(params, config, tree, cache.replace(k=k, v=v), *rest)


def run_level(
    params: Params, config: DraftConfig, cache: KVCache, beam: Beam, x: Array, depth: int
) -> Array:
    """Runs a level; later specialists attend only their own rows of this round."""
    specialist = config.specialist_at(depth)

    def own_rows(cache: KVCache, beam: Beam, depth: int) -> Array:
        can_attend = _level_mask(cache, beam, depth)
        if specialist == 0:
            return can_attend
        width = x.shape[1]
        own = [level + 1 for level in range(depth) if config.specialist_at(level + 1) == specialist]
        level = (jnp.arange(cache.size)[None] - cache.length[:, None]) // width + 1
        return can_attend & jnp.isin(level, jnp.asarray(own))[:, None]

    with mock.patch.object(drafting, "_level_mask", own_rows):
        return _run_level(params, config, cache, beam, x, depth)


_commit_pairs, _draft = drafting.commit_pairs, drafting.draft
_run_level, _level_mask = drafting._run_level, drafting._level_mask

_OWN: Mapping[str, Any] = {"commit_pairs": commit_to_the_first, "_enter_level": enter_level}
CHANGES: dict[str, Mapping[str, Any]] = {
    ONE_STREAM: {"draft": _draft},
    OWN_CACHES: _OWN,
    ZEROS: {**_OWN, "draft": begin_with_zeros},
    MASKED: {**_OWN, "_run_level": run_level},
}


@contextmanager
def changed(engine: Engine, way: str) -> Iterator[Engine]:
    """Gives an engine that drafts in one of the ways; programs compiled before are forgotten."""
    assert engine.draft_config is not None
    other = engine.with_tree(engine.trees)
    if way != ONE_STREAM:
        other.draft_config = replace(engine.draft_config, kv="per_specialist")
    jax.clear_caches()
    with mock.patch.multiple(drafting, **CHANGES[way]):
        yield other
    jax.clear_caches()


# --------------------------------------------------------------------------------------------------
# Measuring


def measure(config: BenchConfig, trees: Sequence[TreeConfig], batch_size: int) -> dict[str, Any]:
    """Decodes all prompts with every draft, tree and way."""
    num_counted = config.max_new_tokens
    config = replace(config, max_new_tokens=num_counted + max(tree.depth for tree in trees) + 1)
    baseline, *decoders = load_decoders(config)
    for decoder in decoders:
        _check_draft(decoder)
    prompts = first_prompts(read_questions(config, baseline.engine))
    expected = _decode(baseline.engine, prompts, batch_size)[0]
    rows = []
    with tqdm(total=len(decoders) * len(trees) * len(WAYS), desc="context") as progress:
        for decoder in decoders:
            for tree in trees:
                row: dict[str, Any] = {"draft": decoder.name, "tree": tree_name(tree), "ways": {}}
                for way in WAYS:
                    progress.update()
                    if way == OWN_CACHES and tree.top_k > 1:
                        continue  # a row of the cache then stands for no one position
                    with changed(decoder.engine.with_tree(tree), way) as engine:
                        outputs, accepted = _decode(engine, prompts, batch_size)
                    row["ways"][way] = {
                        "acceptance_length": mean_acceptance_length(
                            [whole_rounds(rounds, num_counted) for rounds in accepted]
                        ),
                        "equal_outputs": sum(map(np.array_equal, outputs, expected)),
                    }
                rows.append(row)
    return {
        "prompts": len(prompts),
        "max_new_tokens": num_counted,
        "rows": rows,
        "provenance": provenance(),
    }


def whole_rounds(accepted: Sequence[int], num_tokens: int) -> list[int]:
    """Rounds up to the one in which a text grows beyond a number of tokens."""
    before = np.cumsum([0, *(count + 1 for count in accepted[:-1])])
    return [count for count, length in zip(accepted, before, strict=True) if length <= num_tokens]


def _check_draft(decoder: Decoder) -> None:
    draft = decoder.engine.draft_config
    if draft is None or draft.kv != "shared" or draft.num_specialists < 2:
        raise UserError(
            f"draft {decoder.name}: want several specialists that read one stream of keys and "
            "values; give a PosS draft on EAGLE-3"
        )


def _decode(
    engine: Engine, prompts: Sequence[PreparedPrompt], batch_size: int
) -> tuple[list[list[int]], list[list[int]]]:
    answers = engine.decode(prompts, batch_size=batch_size)
    return [one.output_ids for one in answers], [one.accepted_per_round for one in answers]


def format_table(report: dict[str, Any]) -> str:
    """The report as a Markdown table."""
    lines = [
        f"Acceptance length, greedy; {report['prompts']} prompts x {report['max_new_tokens']} "
        "tokens",
        "",
        f"| draft | tree | {' | '.join(WAYS)} |",
        "|---" * (2 + len(WAYS)) + "|",
    ]
    for row in report["rows"]:
        found = [row["ways"].get(way) for way in WAYS]
        cells = [f"{entry['acceptance_length']:.2f}" if entry else "" for entry in found]
        lines.append(f"| {row['draft']} | {row['tree']} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", f"Outputs that differ: {_num_different(report)}"])


def _num_different(report: dict[str, Any]) -> int:
    """Number of outputs that are not the autoregressive ones."""
    entries = [entry for row in report["rows"] for entry in row["ways"].values()]
    return sum(report["prompts"] - entry["equal_outputs"] for entry in entries)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, measures, prints, writes."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", required=True, metavar="DIR")
    parser.add_argument("--draft", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--prompts", default="stdlib", metavar="FILE", help=".jsonl, or stdlib")
    parser.add_argument("--num-prompts", type=at_least(1), default=16, metavar="N")
    parser.add_argument("--max-new-tokens", type=at_least(1), default=96, metavar="N")
    parser.add_argument("--trees", nargs="+", default=TREES, metavar="DEPTH/TOP_K/TOTAL")
    parser.add_argument("--batch-size", type=at_least(1), default=8, metavar="N")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for the report")
    args = parser.parse_args(arguments)
    config = BenchConfig(
        target=args.target,
        drafts=read_pairs("--draft", args.draft, "NAME=DIR"),
        prompts=args.prompts,
        num_prompts=args.num_prompts,
        max_new_tokens=args.max_new_tokens,
    )
    report = measure(config, [read_tree(text) for text in args.trees], args.batch_size)
    print(format_table(report))
    if args.output is not None:
        write_report(report, format_table(report), args.output)
    print(json.dumps(report))
    if _num_different(report):
        raise UserError("outputs differ from autoregressive ones; see the report")


if __name__ == "__main__":
    run_program(main)
