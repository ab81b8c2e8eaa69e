"""Text in, token rows and prompts out: corpora, the embedded tokenizer, data order, prompt files.

Everything here is deterministic: the same source gives the same split, tokenizer, rows and prompts.
"""

import functools
import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from poss_jax.config import DataConfig, UserError

if TYPE_CHECKING:
    import transformers

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "### {{ message['role'] }}\n{{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}### assistant\n{% endif %}"
)
PROMPT_KEYS = {
    "prompt": "a string",
    "prompt_ids": "a list of token ids",
    "messages": "a list of {role, content}",
    "turns": "a list of strings",
}
TOKENIZER_SAMPLE_CHARACTERS = 10_000_000  # more than the standard library has; 2 to 5 s on 2 cores

_STDLIB_SKIPPED = re.compile(  # other people's code, tests, and files that are tables
    r"(^|/)((site-packages|dist-packages|tests?|idlelib|turtledemo|lib2to3|ensurepip|_bundled|"
    r"encodings|pydoc_data|__pycache__)/|_sysconfigdata|"
    r"(_casefix|entities|locale|stringprep|token)\.py)"
)
_STDLIB_MIN_BYTES = 1024
_DOCUMENTS_PER_CHUNK = 64
_PROMPT_CHARACTERS_PER_TOKEN = 100  # enough text that a prompt's last token is never cut short
_DEFINITION, _LINE = r"^(?:def|class) ", r"^\S"


@dataclass(frozen=True)
class Documents:
    """A corpus, split; each document is one string."""

    train: list[str]
    validation: list[str]


def load_documents(config: DataConfig) -> Documents:
    """Reads the documents of `config.source` and holds some of them out.

    A document's side depends on nothing but a hash of its name (`stdlib`) or of its text (all other
    sources), so the split survives added documents, and duplicates never lie on both sides.

    Raises:
      UserError: nothing to read, malformed input, or one side of the split is empty.
    """
    kept = (document for document in _read_source(config) if document[1].strip())
    documents = Documents([], [])
    for key, text in itertools.islice(kept, config.max_documents):
        held_out = _hash_fraction(key) < config.validation_fraction
        (documents.validation if held_out else documents.train).append(text)
    if not (documents.train and documents.validation):
        raise UserError(
            f"data.source {config.source!r}: want at least one training and one validation "
            f"document, got {len(documents.train)} and {len(documents.validation)}; give more "
            "documents (or shorter ones) or change data.validation_fraction"
        )
    return documents


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, folder: Path
) -> "transformers.PreTrainedTokenizerFast":
    """Trains a lossless byte-level BPE with a chat template and saves it as a Hugging Face one.

    Only the first `TOKENIZER_SAMPLE_CHARACTERS` of the texts are looked at.

    Args:
      texts: documents.
      vocab_size: tokens, the 256 bytes and 3 special tokens included.
      folder: where the tokenizer's files go; made if missing.

    Raises:
      UserError: the vocabulary cannot hold bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    alphabet, specials = sorted(pre_tokenizers.ByteLevel.alphabet()), [BOS, EOS, PAD]
    smallest = len(alphabet) + len(specials)
    if vocab_size < smallest:
        raise UserError(f"vocab_size wants at least {smallest} (bytes, specials), got {vocab_size}")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    model.train_from_iterator(_sample(texts), trainer)
    model.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, model.token_to_id(BOS))]
    )
    tokenizer = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def load_tokenizer(folder: Path) -> "transformers.PreTrainedTokenizerBase":
    """Loads the tokenizer of a local model folder, as its `tokenizer.json` defines it.

    Needs neither torch nor a network.

    Raises:
      UserError: the folder holds no tokenizer, or a broken one.
    """
    has_json = (folder / "tokenizer.json").exists()  # else, AutoTokenizer converts (imports torch)
    kind = "PreTrainedTokenizerFast" if has_json else "AutoTokenizer"
    try:
        return getattr(_transformers(), kind).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the Rust side raises plain Exception
        raise UserError(
            f"{folder}: want a tokenizer, got: {_one_line(error)}; copy its files there"
        ) from error


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
    bos, eos = _ids(tokenizer, "bos"), _ids(tokenizer, "eos")
    pieces = [np.zeros(0, np.int32)]
    with tqdm(total=len(texts), desc="tokenise", unit="doc", delay=2) as progress:
        for start in range(0, len(texts), _DOCUMENTS_PER_CHUNK):
            chunk = texts[start : start + _DOCUMENTS_PER_CHUNK]
            encoded = _encode(tokenizer, chunk)
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
    positions = range(step * batch_size, (step + 1) * batch_size)
    places = (divmod(position, len(rows)) for position in positions)
    return rows[np.array([_epoch_order(len(rows), seed, epoch)[i] for epoch, i in places])]


def prompts_from_documents(
    texts: Sequence[str],
    tokenizer: "transformers.PreTrainedTokenizerBase",
    *,
    num_prompts: int,
    prompt_tokens: int,
) -> list[list[int]]:
    """Cuts distinct prompts of `prompt_tokens` tokens, bos included, that begin at a line's start.

    Lines beginning a function or class are used up first; documents take turns.

    Raises:
      UserError: the texts do not hold so many prompts.
    """
    bos, prompts = _ids(tokenizer, "bos"), {}
    for text in _passages(texts, prompt_tokens * _PROMPT_CHARACTERS_PER_TOKEN):
        ids = (*bos, *_encode(tokenizer, [text])[0])[:prompt_tokens]
        if len(ids) == prompt_tokens:
            prompts[ids] = None
        if len(prompts) == num_prompts:
            return [list(ids) for ids in prompts]
    raise UserError(
        f"want {num_prompts} prompts of {prompt_tokens} tokens, got {len(prompts)} from "
        f"{len(texts)} documents; ask for fewer or shorter ones"
    )


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Reads a JSONL prompt file; each line holds exactly one of `PROMPT_KEYS`.

    Other keys (such as question_id) are kept.

    Raises:
      UserError: missing file or no lines, bad JSON, no prompt, an empty one, or a wrong type.
    """
    records = []
    for where, record in _json_lines(path):
        keys = [key for key in PROMPT_KEYS if key in record]
        if len(keys) != 1 or not _is_prompt(keys[0], record[keys[0]]):
            known = ", ".join(f"{key} ({kind})" for key, kind in PROMPT_KEYS.items())
            got = json.dumps({key: record[key] for key in keys} or list(record))
            raise UserError(f"{where}: want exactly one of {known}, not empty; got {got[:80]}")
        records.append(record)
    if not records:
        raise UserError(f"{path}: want one JSON object per line, got no lines; add prompts")
    return records


