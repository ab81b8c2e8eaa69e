"""Settings of data: texts or chats, and rows of their tokens."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from poss_jax.config.models import STRICT
from poss_jax.config.numbers import AtLeastTwo, Count, Fraction


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Source of texts or chats, the tokens to train on, and the layout of rows.

    Attributes:
      source: A .txt, .json or .jsonl file or glob, a data set's id on the Hub or folder, or
        `stdlib` (Python's standard library), `packages` (it and all installed packages),
        `packages:NAME,NAME` (these packages).
      subset: Configuration of the Hub data set.
      split: Split of the Hub data set, or of the saved one.
      format: Format of the records: `chat` (messages, conversations), `pairs` (question and answer,
        instruction and output), `text`, `rendered` (chats already rendered into `text`),
        `tokens` (input_ids, loss_mask), or `auto`, which decides by the first record.
      template: Chat template: null (the tokenizer's own), llama2, llama3, or the path of a
        .jinja file.
      system_prompt: System message for chats that have none.
      train_on: Train on the assistant's turns of a chat, or on `all` turns.
      packing: `stream` (texts concatenated and cut into rows), `documents` (several whole chats per
        row, which do not see each other) or `none` (one per row); null takes stream for texts,
        else documents.
      sequence_length: Number of tokens per row; longer documents are cut unless packing is stream.
      validation_fraction: Share of documents (or packages) held out for validation.
      held_out: Packages to hold out instead, each whole (source packages).
      max_documents: Most documents to read; null reads all.
      max_dropped: Share of unusable records above which the run is refused.
    """

    source: str = "stdlib"
    subset: str | None = None
    split: str = "train"
    format: Literal["auto", "chat", "pairs", "text", "rendered", "tokens"] = "auto"
    template: str | None = None
    system_prompt: str | None = None
    train_on: Literal["assistant", "all"] = "assistant"
    packing: Literal["stream", "documents", "none"] | None = None
    sequence_length: AtLeastTwo = 256
    validation_fraction: Fraction = Field(default=0.05, gt=0)
    held_out: tuple[str, ...] = ()
    max_documents: Count | None = None
    max_dropped: Fraction = 0.5

    def __post_init__(self) -> None:
        if self.held_out and self.packages is None:
            raise ValueError(f"held_out is for source packages, not for {self.source!r}")

    @property
    def packages(self) -> tuple[str, ...] | None:
        """Names of the source packages, () for all; None for other sources."""
        kind, _, names = self.source.partition(":")
        if kind != "packages":
            return None
        return tuple(name.strip() for name in names.split(",") if name.strip())

    @property
    def is_code(self) -> bool:
        """True if the source is Python modules, named by their paths."""
        return self.source == "stdlib" or self.packages is not None
