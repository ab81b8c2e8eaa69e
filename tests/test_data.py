"""Records, the split, the tokenizer, rows and their order, prompts, and what is refused."""

import hashlib
import io
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from infer.bench.questions import prompts_from_documents
from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.data import rows as row_order
from poss_jax.data import tokenizer as tokenizers
from poss_jax.data.conversations import Tokens
from poss_jax.data.records import Documents, load_documents, read_records
from poss_jax.data.rows import Rows, batch_at, encode_documents, make_rows
from poss_jax.data.tokenizer import load_tokenizer, train_tokenizer
from poss_jax.engine.dialogue import read_prompts

SOURCE = "".join(
    f"def area_{n}(width, height):\n    '''Area number {n}.'''\n    return width * height + {n}\n\n"
    f"class Shape{n}:\n    sides = {n}\n\n"
    for n in range(40)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([SOURCE], 320, folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return load_tokenizer(folder)


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def load(path: Path | str, **settings: Any) -> Documents:
    return load_documents(DataConfig(source=str(path), **settings))


def read(source: str) -> list[tuple[str, Any]]:
    return list(read_records(DataConfig(source=source)))


# --------------------------------------------------------------------------------------------------
# Documents


def test_stdlib_is_other_peoples_code_without_tests_and_tables() -> None:
    names = [name for name, _ in read_records(DataConfig())]
    assert {"argparse.py", "unittest/case.py", "json/decoder.py", "tokenize.py"} <= set(names)
    for part in ("site-packages/", "test/", "tests/", "idlelib/", "pydoc_data/", "encodings/"):
        assert not [name for name in names if name.startswith(part) or f"/{part}" in name]
    assert not {"html/entities.py", "stringprep.py", "token.py"} & set(names)
    assert len(names) > 200
    documents = load("stdlib")
    assert len(documents.train + documents.validation) == len(names)
    assert 0.02 < len(documents.validation) / len(names) < 0.1


def test_packages_are_held_out_as_a_whole() -> None:
    tqdm, yaml = ({r["text"] for _, r in read(f"packages:{name}")} for name in ("tqdm", "yaml"))
    documents = load("packages:yaml,packaging,tqdm", held_out=["tqdm"])
    assert set(documents.validation) == tqdm and yaml < set(documents.train)
    others = load("packages:yaml", held_out=["tqdm"])  # which is not trained on
    assert (set(others.validation), set(others.train)) == (tqdm, yaml)


@pytest.mark.slow
def test_packages_are_those_of_others_without_tests() -> None:
    names = [name for name, _ in read("packages")]
    assert {"jax", "python", "numpy"} <= {name.partition("/")[0] for name in names}
    assert not [name for name in names if name.startswith("poss_jax/") or "/tests/" in name]


NO_FILE = "no such file; give a path or a glob"


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"source": "packages:no_such"}, r"want installed packages, got \['no_such'\]"),
        ({"source": "packages", "held_out": ["no_such"]}, "install or leave them out"),
        ({"held_out": ["jax"]}, "held_out is for source packages, not for 'stdlib'"),
        ({"source": "missing.txt"}, NO_FILE),
        ({"source": "nowhere/*.jsonl"}, NO_FILE),
        ({"source": "/x/text.parquet"}, r"want stdlib, a \.txt, \.json or \.jsonl path or glob"),
        ({"source": "empty.jsonl"}, "want documents, got empty files"),
        ({"source": "few.jsonl", "validation_fraction": 1e-9}, "got 20 and 0: a hash of each"),
    ],
)
def test_sources_that_are_refused(tmp_path, monkeypatch, settings, error) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.jsonl").touch()
    write_jsonl(Path("few.jsonl"), *({"text": f"text {n}"} for n in range(20)))
    with pytest.raises((UserError, ValueError), match=error):
        load_documents(DataConfig(**settings))


def test_split_follows_the_fraction_and_is_stable_under_added_documents_and_order(tmp_path):
    texts = [f"document number {n}" for n in range(2000)]
    few = load(write_jsonl(tmp_path / "few.jsonl", *({"text": text} for text in texts[:200])))
    random.Random(0).shuffle(texts)
    path = write_jsonl(tmp_path / "many.jsonl", *({"text": text} for text in texts))
    many = load(path)
    assert set(few.train) <= set(many.train) and set(few.validation) <= set(many.validation)
    assert sorted(many.train + many.validation) == sorted(texts)
    for fraction in (0.05, 0.3):
        held_out = load(path, validation_fraction=fraction).validation
        assert len(held_out) / 2000 == pytest.approx(fraction, rel=0.2)