def _read_source(config: DataConfig) -> Iterator[tuple[str, str]]:
    """Yields (what decides a document's side of the split, its text)."""
    source = config.source
    if source == "stdlib":
        return _read_stdlib()
    if source.endswith(".jsonl"):
        records = (item for path in _matches(source) for item in _json_lines(path))
        texts = (_text_field(where, record) for where, record in records)
    elif source.endswith(".txt"):
        texts = (_read_text(path) for path in _matches(source))
    else:
        texts = _read_hub(source, streaming=config.max_documents is not None)
    return ((text, text) for text in texts)


def _read_stdlib() -> Iterator[tuple[str, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if _STDLIB_SKIPPED.search(name) or path.stat().st_size < _STDLIB_MIN_BYTES:
            continue
        with tokenize.open(path) as file:
            yield name, file.read()


def _read_hub(name: str, *, streaming: bool) -> Iterator[str]:
    wanted = f"data.source {name!r}: want stdlib, a .txt or .jsonl path or glob, or a Hub data set"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UserError(f"{wanted}; it is none of them")
    try:
        import datasets

        rows: Any = datasets.load_dataset(name, split="train", streaming=streaming)
        for row in rows:
            yield _text_field(f"data set {name!r}", row)
    except (ImportError, OSError, ValueError) as error:
        raise UserError(f"{wanted}; as a data set it fails: {_one_line(error)}") from error


def _matches(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    names = [str(path)] if path.is_file() else sorted(glob.glob(str(path), recursive=True))
    if not names:
        raise UserError(
            f"data.source {pattern!r}: no such file; give a path or a glob that matches"
        )
    return [Path(name) for name in names]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: want UTF-8 text, got {error.reason}; convert the file") from error
    except OSError as error:
        raise UserError(f"{path}: want a readable file, got: {error.strerror}") from error


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (file:line, object) of every line that is not blank."""
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            record = json.loads(line)
            if "\\ud" in line.lower():  # an escape may be half a character, which is no text
                json.dumps(record, ensure_ascii=False).encode()
        except (json.JSONDecodeError, UnicodeEncodeError) as error:
            got = _one_line(error).partition(": line ")[0]
            raise UserError(f"{where}: want a JSON object, got bad JSON: {got}") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: want a JSON object, got {type(record).__name__}")
        yield where, record


def _text_field(where: str, record: dict[str, Any]) -> str:
    text = record.get("text")
    if not isinstance(text, str):
        raise UserError(f"{where}: want a string 'text', got {text!r}; fix or drop the line")
    return text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _hash_fraction(key: str) -> float:
    """Maps a string to [0, 1), the same on every machine."""
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _sample(texts: Iterable[str]) -> Iterator[str]:
    left = TOKENIZER_SAMPLE_CHARACTERS
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def _transformers() -> Any:
    """Imports transformers without its advice to install a deep-learning framework."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def _ids(tokenizer: Any, name: str) -> list[int]:
    """Gives the id of the bos or eos token, as a list: empty if the tokenizer has none."""
    token_id = getattr(tokenizer, f"{name}_token_id")
    return [] if token_id is None else [token_id]


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encodes plain text: no bos, and no special tokens even where their names are spelled out."""
    return tokenizer(
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


@functools.lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def _passages(texts: Sequence[str], num_characters: int) -> Iterator[str]:
    """Yields passages that begin at a line: definitions first, every document in its turn."""
    rng = np.random.default_rng(0)
    documents = [texts[int(index)] for index in rng.permutation(len(texts))]
    for pattern in (_DEFINITION, _LINE):
        matches = [[m.start() for m in re.finditer(pattern, text, re.M)] for text in documents]
        turns = itertools.zip_longest(*(rng.permutation(starts) for starts in matches))
        for turn in turns:
            for text, start in zip(documents, turn, strict=True):
                if start is not None:
                    yield text[start : start + num_characters]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_message(value: Any) -> bool:
    fields = value if isinstance(value, dict) else {}
    return _is_text(fields.get("role")) and isinstance(fields.get("content"), str)


def _is_prompt(key: str, value: Any) -> bool:
    if key == "prompt":
        return _is_text(value)
    checks = {"prompt_ids": lambda item: type(item) is int, "messages": _is_message}
    return isinstance(value, list) and value != [] and all(map(checks.get(key, _is_text), value))
