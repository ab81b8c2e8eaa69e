"""Reading .bin files: bit for bit, without running what they hold."""

import os
import pickle
import re
import sys
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from convert_sources import refusal_of, target_tensors, write_source

from poss_jax.checkpoint.torch_io import read_bin, write_bin
from poss_jax.config.reading import UserError


@pytest.mark.parametrize("function", [read_bin, partial(write_bin, arrays={})])
def test_without_torch_the_file_and_the_extra_are_named(tmp_path, monkeypatch, function):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it fails
    with pytest.raises(UserError, match=r"pytorch_model\.bin needs torch.* the `torch` extra"):
        function(tmp_path / "pytorch_model.bin")


@pytest.mark.torch
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "bool"])
def test_every_type_bit_for_bit(tmp_path, dtype, zipped):
    import torch

    values = torch.arange(12).reshape(3, 4).to(getattr(torch, dtype)) / 7
    values = values.to(getattr(torch, dtype))
    path = tmp_path / "model.bin"
    torch.save({"a": values, "b": values.T}, path, _use_new_zipfile_serialization=zipped)
    arrays = read_bin(path)
    assert arrays["a"].dtype == np.dtype(getattr(ml_dtypes, dtype, dtype))
    want = values.float().numpy()
    np.testing.assert_array_equal(arrays["a"].astype(np.float32), want)
    np.testing.assert_array_equal(arrays["b"].astype(np.float32), want.T)
    assert not (zipped and arrays["a"].flags.owndata)  # mapped, not read


class Malicious:
    def __init__(self, function, argument):
        self.function, self.argument = function, argument

    def __reduce__(self):
        return self.function, (self.argument,)


@pytest.mark.torch
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "argument", "shown"),
    [(os.system, "touch it_ran", "posix.system"), (eval, "open('it_ran', 'w').close()", "eval")],
)
def test_code_is_refused(tmp_path, monkeypatch, zipped, function, argument, shown):
    import torch

    monkeypatch.chdir(tmp_path)
    state = {"a": torch.ones(2), "b": Malicious(function, argument)}
    torch.save(state, "model.bin", _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=f"got one that wants to use {shown}") as error:
        read_bin("model.bin")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "it_ran").exists()
    torch.load("model.bin", weights_only=False)  # the file is one that runs code
    assert (tmp_path / "it_ran").exists()


@pytest.mark.torch
def test_code_in_a_pickle_that_torch_did_not_write(tmp_path):
    state = {"a": Malicious(os.system, f"touch {tmp_path}/it_ran")}
    (tmp_path / "model.bin").write_bytes(pickle.dumps(state, protocol=4))
    with pytest.raises(UserError, match="got one that holds or runs other things"):
        read_bin(tmp_path / "model.bin")
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.torch
def test_checksums_are_compared_before_use(tmp_path):
    import torch

    path = tmp_path / "model.bin"
    torch.save({"a": torch.arange(64.0)}, path)
    content = bytearray(path.read_bytes())
    content[content.index(np.float32(33).tobytes())] ^= 1
    path.write_bytes(content)
    assert torch.load(path)["a"].shape == (64,)  # torch does not compare them
    with pytest.raises(UserError, match=r"model\.bin: .*the checksum of model/data/0 does not"):
        read_bin(path)


@pytest.mark.torch
@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"x" * 100, None])
def test_damaged_file(tmp_path, content):
    """None: one that torch wrote, cut off."""
    import torch

    path = tmp_path / "model.bin"
    torch.save({"a": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000] if content is None else content)
    with pytest.raises(UserError, match=r"model\.bin: ") as error:
        read_bin(path)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="No such file"):
        read_bin(tmp_path / "missing.bin")


@pytest.mark.torch
@pytest.mark.parametrize("kind", ["list", "nested", "number"])
def test_only_a_flat_state_dict(tmp_path, kind):
    import torch

    tensor = torch.ones(2, 2)
    state = {
        "list": [tensor],
        "nested": {"model": {"a": tensor}},
        "number": {"a": tensor, "step": 3},
    }[kind]
    torch.save(state, tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"model\.bin"):
        read_bin(tmp_path / "model.bin")


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_quantised_file(tmp_path, dtype):
    import torch

    folder = write_source(tmp_path / "source", target_tensors())
    (folder / "model.safetensors").unlink()
    state = {"model.norm.weight": torch.ones(8).to(getattr(torch, dtype))}
    torch.save(state, folder / "pytorch_model.bin")
    assert re.search(f"model.norm.weight.*{dtype}.*quantised", refusal_of(folder))
