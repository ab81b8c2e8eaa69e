"""Documents -> tokens and loss masks -> rows for training, and their order."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poss_jax.config.reading import UserError
from poss_jax.data.conversations import Broken, Chat, Document, Tokens
from poss_jax.data.progress import progress_bar
from poss_jax.data.rendering import encode_rendered
from poss_jax.data.templates import ChatTemplate, RenderedChat
from poss_jax.data.tokenizer import encode_plain, special_ids

_DOCUMENTS_PER_CHUNK = 64


@dataclass(frozen=True)
class Rows:
    """Rows of text to train on: a whole data set, or the batch of a step."""

    tokens: np.ndarray  # [rows T] int32
    loss_mask: np.ndarray  # [rows T] bool; True for trained tokens
    documents: np.ndarray  # [rows T] int32; a token's document within its row, from 1; 0: padding

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice | np.ndarray) -> "Rows":
        return Rows(self.tokens[index], self.loss_mask[index], self.documents[index])


def make_rows(sequences: Sequence[Tokens], length: int, packing: str) -> Rows:
    """Lays sequences into rows of `length` tokens.

    Args:
      sequences: tokenised documents; for `documents` and `none` no longer than a row.
      packing: `stream` (concatenated and cut into rows that count as one document each; an
        incomplete last row is dropped), `documents` (several whole ones per row) or `none` (one
        per row).

    Raises:
      UserError: the sequences do not fill one row.
    """
    if packing == "stream":
        tokens = np.concatenate([np.zeros(0, np.int32), *(each.ids for each in sequences)])
        trained = np.concatenate([np.zeros(0, bool), *(each.trained for each in sequences)])
        shape = len(tokens) // length, length
        if not shape[0]:
            raise UserError(
                f"want a row of {length} tokens, got {len(tokens)} tokens in {len(sequences)} "
                "documents; give more text or lower data.sequence_length"
            )
        tokens, trained = (array[: math.prod(shape)].reshape(shape) for array in (tokens, trained))
        return Rows(tokens.astype(np.int32), trained, np.ones(shape, np.int32))
    if not sequences:
        raise UserError(
            "want documents to train on and some to hold out, got none with a token to train on; "
            "give more, or change data.validation_fraction or data.sequence_length"
        )
    groups = [[index] for index in range(len(sequences))]
    if packing == "documents":
        groups = pack([len(sequence.ids) for sequence in sequences], length)
    tokens, documents = (np.zeros((len(groups), length), np.int32) for _ in range(2))
    loss_mask = np.zeros((len(groups), length), bool)
    for row, group in enumerate(groups):
        end = 0
        for number, index in enumerate(group, start=1):
            ids = sequences[index].ids
            cells = row, slice(end, end + len(ids))
            tokens[cells], documents[cells] = ids, number
            loss_mask[cells] = sequences[index].trained
            end += len(ids)
    return Rows(tokens, loss_mask, documents)


def pack(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Fills rows with documents of at most their `size`: longest first, best fit.

    lengths 5 3 2 4, size 7   ->   rows [0 2] [1 3]

    Returns:
      Documents of every row; both in the order of the documents.
    """
    rows: list[list[int]] = []
    by_capacity: list[list[int]] = [[] for _ in range(size + 1)]  # rows by their free tokens
    is_available = np.zeros(size + 1, bool)  # whether there are any such rows
    for index in np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist():
        capacity = lengths[index] + int(np.argmax(is_available[lengths[index] :]))
        if is_available[capacity]:
            row = by_capacity[capacity].pop()
            is_available[capacity] = bool(by_capacity[capacity])
        else:
            row, capacity = len(rows), size
            rows.append([])
        rows[row].append(index)
        by_capacity[capacity - lengths[index]].append(row)
        is_available[capacity - lengths[index]] = True
    return sorted(sorted(row) for row in rows)


def batch_at(rows: Rows, step: int, batch_size: int, seed: int) -> Rows:
    """Returns the batch of one step from an endless sequence of shuffled epochs.

    A pure function of the step, so a resumed run sees the same batches. Batches cross epoch
    boundaries: every row occurs exactly once per epoch.
    """
    return rows[rows_at(len(rows), step, batch_size, seed)]


