"""The record of a model, `model.json`; the file of the tokens that a draft may propose."""

import hashlib
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from poss_jax.checkpoint.whole import write_output
from poss_jax.config import __version__
from poss_jax.config.json_reading import check_own_file, check_own_tree, read_json
from poss_jax.config.models import DraftConfig, LlamaConfig, Quantisation
from poss_jax.config.numbers import AtLeastTwo, CountOrZero, Probability
from poss_jax.config.paths import AnyPath, as_path, local_files
from poss_jax.config.reading import UserError, build_config, config_to_dict
from poss_jax.model.families import family_of, method_of
from poss_jax.model.kernel import products_in_use
from poss_jax.model.parameters import item_shapes
from poss_jax.shapes import Params

FORMAT_VERSION = 1

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

_OLD_VOCABULARY = ("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")

_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class TargetIdentity:
    """Identity of the target that a model is, or was made for."""

    name: str  # Hub id, or the name of the folder it was read from
    revision: str | None = None  # commit on the Hub
    # Checksum of the embedding's shape and values (see `hash_values`), the same for every stored
    # type.
    embedding_sha256: str
    head_sha256: str  # checksum of the LM head, likewise

    def same_weights(self, identity: "TargetIdentity") -> bool:
        """True if both have the same embedding and head; names may differ."""
        return replace(self, name=identity.name, revision=identity.revision) == identity


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelRecord:
    """Contents of `model.json`."""

    format_version: int = FORMAT_VERSION  # version of the folder's layout
    family: Literal["target", "draft"]
    method: str | None = None  # a draft's method (`method_of`)
    # `shared` if all specialists of a draft share the key and value projections.
    kv: Literal["per_specialist", "shared"] | None = None
    config: LlamaConfig | DraftConfig  # the model's shape; rope, spans and trained depth are in it
    # Target id of every token a draft can propose; None means all of them.
    draft_vocabulary: tuple[CountOrZero, ...] | None = None
    # Type of a target's stored matrices (`model/quantise.py`); None: not quantised.
    quantised: Quantisation | None = Field(default=None, exclude_if=lambda kind: kind is None)
    # Identity of the target itself, or of a draft's target. A quantised target has the identity of
    # the weights it was made from.
    target: TargetIdentity
    # Checksum of the tokenizer's vocabulary files; None without a tokenizer.
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None  # checksum of the chat template; None without one
    # Checksum of every item, see `hash_item`; None in older folders.
    weights_sha256: dict[str, str] | None = None
    provenance: dict[str, Any]  # how the folder was made, see `provenance`

    def __post_init__(self) -> None:
        if isinstance(self.config, DraftConfig) != (self.family == "draft"):
            raise ValueError(f"family {self.family} with the config of the other family")
        if isinstance(self.config, DraftConfig):
            family_of(self.config)  # refuses what it lacks
        if self.quantised is not None and self.family == "draft":
            raise ValueError("quantised: want a target, got a draft")

    @property
    def items(self) -> dict[str, Params]:
        """Shapes of the model's items by their names, see `item_shapes`."""
        return item_shapes(self.config, is_quantised=self.quantised is not None)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the weights; in folders without checksums, of the target's identity."""
        sums: dict[str, Any] = dict(self.weights_sha256 or asdict(self.target))
        if self.quantised is not None:
            sums["quantised"] = self.quantised
        return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def llama(self) -> LlamaConfig:
        """The config of a target."""
        assert isinstance(self.config, LlamaConfig)
        return self.config

    @property
    def draft(self) -> DraftConfig:
        """The config of a draft."""
        assert isinstance(self.config, DraftConfig)
        return replace(self.config, kv=self.kv or "per_specialist")


def new_record(
    config: LlamaConfig | DraftConfig,
    target: TargetIdentity,
    *,
    tokenizer_from: AnyPath | None,
    draft_vocabulary: tuple[int, ...] | None = None,
    quantised: Quantisation | None = None,
) -> ModelRecord:
    """Makes the record of a model that this process is about to write.

    Args:
      config: its shape; the class decides the family.
      tokenizer_from: the folder that `write_model` will copy the tokenizer from.
    """
    is_draft = isinstance(config, DraftConfig)
    tokenizer, chat_template = tokenizer_hashes(tokenizer_from) if tokenizer_from else (None, None)
    return ModelRecord(
        family="draft" if is_draft else "target",
        method=method_of(config) if is_draft else None,
        kv=config.kv if is_draft else None,
        config=config,
        draft_vocabulary=draft_vocabulary,
        quantised=quantised,
        target=target,
        tokenizer_sha256=tokenizer,
        chat_template_sha256=chat_template,
        provenance=provenance(),
    )


def tokenizer_hashes(folder: AnyPath) -> tuple[str | None, str | None]:
    """Hashes the tokenizer's vocabulary and its chat template.

    Returns:
      SHA-256 of tokenizer.json (without it, of the older vocabulary files), and of the template's
      text; None for missing ones.
    """
    with local_files(folder, TOKENIZER_FILES) as local:
        names = ("tokenizer.json",) if (local / "tokenizer.json").is_file() else _OLD_VOCABULARY
        vocabulary = b"".join(
            (local / name).read_bytes() for name in names if (local / name).is_file()
        )
        template: Any = ""  # in its own file, or in tokenizer_config.json
        if (local / "chat_template.jinja").is_file():
            template = (local / "chat_template.jinja").read_text("utf-8", errors="replace")
        elif (local / "tokenizer_config.json").is_file():
            template = read_json(local / "tokenizer_config.json").get("chat_template") or ""
    if not isinstance(template, str):
        template = json.dumps(template, sort_keys=True)
    texts = vocabulary, template.encode()
    tokenizer, template = (hashlib.sha256(text).hexdigest() if text else None for text in texts)
    return tokenizer, template


