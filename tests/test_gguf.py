"""Targets from GGUF files: equal to the same model in Hugging Face's layout, bit for bit."""

import json
import math
import zipfile

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import refusal_of, run, write_source
from gguf import GGMLQuantizationType as Type
from gguf import GGUFValueType as Value
from gguf_files import (
    CONTEXT,
    FAMILIES,
    HEAD_DIM,
    VOCABULARY,
    config_of,
    draw_tensors,
    write_gguf,
    write_out,
)
from models import random_tokens, stacked

from poss_jax.checkpoint.folder import load_target
from poss_jax.config.reading import UserError
from poss_jax.convert.__main__ import main
from poss_jax.convert.gguf_source import open_gguf
from poss_jax.convert.plan import inspect, plan_target
from poss_jax.convert.source import open_source
from poss_jax.model.documents import encode
from poss_jax.model.linear import linear


def convert(source, output):
    run("target", source=source, output=output)
    return load_target(output)


def assert_same(tmp_path, family, tensors, *, config=None, **changes):
    """Converts both files of a model, and compares configs and weights."""
    source = write_source(tmp_path / "hf", tensors, **config_of(family, **(config or {})))
    want, wanted = convert(source, tmp_path / "from_hf")
    file = write_gguf(tmp_path / "model.gguf", family, tensors, **changes)
    got, params = convert(file, tmp_path / "from_gguf")
    assert got.config == want.config
    assert got.target.same_weights(want.target)
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    return got


# --------------------------------------------------------------------------------------------------
# Families, ropes and heads


@pytest.mark.quick
@pytest.mark.parametrize("family", FAMILIES)
def test_families(tmp_path, family):
    assert_same(tmp_path, family, draw_tensors(family))


def test_tied_head(tmp_path):
    tensors = draw_tensors("llama", tied=True)
    assert_same(tmp_path, "llama", tensors, config={"tie_word_embeddings": True})


def test_heads_of_the_usual_width_and_a_linear_rope(tmp_path):
    def add(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.5)

    changes = {"without": ("attention.key_length", "attention.value_length"), "more": add}
    changes["without"] += ("rope.dimension_count",)
    config = {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}
    assert_same(tmp_path, "qwen2", draw_tensors("qwen2"), config=config, **changes)