def test_text_files_by_path_and_glob_and_max_documents(tmp_path: Path) -> None:
    for n in range(40):
        (tmp_path / f"{n:02}.txt").write_text(f"ünïcode {n}")
    (tmp_path / "blank.txt").write_text(" \n")
    found = load(tmp_path / "*.txt", validation_fraction=0.5)
    assert sorted(found.train + found.validation) == sorted(f"ünïcode {n}" for n in range(40))
    some = load(tmp_path / "*.txt", validation_fraction=0.5, max_documents=10)
    assert set(some.train + some.validation) == {f"ünïcode {n}" for n in range(10)}


def test_hub_data_set_is_read_by_its_text_column(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"row {n}"} for n in range(100)]
    asked = []

    def load_dataset(name: str, subset: str | None, **settings: Any) -> list[dict[str, str]]:
        asked.append((name, subset, settings))
        return rows

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    found = load("someone/texts", max_documents=90)
    assert len(found.train + found.validation) == 90
    assert asked == [("someone/texts", None, {"split": "train", "streaming": True})]
    load("someone/texts", subset="main", split="train_sft")
    assert asked[1] == ("someone/texts", "main", {"split": "train_sft", "streaming": False})
    rows[:60] = [{"body": "no text here"}] * 60
    with pytest.raises(UserError, match=r"no known format 60; first someone/texts row 0: .*body"):
        load("someone/texts")


def test_a_folder_with_a_script_is_no_data_set(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "own.py").write_text("open('ran', 'w').close()")
    with pytest.raises(UserError, match=r"as a data set it fails: .*scripts are no longer support"):
        load("own")
    assert not (tmp_path / "ran").exists()


# --------------------------------------------------------------------------------------------------
# Tokenizer


def test_round_trip_on_arbitrary_unicode(tokenizer: PreTrainedTokenizerFast) -> None:
    rng = random.Random(0)
    letters = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]
    texts = ["".join(rng.choices(letters, k=50)) for _ in range(100)]
    texts += ["", " a , b . c 's n't", "\r\n\t  x\n\n", "</s> <s><pad>", SOURCE]
    for text, ids in zip(texts, tokenizers.encode_plain(tokenizer, texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert not set(ids) & {0, 1, 2}  # spelled-out special tokens stay text
        assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=False)[3:] == text


def test_chat_template_has_one_bos(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<s>### system\nBe brief.\n### user\nHi\n### assistant\n"
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1 and tokenizer.decode(ids) == text
    finished = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == finished + "### assistant\n"
    messages += [{"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Bye"}]
    text += "Hello.</s>\n### user\nBye\n"  # an answer's end can be trained
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text


def test_training_is_deterministic_and_looks_at_a_bounded_sample(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizers, "TOKENIZER_SAMPLE_CHARACTERS", len(SOURCE))
    train_tokenizer(iter([SOURCE, "never looked at " * 1000]), 320, tmp_path)
    digests = [
        hashlib.sha256((place / "tokenizer.json").read_bytes()).digest()
        for place in (folder, tmp_path)
    ]
    assert digests[0] == digests[1]


def test_loading_is_silent_and_without_torch(folder: Path) -> None:
    program = (
        "import sys; from pathlib import Path; sys.modules['torch'] = None\n"
        "from poss_jax.data.tokenizer import load_tokenizer\n"
        "print(load_tokenizer(Path(sys.argv[1]))('def')['input_ids'][0])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(folder)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
    )
    assert (done.stdout, done.stderr, done.returncode) == ("0\n", "", 0)


def test_tokenizer_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="vocab_size wants at least 259"):
        train_tokenizer([SOURCE], 258, tmp_path)
    for content in ("{", "{}"):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UserError, match=r"want a tokenizer, got: .*; copy its files there"):
            load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="want a tokenizer"):
        load_tokenizer(tmp_path / "missing")


def test_no_code_of_a_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n")
    auto_map = {"AutoTokenizer": ["own.Own", "own.Own"], "AutoConfig": "own.Own"}
    for name in ("tokenizer_config.json", "config.json"):
        values = {"auto_map": auto_map, "tokenizer_class": "Own", "model_type": "own"}
        (tmp_path / name).write_text(json.dumps(values))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    with pytest.raises(UserError, match=r"want a tokenizer, got: .*custom code"):
        load_tokenizer(tmp_path)
    assert not ran.exists()


