"""Rows of tokens for training, and their order."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from poss_jax.config.reading import UserError
from poss_jax.data.conversations import Tokens


@dataclass(frozen=True)
class Rows:
    """Rows of text to train on: a whole data set, or the batch of a step.

    Attributes:
      tokens: [rows T] int32.
      loss_mask: [rows T] bool; True for trained tokens.
      documents: [rows T] int32; document of a token within its row, from 1; 0 is padding at the
        row's end.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    documents: np.ndarray

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
        return _chop(sequences, length)
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


def _chop(sequences: Sequence[Tokens], length: int) -> Rows:
    tokens = np.concatenate([np.zeros(0, np.int32), *(sequence.ids for sequence in sequences)])
    trained = np.concatenate([np.zeros(0, bool), *(sequence.trained for sequence in sequences)])
    rows = len(tokens) // length
    if not rows:
        raise UserError(
            f"want a row of {length} tokens, got {len(tokens)} tokens in {len(sequences)} "
            "documents; give more text or lower data.sequence_length"
        )
    tokens, trained = (array[: rows * length].reshape(rows, length) for array in (tokens, trained))
    return Rows(tokens.astype(np.int32), trained, np.ones(tokens.shape, np.int32))


@functools.lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)
