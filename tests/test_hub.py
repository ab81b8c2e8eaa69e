"""Checkpoints from the Hub, which is a server on this machine: huggingface_hub itself fetches."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from convert_sources import TINY, draft_tensors, run, target_tensors, write_source
from hub_server import COMMIT, TOKEN, Hub, run_with_hub, serve
from serving import free_port

from poss_jax.checkpoint.record import read_record
from poss_jax.config.reading import UserError
from poss_jax.convert.source import check_blob

# Converts one source after the other, inspects the rest, and prints what came of each.
_SCRIPT = """
import json, sys
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main
from poss_jax.convert.plan import inspect
said = {}
for number, arguments in enumerate(json.loads(sys.argv[1])):
    try:
        main(["target", "--source", *arguments, "--output", f"{sys.argv[2]}/{number}"])
        said[" ".join(arguments)] = None
    except UserError as error:
        said[" ".join(arguments)] = str(error)
print(json.dumps(said | {name: inspect(name).summary for name in sys.argv[3:]}))
"""


def convert(
    hub_url: str, home: Path, output: Path, sources: list[str], *inspected: str, **env: str
) -> dict:
    """A process's message about each source, None if it was converted, and what inspect found."""
    arguments = json.dumps([source.split() for source in sources]), str(output), *inspected
    said = run_with_hub(hub_url, home, _SCRIPT, *arguments, **env)
    assert all("\n" not in (said[source] or "") for source in sources)
    return said


BIG = draft_tensors(2, **{"embed_tokens.weight": (16, 8)})
BIG["layers.0.mlp.up_proj.weight"] = np.zeros((200_000, 8), np.float32)


@dataclass
class Fetched:
    """Results of a process without a token, and of one with it."""

    hub: Hub
    home: Path
    output: Path
    said: dict
    said_with_token: dict
    token_requests: list


@pytest.fixture(scope="module")
def fetched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    model = write_source(folder / "tiny", target_tensors())
    (model / "pytorch_model.bin").write_bytes(b"not fetched beside safetensors")
    (model / "consolidated.safetensors").write_bytes(b"a second copy that is not fetched")
    (model / "tokenizer.json").write_text("{}")
    big = write_source(folder / "big", BIG)
    only_bin, sharded_bin = folder / "only_bin", folder / "sharded_bin"
    for source, name in (
        (only_bin, "pytorch_model.bin"),
        (sharded_bin, "pytorch_model-00001-of-00001.bin"),
    ):
        source.mkdir()
        (source / "config.json").write_text(json.dumps(TINY))
        (source / name).write_bytes(b"fetched")
    index = {"weight_map": {"lm_head.weight": "pytorch_model-00001-of-00001.bin"}}
    (sharded_bin / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    names = ("owner/tiny", "owner/gated", "owner/private")
    hub = Hub(models=dict.fromkeys(names, model) | {"owner/big": big})
    hub.models |= {"owner/bin": only_bin, "owner/shards": sharded_bin}
    hub.gated, hub.private = {"owner/gated"}, {"owner/private"}
    with serve(hub):
        sources = ["owner/tiny", f"owner/tiny --revision {COMMIT}", BRANCH]
        sources += ["owner/missing", "owner/gated", "owner/private"]
        said = convert(hub.url, folder / "home", folder / "out", sources)
        before = len(hub.requests)
        sources = ["owner/gated", "owner/private", "owner/shards"]
        arguments = hub.url, folder / "home2", folder / "out2", sources, "owner/big", "owner/bin"
        with_token = convert(*arguments, HF_TOKEN=TOKEN)
        yield Fetched(hub, folder / "home", folder / "out", said, with_token, hub.requests[before:])


def test_name_and_commit_are_recorded(fetched):
    assert fetched.said["owner/tiny"] is None
    target = read_record(fetched.output / "0").target
    assert (target.name, target.revision) == ("owner/tiny", COMMIT)
    assert read_record(fetched.output / "1").target == target
    assert (fetched.output / "0/tokenizer.json").read_text() == "{}"


def test_only_what_is_needed_is_fetched(fetched):
    first = [path for _, path, _ in fetched.hub.requests if path.startswith("owner/tiny/")]
    names = {path.rpartition("/")[2] for path in first}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    # A .bin is fetched if safetensors are missing.
    bins = [path for _, path, _ in fetched.hub.requests if path.endswith(".bin")]
    assert bins and all(path.startswith(("owner/bin/", "owner/shards/")) for path in bins)
    assert "pytorch_model.bin" in fetched.said_with_token["owner/bin"]["refused"]
    assert "pytorch_model-00001-of-00001.bin" in fetched.said_with_token["owner/shards"]
    assert "which is missing" not in fetched.said_with_token["owner/shards"]


def test_inspect_fetches_only_headers(fetched):
    found = fetched.said_with_token["owner/big"]
    assert found["parameters"] == sum(value.size for value in BIG.values())
    assert "up_proj.weight want [12, 8] got [200000, 8]" in found["refused"]
    assert 0 < fetched.hub.num_bytes["owner/big"] < 200_000
    paths = [path for _, path, _ in fetched.hub.requests]
    assert any(path.startswith(f"owner/big/resolve/{COMMIT}/") for path in paths)


UNKNOWN = "no folder {} here, and the Hub shows no such model; check the name, and set HF_TOKEN if"
BRANCH = "owner/tiny --revision no-such-branch"


def test_refusals_say_what_to_do(fetched):
    for source, message in (
        (BRANCH, "the Hub has no owner/tiny at revision no-such-branch; give one of its branches"),
        ("owner/missing", UNKNOWN.format("owner/missing")),
        ("owner/private", UNKNOWN.format("owner/private")),
        ("owner/gated", "owner/gated is gated: accept its terms on the model's page, and set HF_"),
    ):
        assert fetched.said[source].startswith(message)


def test_token_is_sent(fetched):
    assert fetched.said_with_token["owner/gated"] is None
    assert fetched.said_with_token["owner/private"] is None
    assert {token for _, _, token in fetched.token_requests} == {TOKEN}
    others = fetched.hub.requests[: -len(fetched.token_requests)]
    assert {token for _, _, token in others} == {None}


def test_offline_uses_the_cache(fetched, tmp_path, monkeypatch):
    cache = str(fetched.home / "hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", cache)
    before = len(fetched.hub.requests)
    run("target", source="owner/tiny", output=tmp_path / "out")  # all tests are offline
    assert read_record(tmp_path / "out").target == read_record(fetched.output / "0").target
    lacks = f"HF_HUB_OFFLINE is set, and the cache {cache} does not hold all of owner/other; unset"
    with pytest.raises(UserError, match=lacks):
        run("target", source="owner/other", output=tmp_path / "other")
    assert len(fetched.hub.requests) == before


def test_network_that_is_down(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    said = convert(url, tmp_path / "home", tmp_path / "out", ["owner/tiny"])
    prefix = f"no folder owner/tiny here, and owner/tiny cannot be fetched from {url} ("
    assert said["owner/tiny"].startswith(prefix)
    assert "check the network" in said["owner/tiny"]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_damaged_cache_is_noticed(fetched, tmp_path, name):
    snapshot = fetched.home / "hub/models--owner--tiny/snapshots" / COMMIT
    (tmp_path / "blobs").mkdir()
    blob = tmp_path / "blobs" / (snapshot / name).readlink().name
    blob.write_bytes((snapshot / name).read_bytes())
    link = tmp_path / name
    link.symlink_to(blob)
    check_blob(link)
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    with pytest.raises(UserError, match=rf"{name}: the Hub says .*SHA-.*, got"):
        check_blob(link)