def test_a_tokenizer_file_that_would_be_waited_for(tmp_path: Path) -> None:
    train_tokenizer([SOURCE], 259, tmp_path)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(UserError, match=r"chat_template\.jinja: want a regular file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "want a tok"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"}}, "Missing .UNK."),
    ],
    ids=["panic", "no unknown word"],
)
def test_tokenizers_that_fail_on_a_text(tmp_path: Path, change: dict[str, Any], error: str) -> None:
    train_tokenizer([SOURCE], 259, tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=error) as caught:
        tokenizers.encode_plain(load_tokenizer(tmp_path), ["a text"])
    assert "\n" not in str(caught.value)


# --------------------------------------------------------------------------------------------------
# Rows and batches


def test_a_stream_of_documents_between_bos_and_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    a, b = tokenizers.encode_plain(tokenizer, ["QX", "ZQX"])
    stream = [0, *a, 1, 0, *b, 1]  # 9 tokens: <s> Q X </s> <s> Z Q X </s>
    encoded = [one for [one] in encode_documents(["QX", "ZQX"], tokenizer)]
    rows = make_rows(encoded, 4, "stream")
    assert rows.tokens.dtype == rows.documents.dtype == np.int32 and len(rows) == 2
    assert rows.tokens.tolist() == [stream[:4], stream[4:8]]
    assert rows.loss_mask.all() and (rows.documents == 1).all()
    with pytest.raises(UserError, match="want a row of 10 tokens, got 9 tokens in 2 documents"):
        make_rows(encoded, 10, "stream")
    with pytest.raises(UserError, match="got 0 tokens in 0 documents"):
        make_rows([], 4, "stream")
    with pytest.raises(UserError, match="got none with a token to train on; give more"):
        make_rows([], 4, "documents")


def numbered(*lengths: int) -> list[Tokens]:
    """Documents of tokens 10, 11, ... and 20, 21, ..., of which odd ones are trained."""
    ids = [10 * n + np.arange(length) for n, length in enumerate(lengths, start=1)]
    return [Tokens(one, one % 2 == 1) for one in ids]


def test_packed_rows_drawn() -> None:
    rows = make_rows(numbered(4, 3, 2, 3), 7, "documents")
    assert rows.tokens.tolist() == [[10, 11, 12, 13, 20, 21, 22], [30, 31, 40, 41, 42, 0, 0]]
    assert rows.documents.tolist() == [[1, 1, 1, 1, 2, 2, 2], [1, 1, 2, 2, 2, 0, 0]]
    assert rows.loss_mask.tolist() == [[0, 1, 0, 1, 0, 1, 0], [0, 1, 0, 1, 0, 0, 0]]
    rows = make_rows(numbered(3, 1), 3, "none")
    assert rows.tokens.tolist() == [[10, 11, 12], [20, 0, 0]]
    assert rows.documents.tolist() == [[1, 1, 1], [1, 0, 0]]


def test_packing_loses_nothing_and_fills_rows() -> None:
    lengths = np.random.default_rng(0).integers(1, 49, 400).tolist()
    packed = row_order.pack(lengths, 64)
    assert sorted(index for row in packed for index in row) == list(range(400))
    sizes = [sum(lengths[index] for index in row) for row in packed]
    assert max(sizes) <= 64 and sum(lengths) / (64 * len(packed)) > 0.95
    assert packed == row_order.pack(lengths, 64)


def numbered_rows(num_rows: int) -> Rows:
    tokens = np.arange(num_rows, dtype=np.int32)[:, None].repeat(2, axis=1)
    return Rows(tokens, tokens % 2 == 0, tokens + 1)


@pytest.mark.parametrize(("num_rows", "batch_size"), [(12, 4), (10, 4), (3, 8), (1, 2)])
def test_batches_cover_each_row_once_per_epoch(num_rows: int, batch_size: int) -> None:
    rows = numbered_rows(num_rows)
    steps = range(3 * num_rows)  # batch_size times 3 epochs, exactly
    batches = [batch_at(rows, step, batch_size, 7) for step in steps]
    assert all(batch.tokens.shape == (batch_size, 2) for batch in batches)
    order = np.concatenate([batch.tokens for batch in batches])[:, 0].reshape(-1, num_rows)
    assert (np.sort(order, axis=1) == np.arange(num_rows)).all()


