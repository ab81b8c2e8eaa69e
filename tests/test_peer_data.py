"""Data sets that SpecForge and speculators have prepared."""

from pathlib import Path
from typing import Any

import pytest
from programs import write_lines

from poss_jax.config.data import DataConfig
from poss_jax.config.reading import UserError
from poss_jax.data.conversations import Chat, Rendered, Tokens
from poss_jax.data.sources import Documents, load_documents

TOOLS = '[{"type": "function", "function": {"name": "add"}}]'


def load(source: Any, **settings: Any) -> Documents:
    return load_documents(DataConfig(source=str(source), validation_fraction=0.3, **settings))


def all_of(documents: Documents) -> list[Any]:
    return documents.train + documents.validation


def test_chats_of_specforge(tmp_path: Path) -> None:
    """Tools may be JSON, other columns are left out, a weight of 0 leaves a turn untrained."""
    turns = [
        {"role": "user", "content": "1 + 1?"},
        {"role": "assistant", "content": "2", "weight": 0},
        {"role": "user", "content": "and 2 + 2?"},
        {"role": "assistant", "content": "4", "weight": 1},
        {"role": "user", "content": "3 + 3?"},
        {"role": "assistant", "content": "6", "weight": 0.5},
    ]
    lines = [
        {"id": n, "conversations": turns[:4], "tools": TOOLS, "enable_thinking": False, "n": n}
        for n in range(20)
    ]
    for number, line in enumerate(lines):
        line["conversations"] = [{"role": "system", "content": f"chat {number}"}, *turns[:4]]
    lines[0]["conversations"] = turns
    found = load(write_lines(tmp_path / "chats.jsonl", *lines))
    assert found.tally.cut == {"a weight that is not 0 or 1": 1} and len(all_of(found)) == 20
    for chat in all_of(found):
        assert isinstance(chat, Chat) and chat.tools == [
            {"type": "function", "function": {"name": "add"}}
        ]
        assert [turn.get("weight") for turn in chat.messages[-4:]] == [None, 0, None, 1]


def test_preformatted_texts_and_regenerated_answers(tmp_path: Path) -> None:
    texts = [{"id": n, "text": f"<|user|>{n}<|assistant|>yes"} for n in range(20)]
    found = load(write_lines(tmp_path / "texts.jsonl", *texts), format="rendered")
    assert all(isinstance(one, Rendered) for one in all_of(found))
    rows = [
        {"id": n, "primary_id": n, "input_ids": [n, 2, 3], "loss_mask": [0, 1, 1], "text": "x"}
        | {"metadata": {"finish_reason": "stop"}}
        for n in range(20)
    ]
    for one in all_of(load(write_lines(tmp_path / "rows.jsonl", *rows))):
        assert isinstance(one, Tokens) and one.trained.tolist() == [False, True, True]


def test_the_folder_of_speculators(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"input_ids": [n, 2, 3], "loss_mask": [0, 1, 1], "seq_len": 3} for n in range(20)]
    saved = datasets.Dataset.from_list(rows)
    saved.save_to_disk(tmp_path / "saved")
    found = all_of(load(tmp_path / "saved"))
    assert sorted(one.ids.tolist() for one in found) == [[n, 2, 3] for n in range(20)]
    parts = datasets.DatasetDict({"train": saved, "test": saved.select(range(12))})
    parts.save_to_disk(tmp_path / "parts")
    assert len(all_of(load(tmp_path / "parts", split="test"))) == 12
    with pytest.raises(UserError, match=r"with data.split 'other', if it has several"):
        load(tmp_path / "parts", split="other")


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("ge_data/**/data_*.ckpt", "give the texts or tokens that they were made of"),
        ("prepared/hidden_states/hs_*.safetensors", "lack the target's last norm; give the folder"),
    ],
)
def test_what_is_refused(source: str, error: str) -> None:
    with pytest.raises(UserError, match=error):
        load(source)
