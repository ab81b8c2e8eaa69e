"""Drafts by depth: how their features drift, and what is accepted where.

The target answers every prompt greedily. Each draft then drafts a chain from every position of
these answers, teacher-forced as in training's validation, and also decodes the prompts with chains.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from poss_jax.checkpoint.folder import load_draft, load_target, read_dense
from poss_jax.checkpoint.record import ModelRecord
from poss_jax.config.bench import DRIFT_DEPTH, BenchConfig
from poss_jax.config.decoding import SamplingConfig
from poss_jax.config.models import DraftConfig, TreeConfig
from poss_jax.config.reading import UserError
from poss_jax.config.training import ObjectiveConfig
from poss_jax.data.conversations import Tokens
from poss_jax.data.progress import progress_bar
from poss_jax.data.rows import Rows, make_rows
from poss_jax.engine.answers import Generation, mean_acceptance_length
from poss_jax.engine.device import default_dtype
from poss_jax.engine.dialogue import Dialogue
from poss_jax.engine.engine import Engine
from poss_jax.learn.task import DraftTask
from poss_jax.learn.validation import DraftSums, make_draft_validation
from poss_jax.model.documents import TrainBatch
from poss_jax.model.specialists import split_embedding
from poss_jax.model.target import stack_layers
from poss_jax.program.output import fold, format_rows
from poss_jax.shapes import Params

from .measure import AUTOREGRESSIVE, load_engines, play
from .questions import read_questions
from .summary import (
    LOOPING_BELOW,
    compare,
    count_reaching,
    distinct_ngram_share,
    estimate,
    estimate_mean,
    format_estimate,
    share,
)

Answers = list[list[Generation]]
"""Answers to the turns of every question."""

_COLUMNS = {
    "feature_cosine": "cosine",
    "feature_distance": "distance",
    "agreement": "agreement",
    "conditional_acceptance": "accepted",
    "decoded_conditional_acceptance": "decoded",
    "gap": "gap",
}
_SO_FAR = {"cumulative_acceptance": "accepted", "decoded_cumulative_acceptance": "decoded"}


@dataclass(frozen=True)
class Followed:
    """Predictions of a draft along known texts."""

    config: DraftConfig
    sums: DraftSums  # over each text; arrays [texts ...]
    tokens: np.ndarray  # [texts R T] most likely token at every depth and row


def study(config: BenchConfig, depth: int = DRIFT_DEPTH) -> dict[str, Any]:
    """Measures all drafts of a benchmark on its first set.

    Returns:
      The report, JSON-compatible (see docs/experiments.md).
    """
    read_dense(config.target)  # refuses others before anything is decoded
    texts, looping, decoded = decode(config, depth)
    record, target = load_target(config.target, default_dtype())
    target |= {"layers": stack_layers(target["layers"])}
    rows = lay_out(texts)
    drafts = {}
    for name in config.drafts:
        followed = follow(config, name, record, target, rows, depth)
        drafts[name] = describe_draft(texts, decoded[name], followed)
    lengths = {name: _lengths(answers) for name, answers in decoded.items()}
    return {
        "prompts": len(texts),
        "looping_prompts": looping,
        "max_new_tokens": config.max_new_tokens,
        "depth": depth,
        "drafts": drafts,
        "pairs": [
            {"drafts": pair, **compare(*(lengths[name] for name in pair))}
            for pair in combinations(config.drafts, 2)
        ],
    }


def decode(config: BenchConfig, depth: int) -> tuple[Answers, list[int], dict[str, Answers]]:
    """Answers questions without a draft, then the ones that do not loop with each draft's chains.

    Returns:
      The target's answers, the questions left out since their answers loop (none if all do), and
      the answers with each draft.
    """
    chains = replace(
        config,
        prompts=config.sets[0],
        datasets=(),
        sampling=SamplingConfig(),
        drafting="coupled",
        lookup=0,
        tree=TreeConfig(depth=depth, top_k=1, total_tokens=depth + 1),
    )
    engines = load_engines(chains)
    baseline = engines.pop(AUTOREGRESSIVE)
    questions = read_questions(chains, baseline)
    texts = _answer(AUTOREGRESSIVE, baseline, questions)
    shares = [distinct_ngram_share(_join(turns, "output_ids")) for turns in texts]
    kept = [i for i, s in enumerate(shares) if s >= LOOPING_BELOW] or list(range(len(texts)))
    texts, questions = [texts[i] for i in kept], [questions[i] for i in kept]
    longest = max(len(answer.output_ids) for answers in texts for answer in answers)
    if longest <= depth:
        raise UserError(
            f"drift: want an answer of more than {depth} tokens, the longest has {longest}; give "
            "other prompts"
        )
    looping = [i for i in range(len(shares)) if i not in kept]
    return texts, looping, {name: _answer(name, engines[name], questions) for name in engines}


def _answer(name: str, engine: Engine, questions: Sequence[Dialogue]) -> Answers:
    bar = progress_bar(questions, desc=name, unit="prompt")
    return [[timed.answer for timed in play(engine, [question])[0]] for question in bar]


def lay_out(texts: Answers) -> Rows:
    """Makes one row per answer: its prompt, then the answer."""
    sequences = []
    for answer in chain.from_iterable(texts):
        ids = _all_ids(answer)
        sequences.append(Tokens(np.array(ids), np.arange(len(ids)) >= len(answer.prompt_ids)))
    return make_rows(sequences, max(len(sequence.ids) for sequence in sequences), "none")


def follow(
    config: BenchConfig,
    name: str,
    target_record: ModelRecord,
    target: Params,
    rows: Rows,
    depth: int,
) -> Followed:
    """Lets a draft predict along texts, teacher-forced: the validation of training, text by text.

    The target's layers are stacked.
    """
    record, draft = load_draft(
        config.drafts[name],
        default_dtype(),
        target=target_record,
        allow_target_mismatch=config.allow_target_mismatch,
    )
    draft, embedding = split_embedding(draft | {"specialists": stack_layers(draft["specialists"])})
    target = target | {"draft": embedding}
    task = DraftTask(
        target_record.llama, record.draft, ObjectiveConfig(), vocabulary=record.draft_vocabulary
    )
    validate = make_draft_validation(task, depth)

    @jax.jit
    def run(draft: Params, target: Params, batch: TrainBatch) -> tuple[DraftSums, jax.Array]:
        sums, shown = validate(draft, target, batch)
        return sums._replace(losses={}), shown.tokens[:, 0]

    results = []
    for index in progress_bar(range(len(rows)), desc=f"{name}, teacher-forced", unit="text"):
        row = rows[index : index + 1]
        batch = TrainBatch(*map(jnp.asarray, (row.tokens, row.loss_mask, row.documents)))
        results.append(jax.device_get(run(draft, target, batch)))
    sums, tokens = jax.tree.map(lambda *parts: np.stack(parts), *results)
    return Followed(record.draft, sums, tokens)


def describe_draft(texts: Answers, decoded: Answers, followed: Followed) -> dict[str, Any]:
    """Computes all numbers of one draft from the target's answers, and its own with chains."""
    first_texts = np.cumsum([0, *(len(turns) for turns in texts[:-1])])
    sums = jax.tree.map(
        lambda of_texts: np.add.reduceat(of_texts, first_texts, dtype=np.float64), followed.sums
    )
    num_depths = sums.accepted.shape[1]
    # A round that the end of an answer cuts short does not reach the depths beyond the cut.
    offered, reached = (
        count_reaching([np.array(_join(turns, name)) for turns in decoded], num_depths)
        for name in ("offered_per_round", "accepted_per_round")
    )
    chains = np.repeat(sums.num_chains[:, None], num_depths, axis=1)
    tested = np.concatenate([chains[:, :1], sums.accepted[:, :-1]], axis=1)
    rounds = sums.accepted, tested, reached, offered
    by_depth = {
        "agreement": estimate(share, sums.agreement, sums.num_trained),
        "conditional_acceptance": estimate(share, sums.accepted, tested),
        "cumulative_acceptance": estimate(share, sums.accepted, chains),
        "decoded_conditional_acceptance": estimate(share, reached, offered),
        "decoded_cumulative_acceptance": estimate(
            lambda reached, offered: share(reached, offered).cumprod(axis=0), reached, offered
        ),
        "gap": estimate(lambda a, b, r, o: share(r, o) - share(a, b), *rounds),
    }
    if sums.cosine is not None:
        by_depth |= {
            "feature_cosine": estimate(share, sums.cosine, sums.num_trained),
            "feature_distance": estimate(share, sums.distance, sums.num_trained),
        }
    return {
        "specialists": [followed.config.specialist_at(depth) for depth in range(num_depths)],
        "by_depth": by_depth,
        "simulated_acceptance_length": estimate(
            lambda accepted, chains: 1 + share(accepted, chains).sum(axis=0), sums.accepted, chains
        ),
        "decoded_acceptance_length": estimate_mean(_lengths(decoded)),
        "rounds_as_predicted": _share_as_predicted(texts, decoded, followed.tokens),
    }