def llama3_divisors(theta, factor, low, high, trained):
    """Llama 3.1's divisors, as llama.cpp's converter computes them."""
    for pair in range(HEAD_DIM // 2):
        wavelength = 2 * math.pi * theta ** (2 * pair / HEAD_DIM)
        if wavelength < trained / high:
            yield 1.0
        elif wavelength > trained / low:
            yield factor
        else:
            smooth = (trained / wavelength - low) / (high - low)
            yield 1 / ((1 - smooth) / factor + smooth)


def test_rope_of_llama_3(tmp_path):
    factor = 32.0
    divisors = np.array([*llama3_divisors(5e5, factor, 1, 4, 8192)], np.float32)
    assert 1 < divisors[2] < factor  # all three branches
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    extra, config = {"rope_freqs.weight": divisors}, {"rope_scaling": scaling}
    assert_same(tmp_path, "llama", draw_tensors("llama"), config=config, extra=extra)


def test_divisors_of_another_rope_divide_in_texts_of_any_length(tmp_path):
    divisors = [1.0, 1.5, 3.25, 7.0]
    extra = {"rope_freqs.weight": np.array(divisors, np.float32)}
    file = write_gguf(tmp_path / "model.gguf", "llama", draw_tensors("llama"), extra=extra)
    rope = convert(file, tmp_path / "out")[0].llama.rope
    assert (rope.type, rope.scale) == ("longrope", 1.0)
    assert [*rope.short_factor] == [*rope.long_factor] == divisors


@pytest.mark.parametrize("factor", [None, 1.25])
def test_longrope(tmp_path, factor):
    trained, short, long = 16, [1.0, 1.25, 2.0, 3.0], [2.0, 4.0, 24.5, 60.0]
    usual = math.sqrt(1 + math.log(CONTEXT / trained) / math.log(trained))

    def add(writer):
        writer.add_rope_scaling_orig_ctx_len(trained)
        writer.add_rope_scaling_attn_factors(factor or usual)
        writer.add_sliding_window(2 * CONTEXT)

    extra = {"rope_factors_short.weight": np.array(short, np.float32)}
    extra |= {"rope_factors_long.weight": np.array(long, np.float32)}
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    scaling |= {"attention_factor": factor} if factor else {}
    config = {"rope_scaling": scaling, "original_max_position_embeddings": trained}
    assert_same(tmp_path, "phi3", draw_tensors("phi3"), config=config, more=add, extra=extra)


def test_stop_tokens_and_whole_numbers_written_as_real_ones(tmp_path):
    def add(writer):
        writer.add_eot_token_id(9)
        writer.add_uint32("tokenizer.ggml.eom_token_id", 8)
        for key in ("llama.attention.head_count", "tokenizer.ggml.eos_token_id"):
            writer.add_float32(key, writer.kv_data[0].pop(key).value)

    tensors = draw_tensors("llama")
    assert_same(tmp_path, "llama", tensors, config={"eos_token_id": [2, 9, 8, 3]}, more=add)


# --------------------------------------------------------------------------------------------------
# Types

# Values that a type keeps exactly if every block holds the ends, and how long a block is. The
# package dequantises; types of one value, of short blocks and of long ones lie differently.
GRIDS = {
    Type.F16: (np.arange(-512, 513) / 256, 32),
    Type.Q4_1: (np.arange(16) / 8 - 1, 32),
    Type.Q8_0: (np.arange(-127, 128) / 64, 32),
    Type.TQ2_0: (np.arange(-1, 2) / 4, 256),
}


def on_grid(shape, type):
    values, block = GRIDS[type]
    array = np.random.default_rng(0).choice(values, shape)
    array[..., ::block], array[..., 1::block] = values[0], values[-1]
    return array.astype(np.float32)


@pytest.mark.parametrize("type", GRIDS, ids=lambda type: type.name)
def test_types(tmp_path, type):
    """A matrix of every type that the package can write, on values that it keeps exactly."""
    writer = gguf.GGUFWriter(path := tmp_path / "model.gguf", "llama")
    array = on_grid((6, 512), type)
    writer.add_tensor("x", gguf.quants.quantize(array, type), raw_dtype=type)
    writer.add_tensor("y", np.arange(3, dtype=np.float32))
    stored = open_gguf(write_out(writer, path)).tensors
    x, y = stored["x"], stored["y"]
    assert (x.dtype, x.shape, y.shape) == (type.name, (6, 512), (3,))
    np.testing.assert_array_equal(x.read(), array)
    np.testing.assert_array_equal(y.read(), np.arange(3))


def test_rows_of_quantised_queries_and_keys(tmp_path):
    tensors = {
        key: on_grid(array.shape, Type.Q8_0) if array.ndim == 2 else array
        for key, array in draw_tensors("llama").items()
    }
    file = write_gguf(tmp_path / "model.gguf", "llama", tensors, type=Type.Q8_0)
    read = open_source(str(file)).tensors
    assert read.keys() == tensors.keys()
    for key, array in tensors.items():
        np.testing.assert_array_equal(read[key].read(), array, err_msg=key)


def test_stored_type(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "llama", draw_tensors("llama"), type=Type.F16)
    kept = convert(file, tmp_path / "kept")[1]
    run("target", source=file, output=tmp_path / "cast", dtype="bfloat16")
    cast = load_target(tmp_path / "cast")[1]
    assert {leaf.dtype.name for leaf in jax.tree.leaves(kept)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cast)} == {"bfloat16"}
    jax.tree.map(lambda k, c: np.testing.assert_array_equal(k.astype(c.dtype), c), kept, cast)


# What transformers does not take from the file, or takes for a vocabulary of the usual size.
NOT_READ = {"qwen3": {"head_dim": HEAD_DIM}, "phi3": {"pad_token_id": 0}}


@pytest.mark.torch
@pytest.mark.parametrize("type", [Type.F32, Type.Q8_0], ids=lambda type: type.name)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama_biases"])
def test_logits_are_those_of_transformers(tmp_path, family, type):
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