def rows_at(num_rows: int, step: int, batch_size: int, seed: int) -> np.ndarray:
    """Indices of the rows that `batch_at` takes."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    shuffled = (divmod(position, num_rows) for position in positions)
    return np.array([_epoch_order(num_rows, seed, epoch)[i] for epoch, i in shuffled])


@functools.lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def encode_documents(
    documents: Sequence[Document], tokenizer: Any, template: ChatTemplate | None = None
) -> Iterator[list[Tokens] | Broken]:
    """Tokenises documents of one kind: all of them texts, chats, chats as text, or tokens.

    A text becomes bos + tokens + eos, all trained; special tokens spelled out in it are plain
    text. In a chat the answers are trained, each after the tokens of its prompt.

    Yields:
      The sequences of every document (several for some chats, see `ChatTemplate.render` and
      `_join`), or why it cannot be used.
    """
    with progress_bar(total=len(documents), desc="tokenise", unit="doc", delay=2) as progress:
        for start in range(0, len(documents), _DOCUMENTS_PER_CHUNK):
            chunk: Sequence[Any] = documents[start : start + _DOCUMENTS_PER_CHUNK]
            if isinstance(chunk[0], Tokens):
                yield from ([tokens] for tokens in chunk)
            elif isinstance(chunk[0], str):
                bos, eos = special_ids(tokenizer, "bos"), special_ids(tokenizer, "eos")
                for ids in encode_plain(tokenizer, chunk):
                    row = np.asarray([*bos, *ids, *eos], np.int32)
                    yield [Tokens(row, np.ones(len(row), bool))]
            else:
                assert template is not None
                rendered = [
                    template.render(document)
                    if isinstance(document, Chat)
                    else template.find_answers(document.text)
                    for document in chunk
                ]
                yield from _encode_chats(rendered, tokenizer)
            progress.update(len(chunk))


def _encode_chats(
    rendered: Sequence[list[RenderedChat] | Broken], tokenizer: Any
) -> Iterator[list[Tokens] | Broken]:
    beginnings: list[str] = []
    for chat in itertools.chain(*(item for item in rendered if not isinstance(item, Broken))):
        beginnings += [chat.text[:end] for end in itertools.chain(*chat.spans)] + [chat.text]
    encoded = iter(encode_rendered(tokenizer, beginnings) if beginnings else [])
    for item in rendered:
        if isinstance(item, Broken):
            yield item
            continue
        sequences: list[Tokens] = []
        for chat in item:
            prefixes = list(itertools.islice(encoded, 2 * len(chat.spans) + 1))
            sequences += _join(chat, prefixes, tokenizer)
        yield sequences


def _join(chat: RenderedChat, encoded: Sequence[list[int]], tokenizer: Any) -> Iterator[Tokens]:
    """Joins prompts, as the target reads them, and answers, as it writes them.

    One sequence holds all turns, unless a prompt tokenises differently from the turns before it. If
    an answer's start merges with the end of its prompt, later prompts hold the merged tokens; then
    a new sequence starts with that prompt. `encoded` holds the tokens up to the start and the end
    of each answer, then of the whole text.
    """
    ids: list[int] = []
    trained: list[bool] = []
    *bounds, complete = encoded
    for asked, answered, span in zip(bounds[::2], bounds[1::2], chat.spans, strict=True):
        if asked[: len(ids)] != ids:
            yield _as_tokens(ids, trained)
            trained = []
        answer = answered[len(asked) :]
        if answered[: len(asked)] != asked:
            answer = _encode_alone(tokenizer, chat.text[slice(*span)])
        trained += [False] * (len(asked) - len(trained)) + [True] * len(answer)
        ids = asked + answer
    yield _as_tokens(complete if complete[: len(ids)] == ids else ids, trained)


def _as_tokens(ids: Sequence[int], trained: Sequence[bool]) -> Tokens:
    """Makes a document; tokens after the last flag are not trained."""
    mask = np.zeros(len(ids), bool)
    mask[: len(trained)] = trained
    return Tokens(np.asarray(ids, np.int32), mask)


def _encode_alone(tokenizer: Any, answer: str) -> list[int]:
    """Encodes an answer after a letter that it does not merge with.

    Some tokenizers put a space before the start of a text.
    """
    for prefix in ("x", "\n", "1"):
        alone, both = encode_rendered(tokenizer, [prefix, prefix + answer])
        if both[: len(alone)] == alone:
            return both[len(alone) :]
    return encode_rendered(tokenizer, [answer])[0]