def provenance() -> dict[str, Any]:
    """Describes the running process: command, versions, git commit and device."""
    # Models are shared, so the interpreter's and the script's folders stay out of them.
    program = [Path(word).name if Path(word).is_absolute() else word for word in sys.orig_argv[:2]]
    root, git_sha = Path(__file__).resolve().parents[2], ""
    if (root / ".git").exists() and shutil.which("git"):  # a checkout, no installed package
        words = ["git", "-C", str(root), "rev-parse", "HEAD"]
        git_sha = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    return {
        "command": [*program, *sys.orig_argv[2:]],
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("jax", "flax", "orbax-checkpoint")},
            "poss_jax": __version__,
        },
        "git_sha": git_sha or None,
        "device_kind": jax.devices()[0].device_kind,
        "int8_products": products_in_use(),  # on a CPU
    }


def read_record(folder: str | AnyPath, family: str | None = None) -> ModelRecord:
    """Reads the record of a model folder, without its weights.

    Args:
      family: what is wanted, target or draft; None: either.

    Raises:
      UserError: no such folder, not a model folder, unknown format version, malformed record, a
        link in its weights that leads out of it, a model of the other family.
    """
    folder = as_path(folder)
    if not folder.is_dir():
        kind, options = family or "target", " --target TARGET" if family == "draft" else ""
        advice = f"poss convert {kind} --source CHECKPOINT{options} --output {folder}"
        if folder.name == "model":  # a training run writes its model into its own folder
            advice = f"poss train --config FILE, where FILE has output: {folder.parent}"
        raise UserError(f"model folder {folder} does not exist; write it first: {advice}")
    path = folder / "model.json"
    if not path.is_file():
        raise UserError(
            f"{folder} holds no model.json, so it is not a model folder of poss_jax; "
            "convert it first: poss convert --help"
        )
    if isinstance(folder, Path):
        check_own_file(folder / "model.json")
        check_own_tree(folder / "weights", folder)
    values = read_json(path)
    if values.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{path}: want format_version {FORMAT_VERSION}, got {values.get('format_version')!r}; "
            "use the version of poss_jax that wrote it, or convert the source again"
        )
    if isinstance(config := values.get("config"), dict):
        kind = DraftConfig if values.get("family") == "draft" else LlamaConfig
        values["config"] = build_config(kind, config, origin=f"{path}: config")
    record = build_config(ModelRecord, values, origin=str(path))
    if family not in (None, record.family):
        raise UserError(f"{folder}: want a {family}, got a {record.family}; give the other folder")
    return record


def check_fit(origin: str, draft: DraftConfig, target: ModelRecord) -> None:
    """Raises UserError unless a draft reads features and tokens of a target's sizes."""
    name = target.target.name
    if not isinstance(target.config, LlamaConfig):
        raise UserError(f"{origin}: want a target to draft for, got a draft (made for {name})")
    sizes = {"hidden_size": draft.feature_size, "vocab_size": draft.layer.vocab_size}
    for field, got in sizes.items():
        want = getattr(target.config, field)
        if want != got:
            raise UserError(
                f"{origin} does not fit the target {name}: want {field} {want}, got {got}; "
                "use the target it was trained for"
            )


# --------------------------------------------------------------------------------------------------
# Draft vocabularies

SMALLEST = 2
"""Fewest tokens that a draft may propose."""


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class DraftVocabulary:
    """Contents of a draft vocabulary's file."""

    vocab_size: AtLeastTwo  # number of tokens of the target
    # Ids of the tokens that a draft may propose, ascending.
    tokens: tuple[CountOrZero, ...] = Field(min_length=SMALLEST)
    # Share of the counted tokens in the vocabulary; None if nothing was counted.
    coverage: Probability | None = None
    source: Any = None  # description of the counted data; informative only

    def __post_init__(self) -> None:
        if list(self.tokens) != sorted({*self.tokens}) or self.tokens[-1] >= self.vocab_size:
            raise ValueError(f"tokens: want ascending ids below vocab_size {self.vocab_size}")


def write_draft_vocabulary(path: Path, vocabulary: DraftVocabulary) -> None:
    """Writes a draft vocabulary as a JSON file, whole or not at all (see `write_output`)."""
    fields = config_to_dict(vocabulary).items()
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields]  # of many ids
    write_output(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_draft_vocabulary(path: str | AnyPath, vocab_size: int) -> np.ndarray:
    """Reads the file of a draft vocabulary: [Vd] int32, ascending ids of the target.

    Raises:
      UserError: unreadable, not a draft vocabulary, or made for another vocabulary size.
    """
    vocabulary = build_config(DraftVocabulary, read_json(as_path(path)), origin=str(path))
    if vocabulary.vocab_size != vocab_size:
        raise UserError(
            f"{path}: want a draft vocabulary of {vocab_size} tokens, which the target has, got "
            f"one made for {vocabulary.vocab_size}; count again with this target"
        )
    return np.asarray(vocabulary.tokens, np.int32)


def with_vocabulary(record: ModelRecord, tokens: Iterable[int], *, origin: str) -> ModelRecord:
    """Returns the record of a draft that proposes only some tokens, ascending ids of the target.

    Raises:
      UserError: the draft has its own head, which fixes its vocabulary.
    """
    if "head" in record.items:
        raise UserError(
            f"draft {origin}: a draft with its own head keeps its vocabulary; leave out the "
            "draft vocabulary"
        )
    return replace(record, draft_vocabulary=tuple(tokens))
