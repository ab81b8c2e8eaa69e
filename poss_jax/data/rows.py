"""Rows of tokens that a training step is fed, and their order."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tqdm import tqdm

from poss_jax.config import UserError
from poss_jax.data.tokenizer import encode_plain, special_ids

if TYPE_CHECKING:
    import transformers

_DOCUMENTS_PER_CHUNK = 64


@dataclass(frozen=True)
class Rows:
    """Rows of text to train on: a whole data set, or the batch of a step.

    Attributes:
      tokens: [rows T] int32.
      loss_mask: [rows T] bool; True where a token is to be learnt from.
      documents: [rows T] int32; which document of its row a token belongs to, counted from 1;
        0: padding at the row's end.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    documents: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: slice | np.ndarray) -> "Rows":
        return Rows(self.tokens[index], self.loss_mask[index], self.documents[index])


def token_rows(
    texts: Sequence[str], tokenizer: "transformers.PreTrainedTokenizerBase", length: int
) -> Rows:
    """Packs documents, each as bos + tokens + eos, into rows of `length` tokens; drops the rest.

    Text that looks like a special token is encoded as plain text.

    Raises:
      UserError: the texts do not fill one row.
    """
    bos, eos = special_ids(tokenizer, "bos"), special_ids(tokenizer, "eos")
    pieces = [np.zeros(0, np.int32)]
    with tqdm(total=len(texts), desc="tokenise", unit="doc", delay=2) as progress:
        for start in range(0, len(texts), _DOCUMENTS_PER_CHUNK):
            chunk = texts[start : start + _DOCUMENTS_PER_CHUNK]
            encoded = encode_plain(tokenizer, chunk)
            pieces += [np.asarray([*bos, *ids, *eos], np.int32) for ids in encoded]
            progress.update(len(chunk))
    tokens = np.concatenate(pieces)
    rows = len(tokens) // length
    if not rows:
        raise UserError(
            f"want a row of {length} tokens, got {len(tokens)} tokens in {len(texts)} documents; "
            "give more text or lower data.sequence_length"
        )
    tokens = tokens[: rows * length].reshape(rows, length)
    return Rows(tokens, np.ones(tokens.shape, bool), np.ones(tokens.shape, np.int32))


def batch_at(rows: Rows, step: int, batch_size: int, seed: int) -> Rows:
    """Takes the batch of one step out of an endless sequence of shuffled epochs.

    A pure function of the step, so a resumed run sees what an uninterrupted one would. Batches
    cross epoch boundaries: every row occurs exactly once per epoch.
    """
    return rows[rows_at(len(rows), step, batch_size, seed)]


def rows_at(num_rows: int, step: int, batch_size: int, seed: int) -> np.ndarray:
    """Which rows `batch_at` takes."""
    positions = range(step * batch_size, (step + 1) * batch_size)
    places = (divmod(position, num_rows) for position in positions)
    return np.array([_epoch_order(num_rows, seed, epoch)[i] for epoch, i in places])


@functools.lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)