def _share_as_predicted(texts: Answers, decoded: Answers, tokens: np.ndarray) -> float | None:
    """Share of rounds that accept what teacher forcing predicts; None if no text is equal.

    A round that begins after row s should accept as many tokens as hit in sequence on the diagonal
    from there. The next round begins after the accepted tokens and the target's one. `tokens` are
    those of `Followed`.
    """
    pairs = [
        pair
        for turns, answers in zip(texts, decoded, strict=True)
        for pair in zip_longest(turns, answers[: len(turns)])  # rounding may end a dialogue early
    ]
    is_predicted = []
    for (text, answer), predictions in zip(pairs, tokens, strict=True):
        if not answer or _all_ids(answer) != _all_ids(text):
            continue
        ids, row = _all_ids(answer), len(answer.prompt_ids) - 1
        hits = predictions[:, : len(ids) - 2] == np.array(ids[2:])
        for accepted in answer.accepted_per_round:
            is_predicted.append(accepted == hits.diagonal(row).cumprod().sum())
            row += accepted + 1
    return float(np.mean(is_predicted)) if is_predicted else None


def _all_ids(answer: Generation) -> list[int]:
    """Tokens of a prompt and its answer."""
    return [*answer.prompt_ids, *answer.output_ids]


def _lengths(answers: Answers) -> np.ndarray:
    """Acceptance length of every question."""
    accepted = [_join(turns, "accepted_per_round") for turns in answers]
    return np.array([mean_acceptance_length([counts]) for counts in accepted])


