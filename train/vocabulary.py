"""Counts the tokens that a draft trains on, and makes draft vocabularies of the most frequent."""

import argparse
from typing import Any

import numpy as np

from poss_jax.bundled.default import with_bundled
from poss_jax.checkpoint.record import (
    SMALLEST,
    DraftVocabulary,
    read_record,
    write_draft_vocabulary,
)
from poss_jax.config.paths import as_path
from poss_jax.config.reading import UserError, config_to_dict, load_config
from poss_jax.config.training import TrainConfig
from poss_jax.data.prepared import make_prepared
from poss_jax.data.records import load_documents
from poss_jax.data.rows import Rows
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.program.output import check_new_file, show_rows


def count(args: argparse.Namespace) -> dict[str, Any]:
    """Counts, prints coverages, and writes the vocabulary that is wanted; returns the summary."""
    if args.output is not None:
        if args.size is None and args.coverage is None:
            raise UserError("--output wants a draft vocabulary; add --size or --coverage")
        check_new_file(args.output)
    config = with_bundled(load_config(TrainConfig, args.config, args.overrides))
    counts = count_tokens(config)
    trained = counts[0]
    size = args.size if args.coverage is None else size_for_coverage(trained, args.coverage)
    summary: dict[str, Any] = {"vocab_size": len(trained), "output": None}
    if size is not None:
        tokens = choose_tokens(trained, size)
        summary |= {"size": size, "coverage": coverage_of(trained, tokens)}
        if args.output is not None:
            source = {"target": config.target, "data": config_to_dict(config.data)}
            vocabulary = DraftVocabulary(
                vocab_size=len(trained),
                tokens=tuple(tokens.tolist()),
                coverage=summary["coverage"],
                source=source | {"trained_tokens": int(trained.sum())},
            )
            write_draft_vocabulary(args.output, vocabulary)
            summary["output"] = str(args.output)
    vocab_size, num_seen = len(trained), int((trained > 0).sum())
    powers = {1 << power for power in range(4, vocab_size.bit_length())}
    sizes = powers | {vocab_size, size or vocab_size}
    table = []
    for shown in sorted(sizes):
        tokens = choose_tokens(trained, shown)
        table.append([shown, *(f"{coverage_of(split, tokens):.2%}" for split in counts)])
    lines = [
        f"{config.data.source}: {trained.sum():,} tokens are trained on, {num_seen:,} of "
        f"{vocab_size:,} different ones occur",
        "",
        *show_rows(["size", "coverage, training", "coverage, held out"], table),
    ]
    if size is not None and size > num_seen:
        lines += ["", f"{size - num_seen:,} of the {size:,} tokens never occur: the lowest ids"]
    print("\n".join(lines))
    return summary


def count_tokens(config: TrainConfig) -> tuple[np.ndarray, np.ndarray]:
    """Counts the tokens that a draft's run trains on.

    Returns:
      How often each token occurs in the training rows and in the held-out rows, [V] int64 each.

    Raises:
      UserError: the run trains no draft, or training refuses its data.
    """
    if config.stage != "draft" or config.target is None:
        raise UserError("want the config of a draft (stage: draft), got one of a target")
    llama = read_record(config.target, "target").llama
    vocab_size, stop_ids = llama.vocab_size, llama.eos_token_ids
    tokenizer = load_tokenizer(as_path(config.target))
    rows = make_prepared(load_documents(config.data), config.data, tokenizer, vocab_size, stop_ids)
    return count_trained(rows.train, vocab_size), count_trained(rows.validation, vocab_size)


def count_trained(rows: Rows, vocab_size: int) -> np.ndarray:
    """Counts how often each token occurs as a trained token, [V] int64."""
    return np.bincount(rows.tokens[rows.loss_mask], minlength=vocab_size)


def choose_tokens(counts: np.ndarray, size: int) -> np.ndarray:
    """Chooses the most frequent tokens (EAGLE-3's rule) by their counts [V]; ids [size] int32.

    Ties go to the lowest ids, so tokens that never occur fill the vocabulary from the lowest id.
    """
    if not SMALLEST <= size <= len(counts):
        raise UserError(
            f"draft vocabulary: want a size of {SMALLEST} to {len(counts)}, the number of tokens "
            f"of the target, got {size}"
        )
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def size_for_coverage(counts: np.ndarray, coverage: float) -> int:
    """Finds the smallest size whose tokens cover a share of the counted ones."""
    shares = np.cumsum(np.sort(counts)[::-1]) / counts.sum()
    return max(SMALLEST, int(np.argmax(shares >= coverage)) + 1)


def coverage_of(counts: np.ndarray, tokens: np.ndarray) -> float:
    """Share of the counted tokens that are in a vocabulary."""
    return float(counts[tokens].sum() / counts.sum())
