"""Targets from GGUF files, against what `transformers` makes of the same file."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import run
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf_files import FAMILIES, HEAD_DIM, VOCABULARY, draw_tensors, write_gguf
from models import random_tokens, stacked

from poss_jax.checkpoint.folder import load_target
from poss_jax.convert.gguf_file import open_gguf
from poss_jax.model.documents import encode
from poss_jax.model.linear import linear

pytestmark = pytest.mark.torch


# What transformers does not take from the file, or takes for a vocabulary of the usual size.
NOT_READ = {"qwen3": {"head_dim": HEAD_DIM}, "phi3": {"pad_token_id": 0}}


@pytest.mark.parametrize("type", [Type.F32, Type.Q8_0], ids=lambda type: type.name)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama_biases"])
def test_logits(tmp_path, family, type):
    import torch
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="make test-torch installs it")
    file = write_gguf(tmp_path / "model.gguf", family, draw_tensors(family), type=type)
    run("target", source=file, output=tmp_path / "out")
    record, params = load_target(tmp_path / "out", jnp.float32)
    tokens = random_tokens(record.llama, 2, 24)
    got = linear(encode(stacked(params), record.llama, tokens), params["head"]["weight"])
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, **NOT_READ.get(family, {})
    ).eval()
    with torch.no_grad():
        want = model(torch.tensor(np.asarray(tokens), dtype=torch.long)).logits
    assert want.shape == (2, 24, VOCABULARY)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5)


# The quantised types that transformers dequantises itself.
TYPES = """Q4_0 Q4_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S
IQ3_XXS IQ3_S""".split()


@pytest.mark.parametrize("name", TYPES)
def test_types(tmp_path, name):
    """Matrices of any bytes whose scales are finite, against its own dequantisation."""
    import torch
    from transformers.integrations.gguf.dequant import dequantize

    kind = Type[name]
    block, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(0)
    array = rng.integers(0, 0x3C, (6, 512 // block * num_bytes), np.uint8)
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "llama")
    writer.add_tensor("x", array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    got = open_gguf(path).tensors["x"].read()
    want = dequantize(torch.from_numpy(array), int(kind), torch.float32).numpy()
    assert np.ptp(want) > 0
    np.testing.assert_allclose(got, want.reshape(6, 512), rtol=1e-6, atol=1e-7)
