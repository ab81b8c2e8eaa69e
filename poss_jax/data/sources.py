"""Documents of a data set, the tally of its records, and the held-out split."""

import hashlib
from collections import Counter
from dataclasses import dataclass, field

from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.data.conversations import Document, content_key, detect_format, read_document
from poss_jax.data.progress import progress_bar
from poss_jax.data.records import Broken, read_records

_NAMED = 3  # of the dropped records


@dataclass
class Tally:
    """Counts of a data set's records: read, dropped, cut.

    Attributes:
      source: source of the records.
      records: how many were read.
      dropped: reason -> how many could not be used.
      cut: reason -> how many chats were cut.
      first_dropped: the first dropped ones: their sources and reasons.
    """

    source: str
    records: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: Counter[str] = field(default_factory=Counter)
    first_dropped: list[str] = field(default_factory=list)

    def drop(self, where: str, broken: Broken) -> None:
        """Counts a dropped record."""
        self.dropped[broken.reason] += 1
        if len(self.first_dropped) < _NAMED:
            self.first_dropped.append(f"{where}: {broken}")

    def check(self, max_share: float) -> None:
        """Raises UserError if nothing is left, or more than a share `max_share` was dropped."""
        dropped = self.dropped.total()
        if dropped and (dropped == self.records or dropped > max_share * self.records):
            reasons = ", ".join(f"{reason} {n}" for reason, n in self.dropped.most_common())
            raise UserError(
                f"data.source {self.source!r}: {dropped} of {self.records} records cannot be used "
                f"({reasons}; first {self.first_dropped[0]}); mend them or raise data.max_dropped"
            )


@dataclass(frozen=True)
class Documents:
    """A data set, split.

    Attributes:
      train: documents to train on.
      validation: documents held out.
      tally: counts of the records.
    """

    train: list[Document]
    validation: list[Document]
    tally: Tally


def load_documents(config: DataConfig) -> Documents:
    """Reads the documents of `config.source` and holds some of them out.

    A document's side depends only on its name (`stdlib`), its package (`packages`) or its content
    (other sources), so the split survives added documents, and duplicates are on one side.

    Raises:
      UserError: nothing to read, too many unusable records, or an empty side of the split.
    """
    tally = Tally(config.source)
    documents = Documents([], [], tally)
    kind = None if config.format == "auto" else config.format
    for where, record in progress_bar(read_records(config), desc="read", unit="rec", delay=2):
        tally.records += 1
        document, left_out = record, ""
        if isinstance(record, dict):
            kind = kind or detect_format(record)
            document, left_out = read_document(record, kind)
        if isinstance(document, Broken):
            tally.drop(where, document)
            continue
        tally.cut.update([left_out] if left_out else [])
        key = where if config.is_code else content_key(document)  # decides the side
        package = key.partition("/")[0]
        if config.held_out:
            is_held_out = package in config.held_out
        else:
            decides = key if config.packages is None else package
            digest = hashlib.blake2b(decides.encode(), digest_size=8).digest()
            is_held_out = int.from_bytes(digest, "big") / 2**64 < config.validation_fraction
        (documents.validation if is_held_out else documents.train).append(document)
        if len(documents.train) + len(documents.validation) == config.max_documents:
            break
    tally.check(config.max_dropped)
    if not tally.records:
        raise UserError(f"data.source {config.source!r}: want documents, got empty files")
    if not (documents.train and documents.validation):
        raise UserError(
            f"data.source {config.source!r}: want at least one training and one validation "
            f"document, got {len(documents.train)} and {len(documents.validation)}: a hash of each "
            "decides its side; give more documents, or change data.validation_fraction"
        )
    return documents