# --------------------------------------------------------------------------------------------------
# Where a file may lie


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return write_gguf(folder / "tiny-Q4.gguf", "llama", draw_tensors("llama"))


def test_sources(tmp_path, tiny):
    archives = [tmp_path / "package.whl", tmp_path / "package.zip"]
    for path in archives:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("package/__init__.py", "")
            archive.write(tiny, "package/tiny-Q4.gguf")
    targets = [plan_target(str(path)).record.target for path in (tiny, tiny.parent, *archives)]
    assert {target.name for target in targets} == {"tiny-Q4"}
    assert targets == targets[:1] * 4  # the checksums of embedding and head, too


def test_a_folder_with_safetensors_too_is_read_from_these(tmp_path):
    write_gguf(tmp_path / "x.gguf", "llama", draw_tensors("llama"))
    write_source(tmp_path, draw_tensors("llama"), **config_of("llama"))
    assert open_source(str(tmp_path)).name == tmp_path.name


def test_inspect(tiny):
    found = inspect(str(tiny))
    facts = found.facts
    assert facts["stored as"] == "F32 (21 tensors)"
    assert facts["holds"] == "a target of 2 layers"
    assert facts["tokenizer files"] == "tokenizer.json, tokenizer_config.json"
    assert facts["convert with"].endswith(f"convert target --source {tiny} --output DIR")
    assert (found.family, found.refused) == ("target", None)


# --------------------------------------------------------------------------------------------------
# What is refused


def write_changed(path, *, name="llama", **changes):
    return write_gguf(path / "model.gguf", name, draw_tensors(name), **changes)


def add_yarn(writer):
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_yarn_beta_fast(32.0)


def metadata(method, *args):
    """A change: one more entry of the metadata."""
    return {"more": lambda writer: getattr(writer, method)(*args)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (metadata("add_uint16", "split.count", 3), "is one of 3 parts of a model; join them with "),
        (metadata("add_float32", "llama.attention.scale", 0.5), "scale is 0.5, which is not known"),
        (metadata("add_uint32", "llama.expert_count", 8), "a mixture of experts (num_experts 8"),
        (metadata("add_sliding_window", 16), "a sliding window of 16 tokens is active"),
        ({"more": add_yarn}, "rope type 'yarn' is read from safetensors only"),
        (
            {"name": "phi3", "without": ("rope.dimension_count",)}
            | metadata("add_rope_dimension_count", HEAD_DIM // 2),
            "partial_rotary_factor: want 1.0, got 0.5",
        ),
        ({"without": ("block_count",)}, "llama.block_count: want a valid integer, got None"),
        ({"kind": "none"}, "tokenizer: want gpt2 or llama, got None"),
        ({"kind": "none"} | metadata("add_tokenizer_model", "bert"), "or llama, got 'bert'"),
        ({"extra": {"rope_freqs.weight": np.ones(3, np.float32)}}, "heads of 8, got shape [3]"),
        ({"extra": {"x": np.zeros(4, np.float32)}}, "unknown x [4] in model.gguf"),
        ({"extra": {"x": np.zeros(4, np.int32)}}, "x is of type I32, which cannot be dequantised"),
    ],
)
def test_what_cannot_be_served(tmp_path, changes, message):
    file = write_changed(tmp_path, **changes)
    text = refusal_of(file)
    assert text.startswith(str(file)) and message in text


@pytest.mark.parametrize("name", ["gemma2", "qwen3moe"])
def test_other_architectures(tmp_path, name):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", name)
    writer.add_tensor("x", np.zeros(1, np.float32))
    text = refusal_of(write_out(writer, tmp_path / "model.gguf"))
    assert f"got '{name}'" in text if name == "gemma2" else f"experts ({name})" in text
    assert inspect(str(tmp_path / "model.gguf")).refused == text


