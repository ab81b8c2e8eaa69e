"""Hostile GGUF files: a model and a tokenizer that can be used, or one line, in bounded time."""

import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGUFValueType as Value
from gguf_files import HEAD_DIM, draw_tensors, write_gguf
from hypothesis import given
from hypothesis import strategies as st

from poss_jax.config.reading import UserError
from poss_jax.convert.plan import inspect, plan_target
from poss_jax.data.tokenizer import load_tokenizer

MOST_SECONDS = 10.0  # of the processor, for a file of a few kilobytes
FAMILIES = ("llama", "qwen2", "phi3")
MODEL_KEYS = """
    block_count context_length embedding_length feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.value_length attention.sliding_window
    attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base rope.scale_linear
    rope.scaling.type rope.scaling.factor rope.scaling.attn_factor vocab_size expert_count
    rope.scaling.original_context_length rope.scaling.yarn_beta_fast tensor_data_layout new
""".split()
TOKENIZER_KEYS = """
    model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id eom_token_id
    unknown_token_id padding_token_id add_bos_token add_eos_token add_space_prefix
""".split()
KEYS = ["general.architecture", "general.alignment", "split.count", "tokenizer.chat_template"]
KEYS += [f"MODEL.{key}" for key in MODEL_KEYS]
KEYS += [f"tokenizer.ggml.{key}" for key in TOKENIZER_KEYS]
EXTRA = ["rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"]
NAMED = "llama gpt2 bert llama-bpe gpt-2 qwen2 tekken none linear longrope yarn <s> </s>".split()

texts = st.one_of(
    st.sampled_from([*NAMED, "", "\x1b[2J\n", "a a", "▁a", "<0x41>", "{{ messages"]),
    st.text(max_size=5),
    st.integers(9_000, 90_000).map(lambda size: "ab" * size),
)
small = st.integers(-2, 9) | st.sampled_from([-(2**31), 2**31 - 1])
whole = st.one_of(
    st.tuples(small, st.just(Value.INT32)),
    st.tuples(st.sampled_from([0, 1, 8, 64, 2**31, 2**32 - 1]), st.just(Value.UINT32)),
    st.tuples(st.sampled_from([0, 2**31, 2**40, 2**63, 2**64 - 1]), st.just(Value.UINT64)),
)
real = st.tuples(st.floats(width=32), st.just(Value.FLOAT32)) | st.tuples(
    st.floats(), st.just(Value.FLOAT64)
)
lists = st.one_of(
    *(st.lists(inner, min_size=1, max_size=70) for inner in (small, texts, st.floats(width=32)))
)
values = st.one_of(
    whole,
    real,
    st.tuples(st.booleans(), st.just(Value.BOOL)),
    st.tuples(texts, st.just(Value.STRING)),
    st.tuples(lists, st.just(Value.ARRAY)),
    st.none(),  # the key is missing
)
tensors = st.dictionaries(
    st.sampled_from(EXTRA), st.sampled_from([0, 1, HEAD_DIM // 2, HEAD_DIM]), max_size=2
)


@given(
    family=st.sampled_from(FAMILIES),
    changes=st.dictionaries(st.sampled_from(KEYS), values, max_size=4),
    extra=tensors,
)
def test_metadata(family: str, changes: dict[str, Any], extra: dict[str, int]) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in changes.items():
            key = key.replace("MODEL", family)
            writer.kv_data[0].pop(key, None)
            if value is not None:
                writer.add_key_value(key, *value)

    arrays = {name: np.ones(size, np.float32) for name, size in extra.items()}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.gguf")
        write_gguf(file, family, draw_tensors(family), more=change, extra=arrays)
        check(file)


@given(place=st.floats(0, 0.999), data=st.binary(min_size=1, max_size=9), is_inserted=st.booleans())
def test_headers(place: float, data: bytes, is_inserted: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = write_gguf(Path(folder, "model.gguf"), "llama", draw_tensors("llama"))
        content = file.read_bytes()
        start = int(place * content.index(b"token_embd") * 2)  # the tensors' entries follow
        rest = content[start if is_inserted else start + len(data) :]
        file.write_bytes(content[:start] + data + rest)
        check(file)


def check(file: Path) -> None:
    """Converts a file without writing it, and uses its tokenizer; inspects it, too."""
    begun = time.process_time()
    try:
        conversion = plan_target(str(file))
        for _ in conversion.items:
            pass
        tokenizer = load_tokenizer(conversion.tokenizer_from)
        tokenizer.decode(tokenizer("a <s> ▁b\x1b").input_ids)
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 5000, error
    with suppress(UserError):
        inspect(str(file))
    assert time.process_time() - begun < MOST_SECONDS