def _join(answers: Sequence[Generation], name: str) -> list[int]:
    """The lists of that name of all answers of one dialogue, one after the other."""
    return [number for answer in answers for number in getattr(answer, name)]


def format_report(report: dict[str, Any]) -> str:
    """The report as Markdown tables."""
    head = ["draft", "acceptance length, simulated", "decoded", "rounds as predicted"]
    table = []
    for name, draft in report["drafts"].items():
        lengths = (draft[f"{kind}_acceptance_length"] for kind in ("simulated", "decoded"))
        predicted = draft["rounds_as_predicted"]
        cells = [name, *map(format_estimate, lengths)]
        table.append([*cells, "" if predicted is None else f"{predicted:.1%}"])
    lines = [
        f"{report['prompts']} prompts x {report['max_new_tokens']} new tokens, greedy, chains of "
        f"depth {report['depth']}; left out since their answers loop: {report['looping_prompts']}; "
        "[95 % interval over prompts]\n",
        *format_rows(head, table),
    ]
    pairs = []
    for pair in report["pairs"]:
        first, second = pair["drafts"]
        difference = format_estimate(pair["difference"], digits=3)
        pairs.append([f"{second} less {first}", difference, f"{pair['p_value']:.4f}"])
    if pairs:
        head = ["pair", "difference of decoded acceptance length", "p"]
        lines += ["", *format_rows(head, pairs)]
    for name, draft in report["drafts"].items():
        lines += [f"\n{name}, by position:\n", *_table_by_depth(draft, _COLUMNS), ""]
        lines += fold("accepted so far", _table_by_depth(draft, _SO_FAR))
        if "feature_cosine" not in draft["by_depth"]:
            lines.append("\n(no cosine: it predicts its own state, not the target's feature)")
    return "\n".join(lines)


def _table_by_depth(draft: dict[str, Any], columns: dict[str, str]) -> list[str]:
    present = {key: name for key, name in columns.items() if key in draft["by_depth"]}
    table = []
    for depth, specialist in enumerate(draft["specialists"]):
        numbers = (draft["by_depth"][key] for key in present)
        here = ({key: values[depth] for key, values in number.items()} for number in numbers)
        table.append([depth + 1, specialist + 1, *map(format_estimate, here)])
    return format_rows(["position", "specialist", *present.values()], table)