NUMBERS = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count"),
)
ODD_NUMBERS = [(2**40, Value.UINT64), (-1, Value.INT32), (True, Value.BOOL), ("x", Value.STRING)]
ODD_NUMBERS += [(math.nan, Value.FLOAT32), ([2, 3], Value.ARRAY)]


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.parametrize("name", ["rope_freqs", "rope_factors_long"])
def test_numbers_are_checked_before_they_are_used(tmp_path, key, name):
    extra = {f"{name}.weight": np.ones(HEAD_DIM // 2, np.float32)}
    for value, kind in ODD_NUMBERS:
        if key == "rope.freq_base" and isinstance(value, int) and value > 1:
            continue  # an odd base, but a base

        def add(writer, value=value, kind=kind):
            writer.kv_data[0].pop(f"llama.{key}", None)
            writer.add_key_value(f"llama.{key}", value, kind)

        file = write_changed(tmp_path, more=add, extra=extra)
        assert f"metadata llama.{key}: want " in refusal_of(file), value
        assert inspect(str(file)).refused is not None


def test_what_a_file_says_is_shown_without_control_characters(tmp_path, capsys):
    odd = "x\x1b[2J\ny"
    file = write_changed(
        tmp_path,
        more=lambda writer: writer.add_float32(f"llama.{odd}", 1.0),
        extra={odd: np.zeros(1, np.float32)},
    )
    with pytest.raises(SystemExit):
        main(["inspect", str(file)])
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and printed.count("x\\x1b[2J") >= 2  # why, and the tensor
    assert "\x1b" not in refusal_of(file)


@pytest.mark.parametrize("name", ["falcon-x", None])
def test_other_pre_tokenizers_are_refused_and_inspected(tmp_path, name):
    def add(writer):
        writer.add_tokenizer_model("gpt2")
        if name:
            writer.add_tokenizer_pre(name)
        writer.add_token_list(["a"] * VOCABULARY)
        writer.add_token_merges(["a a"])

    file = write_changed(tmp_path, more=add, kind="none")
    text = refusal_of(file)
    assert "pre-tokenizer: want one of gpt-2, " in text
    assert f"got {name!r}" in text
    found = inspect(str(file))
    assert found.refused == text
    assert found.facts["holds"] == "a target of 2 layers"


def test_damaged_files(tmp_path, tiny):
    """Cut anywhere in its header, or in its weights, or with a size that lies outside."""
    content, file = tiny.read_bytes(), tmp_path / "cut.gguf"
    lengths = [*range(0, 200), *range(200, len(content), 997), len(content) - 1]
    for length in lengths:
        file.write_bytes(content[:length])
        with pytest.raises(UserError, match="fetch"):
            open_source(str(file))
    huge = content.index(b"general.architecture") + len(b"general.architecture") + 4
    file.write_bytes(content[:huge] + b"\xff" * 8 + content[huge + 8 :])
    assert "damaged (its header ends" in refusal_of(file)


def test_other_files(tmp_path, tiny):
    file, versions = tmp_path / "other.gguf", "want GGUF version 2 or 3, little-endian, got "
    for start, message in (
        (b"PK\x03\x04", "want a GGUF file, got another kind"),
        (b"GGUF\x01\x00\x00\x00", f"{versions}1;"),
        (b"GGUF\x00\x00\x00\x03", f"{versions}50331648;"),
    ):
        file.write_bytes(start + tiny.read_bytes()[len(start) :])
        assert message in refusal_of(file)


def test_several_files_or_none(tmp_path, tiny):
    (tmp_path / "files").mkdir()
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / "files" / name).write_bytes(tiny.read_bytes())
    assert "holds 2 GGUF files; give one of a.gguf, b.gguf" in refusal_of(tmp_path / "files")
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("package/__init__.py", "")
    assert "holds no .gguf file" in refusal_of(wheel)
    wheel.write_bytes(b"no archive")
    assert "cannot be unpacked (File is not a zip file)" in refusal_of(wheel)


def test_json_of_a_source_is_not_looked_for(tmp_path, tiny):
    """A repository of GGUF files may hold other files of the same names."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    (tmp_path / "model.gguf").write_bytes(tiny.read_bytes())
    assert convert(tmp_path, tmp_path / "out")[0].llama.eos_token_ids == (2, 3)
