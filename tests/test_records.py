"""Records as they are read: broken lines, long ones, JSON lists."""

import json
from pathlib import Path
from typing import Any

import pytest

from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.data import records
from poss_jax.data.records import Documents, load_documents, read_records


def load(source: Path | str, **settings: Any) -> Documents:
    return load_documents(DataConfig(source=str(source), **{"validation_fraction": 0.5} | settings))


TEXTS = [json.dumps({"text": f"text {n}"}) for n in range(8)]
HALF = '{"text": "\\ud83d"}'


@pytest.mark.parametrize(
    ("junk", "reason"),
    [
        (b'{"text": ', "bad JSON"),
        (b'["a"]', "not a JSON object"),
        (b'{"text": 3}', "no string 'text'"),
        (b'{"text": " "}', "empty text"),
        (HALF.encode(), "bad JSON"),
        (b"[" * 1_000_000, "bad JSON"),
        (b'{"text": "a", "n": ' + b"[" * 101 + b"]" * 101 + b"}", "bad JSON"),
        (b"\xff\xfe\x00junk", "not UTF-8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_broken_lines_are_counted_and_named(tmp_path: Path, junk: bytes, reason: str) -> None:
    path = tmp_path / "texts.jsonl"
    lines = [text.encode() for text in TEXTS]
    path.write_bytes(b"\n".join([lines[0], junk, b"", *lines[1:], junk]))
    found = load(path)
    assert sorted(found.train + found.validation) == [f"text {n}" for n in range(8)]
    assert found.tally.records == 10 and found.tally.dropped == {reason: 2}
    assert found.tally.first_dropped[0].startswith(f"{path}:2: {reason}")
    with pytest.raises(UserError, match=rf"2 of 10 records .*{reason} 2; first .*texts.jsonl:2: "):
        load(path, max_dropped=0.1)
    path.write_bytes(b"junk\n" + junk)
    with pytest.raises(UserError, match=r"2 of 2 records cannot be used") as caught:
        load(path)
    assert "\n" not in str(caught.value)


LIST = [{"text": f"text {n}", "n": n, "list": [n, {"[": "]"}]} for n in range(50)]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_lists_are_read_whatever_the_file_is_called(tmp_path, indent) -> None:
    path = tmp_path / "list.jsonl"  # what it holds counts, not how it is called
    path.write_text(" \n" + json.dumps([*LIST, 12, *LIST], indent=indent) + "\n")
    read = [record for _, record in read_records(DataConfig(source=str(path)))]
    assert read[:50] == read[51:] == LIST
    assert read[50] == records.Broken("not a JSON object", "int")


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('[{"text": "a"},\n{"text": ', "Expecting value: line 2 column 10 .*;"),
        ('[{"text": "a"} {"text": "b"}]', "Expecting ',' delimiter: line 1 column 16 .*;"),
        ('[{"text": "a"}] {"text": "b"}', "Extra data: line 1 column 17 .*;"),
        ("[" * 100_000, "nested more than 100 deep;"),
        ("[" + "1" * 5_000 + "]", r"Exceeds the limit \(4300 digits\) for integer .*;"),
        (b'[{"text": "\xff"}]', ".* byte 0xff in position 11: invalid start byte;"),
    ],
    ids=lambda value: str(value[:12]),
)
def test_broken_json_lists_are_refused(tmp_path: Path, content: str | bytes, error: str) -> None:
    path = tmp_path / "list.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match=rf"list\.json: bad JSON: {error} mend the file") as caught:
        load(path)
    assert len(str(caught.value).splitlines()) == 1


def test_a_list_may_nest_as_deep_as_the_limit_and_hold_what_python_writes(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text('[{"text": "a", "b": ' + "[" * 98 + "]" * 98 + ', "score": NaN}]')
    [(where, record)] = read_records(DataConfig(source=str(path)))
    assert where == f"{path}: item 1" and isinstance(record, dict) and record["text"] == "a"


def test_half_a_character_in_a_list_drops_its_item_alone(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text(f"[{TEXTS[0]}, {HALF}, {TEXTS[1]}]")
    read = [record for _, record in read_records(DataConfig(source=str(path)))]
    half = records.Broken("bad JSON", "half a character (surrogates not allowed)")
    assert read == [{"text": "text 0"}, half, {"text": "text 1"}]


def test_details_are_one_line_without_control_characters() -> None:
    assert str(records.Broken("unknown role", "a\nb\x1b[2J")) == "unknown role: a b\\x1b[2J"


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_empty_files(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(UserError, match=r"want documents, got empty files|cannot be used"):
        load(tmp_path / name)


def test_a_glob_may_match_files_of_several_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(TEXTS[0])
    (tmp_path / "b.json").write_text("[" + TEXTS[1] + "]")
    (tmp_path / "c.txt").write_text("a text file")
    (tmp_path / "folder.json").mkdir()
    read = read_records(DataConfig(source=str(tmp_path / "*.*")))
    texts = [record["text"] for _, record in read]
    assert texts == ["text 0", "text 1", "a text file"]


def test_the_folder_of_speculators(tmp_path: Path) -> None:
    import datasets  # takes a second

    rows = [{"input_ids": [n, 2, 3], "loss_mask": [0, 1, 1], "seq_len": 3} for n in range(20)]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "saved")
    found = load(tmp_path / "saved")
    ids = sorted(document.ids.tolist() for document in found.train + found.validation)
    assert ids == [[n, 2, 3] for n in range(20)]
    parts = datasets.DatasetDict({"train": saved, "test": saved.select(range(12))})
    parts.save_to_disk(tmp_path / "parts")
    test = load(tmp_path / "parts", split="test")
    assert len(test.train + test.validation) == 12
    with pytest.raises(UserError, match=r"with data.split 'other', if it has several"):
        load(tmp_path / "parts", split="other")


def test_what_peers_prepared_and_no_run_can_use() -> None:
    for source in ("ge_data/**/data_*.ckpt", "prepared/hidden_states/hs_*.safetensors"):
        with pytest.raises(UserError, match="give the texts or tokens that they were made of"):
            load(source)