def test_batches_of_a_resumed_run_are_the_same_and_seeds_differ() -> None:
    rows = numbered_rows(30)
    whole = [batch_at(rows, step, 4, 1).tokens for step in range(20)]
    row_order._epoch_order.cache_clear()
    for step in (19, 5, 12):
        np.testing.assert_array_equal(batch_at(rows, step, 4, 1).tokens, whole[step])
    assert (batch_at(rows, 0, 4, 2).tokens != whole[0]).any()
    epochs = [batch_at(rows, step, 30, 1).tokens for step in (0, 1)]
    assert (epochs[0] != epochs[1]).any()


# --------------------------------------------------------------------------------------------------
# Prompts


def test_prompts_begin_at_definitions_and_repeat(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = [SOURCE, "x = 1\n" * 3, SOURCE.replace("Area", "Size")]
    prompts = prompts_from_documents(texts, tokenizer, num_prompts=12, prompt_tokens=16)
    again = prompts_from_documents(texts, tokenizer, num_prompts=12, prompt_tokens=16)
    assert prompts == again and len({tuple(ids) for ids in prompts}) == 12
    for ids in prompts:
        assert len(ids) == 16 and ids[0] == 0 and 0 not in ids[1:]
        assert tokenizer.decode(ids[1:]).startswith(("def area_", "class Shape"))
    with pytest.raises(UserError, match="want 3 prompts of 4 tokens, got 1 from 2 documents"):
        prompts_from_documents(["abcdef"] * 2, tokenizer, num_prompts=3, prompt_tokens=4)


def test_prompts_of_prose_begin_at_lines_and_documents_take_turns(tokenizer) -> None:
    texts = [f"{n} begins a document.\n  Indented.\n{n} ends it.\n\n" for n in range(4)]
    prompts = prompts_from_documents(texts, tokenizer, num_prompts=4, prompt_tokens=12)
    lines = [tokenizer.decode(ids[1:]) for ids in prompts]
    assert sorted(line[0] for line in lines) == ["0", "1", "2", "3"]
    assert all(line in text for line, text in zip(sorted(lines), texts, strict=True))


def test_read_prompts_keeps_other_keys(tmp_path: Path) -> None:
    records = [
        {"prompt": "Once"},
        {"prompt_ids": [0, 5], "question_id": 81},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"turns": ["First?", "Second?"], "category": "writing"},
    ]
    assert read_prompts(write_jsonl(tmp_path / "p.jsonl", *records)) == records


NOT_ONE = r"want exactly one of prompt .*prompt_ids .*messages .*turns "
HALF = "half a character"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"text": "unknown key"}', NOT_ONE),
        (b'{"prompt": "two", "turns": ["keys"]}', NOT_ONE),
        (b'{"prompt": 3}', NOT_ONE),
        (b'{"prompt_ids": []}', NOT_ONE),
        (b'{"prompt_ids": [true]}', NOT_ONE),
        (b'{"messages": {"role": "user", "content": "not a list"}}', NOT_ONE),
        (b'{"messages": [{"role": "user"}]}', NOT_ONE),
        (b'{"turns": ["fine", ""]}', NOT_ONE),
        (b"not json", "want a JSON object, got bad JSON"),
        (b"5", "want a JSON object, got int"),
        (b"[" * 100_000, "nested more than 100 deep"),
        (b'{"prompt": "a", "b": ' + b"[" * 200 + b"]" * 200 + b"}", "nested more than 100 deep"),
        (b'{"prompt_ids": [' + b"1" * 5_000 + b"]}", r"Exceeds the limit \(4300 digits\)"),
        (rb'{"prompt": "a\ud83d"}', HALF),
        (rb'{"prompt": "a", "\ud800": 1}', HALF),
        (b'{"prompt": "\xff"}', "want UTF-8 text"),
    ],
    ids=lambda value: str(value[:24]),
)
def test_prompts_that_cannot_be_used(tmp_path: Path, line: bytes, error: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "fine"}\n' + line)
    with pytest.raises(UserError, match=rf"p\.jsonl.*: .*{error}") as caught:
        read_prompts(tmp_path / "p.jsonl")
    assert len(str(caught.value).splitlines()) == 1
    assert "p.jsonl:2" in str(caught.value) or "UTF-8" in error


def test_prompt_file_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="want a readable file"):
        read_prompts(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="got no lines; add prompts"):
        read_prompts(write_jsonl(tmp_path / "empty.jsonl"))
