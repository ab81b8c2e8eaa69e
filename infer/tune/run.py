"""Tunes every draft for every batch size, prints the trees, and keeps the fastest."""

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from poss_jax.checkpoint.record import read_record
from poss_jax.checkpoint.whole import write_output
from poss_jax.config.bench import BenchConfig
from poss_jax.config.models import TreeConfig
from poss_jax.config.paths import AnyPath, as_path, read_text
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.engine.trees import default_tree, tuned_file, vocabulary_file, write_tuned
from poss_jax.model.sharding import decoding_mesh
from poss_jax.program.output import check_writable, print_summary, show_rows, wants_json

from ..bench.journal import Kept, describe
from ..bench.measure import AUTOREGRESSIVE, digest_vocabulary, load_engines, time_answer
from ..bench.questions import first_prompts, read_questions
from ..bench.report import with_provenance
from .search import Tuning, tree_name, tune

_LOG = logging.getLogger(__name__)


def autotune(
    config: BenchConfig,
    batch_sizes: Sequence[int],
    vocabularies: Sequence[str],
    paths: dict[str, AnyPath],
) -> None:
    """Prints predictions and measurements, and writes the fastest trees of every draft."""
    # With an explicit tree the engine does not look for trees that were tuned before.
    tree = config.tree or default_tree()
    engines = load_engines(replace(config, tree=tree, lookup=0))
    baseline = engines[AUTOREGRESSIVE]
    prompts = first_prompts(read_questions(config, baseline))
    if max(batch_sizes) > len(prompts):
        raise UserError(
            f"--batch-sizes: want at most the number of prompts, {len(prompts)}, got "
            f"{max(batch_sizes)}; raise num_prompts"
        )
    kept = Kept("tune", describe(config, engines, prompts))
    settings = baseline.settings
    targets = {
        file: baseline.with_settings(replace(settings, draft_vocabulary=file))
        for file in vocabularies
    }
    tunings = {}  # by draft and vocabulary
    for name, folder in config.drafts.items():
        drafts = {file: target.load_draft(folder) for file, target in targets.items()}
        for file, engine in ({config.draft_vocabulary: engines[name]} | drafts).items():
            title = f"{name}, {digest_vocabulary(engine)}"
            tuning = Tuning(title, engine, prompts, batch_sizes, kept, lookup=config.lookup)
            tunings[name, file] = tuning
    plain = time_answer(baseline, prompts[0]) * len(prompts)
    seconds = sum(tuning.estimate_seconds(plain, config.repeats) for tuning in tunings.values())
    _LOG.warning("tuning %d drafts, about %.0f min", len(tunings), max(seconds / 60, 1))
    entries = {}
    for name, folder in config.drafts.items():
        tuned, gains = {}, {}
        for file in dict.fromkeys((config.draft_vocabulary, *vocabularies)):
            tuned[file] = tune(tunings[name, file], repeats=config.repeats)
            methods = [entry["methods"].values() for entry in tuned[file].values()]
            gains[file] = math.prod(max(row["ratio"] for row in rows) for rows in methods)
            entries[name if file == config.draft_vocabulary else f"{name}, {file}"] = tuned[file]
        best = max(gains, key=lambda file: gains[file])
        _write_tuned(paths[name], folder, tuned[best], best, config)
    kept.finish()
    report = {"drafts": entries, "files": {name: str(path) for name, path in paths.items()}}
    print(_format_tuning(entries))
    print(*(f"trees of {name}: {path}" for name, path in report["files"].items()), sep="\n")
    trees = {
        name: {size: row["best"] for size, row in sizes.items()} for name, sizes in entries.items()
    }
    brief = {"trees": trees, "files": report["files"]}
    print_summary(with_provenance(report, config), "", brief=brief)


def paths_of_trees(
    config: BenchConfig, file: Path | None, *, overwrite: bool
) -> dict[str, AnyPath]:
    """Files that tuned trees are written to, by draft; refused before any work is spent."""
    if file is not None:
        if len(config.drafts) > 1:
            raise UserError("--trees-file: want one draft, got several; tune them one by one")
        for made in (file, vocabulary_file(file)):
            if made.exists() and not overwrite:
                raise UserError(
                    f"--trees-file: {made} exists; name another file or give --overwrite"
                )
        check_writable(file)
        return dict.fromkeys(config.drafts, file)
    for folder in config.drafts.values():
        if as_path(folder).is_dir() and not os.access(as_path(folder), os.W_OK):
            raise UserError(f"draft {folder} may not be written to; give --trees-file FILE")
    mesh = decoding_mesh(config.mesh)
    return {name: tuned_file(folder, mesh) for name, folder in config.drafts.items()}


def _write_tuned(
    path: AnyPath,
    draft: str,
    tuned: dict[int, dict[str, Any]],
    vocabulary: str | None,
    config: BenchConfig,
) -> None:
    record = read_record(draft)
    header = {
        "target": record.target.name,
        "sampling": config_to_dict(config.sampling),
        "draft_vocabulary": vocabulary,
        "quantise": config.quantise,
        "lookup": config.lookup,
        "prompts": config.prompts,
    }
    trees, comments = {}, {}
    for size, entry in tuned.items():
        trees[size] = entry["best"] and TreeConfig(**entry["best"])
        row = entry["methods"][tree_name(trees[size])]
        comments[size] = f"{row['tokens_per_second']:.0f} tokens/s, {row['ratio']:.2f} x no draft"
    if vocabulary is not None:
        write_output(vocabulary_file(path), read_text(as_path(vocabulary)), name="vocabulary")
    mesh = decoding_mesh(config.mesh)
    write_tuned(path, trees, record, header=header, comments=comments, mesh=mesh)


def _format_tuning(drafts: dict[str, dict[int, dict[str, Any]]]) -> str:
    """Lays out all trees that were measured, the best of every batch size in bold."""
    head = ["draft", "batch size", "tree", "predicted tokens/s", "tokens/s", "ratio to no draft"]
    head += ["predicted acceptance length", "acceptance length"]
    table = []
    for name, sizes in drafts.items():
        for size, entry in sizes.items():
            fastest = max(entry["methods"].values(), key=lambda row: row["ratio"])
            for tree, row in entry["methods"].items():
                expected = row["predicted"]
                speed, length = ("", "") if expected is None else expected.values()
                mark = ("**" if wants_json() else "*") if row is fastest else ""
                cells = [name, size, f"{mark}{tree}{mark}"]
                cells += [f"{speed:.0f}" if expected else "", f"{row['tokens_per_second']:.0f}"]
                cells += [f"{row['ratio']:.2f}", f"{length:.2f}" if expected else ""]
                table.append([*cells, f"{row['acceptance_length']:.2f}"])
    return "\n".join(show_rows(head, table))
