"""Tiny GGUF files, written by the package `gguf`, the same in Hugging Face's layout, and texts."""

import itertools
from pathlib import Path

import gguf
import numpy as np
from convert_sources import draw
from gguf import GGMLQuantizationType as Type

WIDTH, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCABULARY, LAYERS, CONTEXT = 32, 4, 2, 8, 48, 64, 2, 128

# What every family calls its layers' weights: name and shape.
NORMS = {"input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,)}
SEPARATE = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
    "mlp.gate_proj": (MLP, WIDTH),
    "mlp.up_proj": (MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
}
FUSED = {
    "self_attn.qkv_proj": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
    "mlp.gate_up_proj": (2 * MLP, WIDTH),
    "mlp.down_proj": (WIDTH, MLP),
}
BIASES = ("q_proj", "k_proj", "v_proj")
# Family -> weights of a layer, the ones with a bias, the q and k norms.
FAMILIES = {
    "llama": (SEPARATE, (), ()),
    "llama_biases": (SEPARATE, tuple(name.split(".")[1] for name in SEPARATE), ()),
    "qwen2": (SEPARATE, BIASES, ()),
    "qwen3": (SEPARATE, (), ("self_attn.q_norm", "self_attn.k_norm")),
    "phi3": (FUSED, (), ()),
}
TOKENS = ["<unk>", "<s>", "</s>", "<|eot_id|>"]
PIECES = [*map(chr, range(33, 32 + VOCABULARY - len(TOKENS))), "!?"]


def architecture_of(family: str) -> str:
    return family.partition("_")[0]


def draw_tensors(family: str, *, tied: bool = False) -> dict[str, np.ndarray]:
    """Draws a model under Hugging Face's names; no norm is 1 and no bias 0."""
    weights, biases, norms = FAMILIES[family]
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "model.norm.weight": (WIDTH,)}
    shapes |= {} if tied else {"lm_head.weight": (VOCABULARY, WIDTH)}
    for layer in range(LAYERS):
        names = {name: (HEAD_DIM,) for name in norms} | NORMS | weights
        shapes |= {f"model.layers.{layer}.{name}.weight": names[name] for name in names}
        for name, shape in weights.items():
            if name.split(".")[1] in biases:
                shapes[f"model.layers.{layer}.{name}.bias"] = shape[:1]
    return {name: array / 4 for name, array in draw(shapes).items()}


def config_of(family: str, **changes) -> dict[str, object]:
    """Describes the model as config.json does."""
    has_biases = family == "llama_biases"
    values = {
        "model_type": architecture_of(family),
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": False,
        "attention_bias": has_biases,
        "mlp_bias": has_biases,
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "sliding_window": None,
    }
    return values | changes


def rotate_neighbours(rows: np.ndarray, heads: int) -> np.ndarray:
    """Orders the rows of queries or keys as llama.cpp does for Llama: halves become neighbours."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    family: str,
    tensors: dict[str, np.ndarray],
    *,
    type: Type = Type.F32,
    more=lambda writer: None,
    without: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    kind: str = "plain",
) -> Path:
    """Writes a model as llama.cpp's converter does.

    Args:
      path: the file.
      family: one of `FAMILIES`.
      tensors: the model, under Hugging Face's names.
      type: type of the matrices whose rows are whole blocks of 32; the rest stays in float32.
      more: adds keys to the metadata.
      without: keys of the metadata to leave out, by their end.
      extra: more tensors, under llama.cpp's names.
      kind: its tokenizer: `plain`, or `none` where `more` adds it.
    """
    name = architecture_of(family)
    writer = gguf.GGUFWriter(path, name)
    for key, value in {
        "context_length": CONTEXT,
        "embedding_length": tensors["model.norm.weight"].size,
        "block_count": LAYERS,
        "feed_forward_length": MLP,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "rope.dimension_count": HEAD_DIM,
    }.items():
        if key not in without:
            writer.add_uint32(f"{name}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    if kind == "plain":  # byte-level, of characters and one pair, with special tokens
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*TOKENS, *PIECES])
        writer.add_token_types([3] * len(TOKENS) + [1] * len(PIECES))
        writer.add_token_merges(["! ?"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    more(writer)
    architecture = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[name]
    names = gguf.get_tensor_name_map(architecture, LAYERS)
    for key, array in tensors.items():
        end = key.rpartition(".")[2]
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(key.split(".")[-2])
        if name == "llama" and heads:
            array = rotate_neighbours(array, heads)
        kept = type if array.ndim == 2 and array.shape[1] % 32 == 0 else Type.F32
        stored = names.get_name(key.removesuffix(f".{end}"))
        writer.add_tensor(f"{stored}.{end}", gguf.quants.quantize(array, kept), raw_dtype=kept)
    for key, array in (extra or {}).items():
        writer.add_tensor(key, array)
    return write_out(writer, path)


def write_out(writer: gguf.GGUFWriter, path: Path) -> Path:
    """Writes what a writer holds to its file, at `path`."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Texts of every kind that tokenizers cut in different ways.
WORDS = """Hello world
don't we'll I'VE they're he'd it's I'm
def f(x):\n\treturn x ** 2  # square\n
for (int i = 0; i < 10; ++i) { a[i] += b[i]; }
SELECT * FROM t WHERE id = 42;
3.14159 1,000,000 0x1F 2024-01-31 12:30
100% $5.00 €7 №8 ½ ² Ⅷ ٣٤ 三十
naïve café Ångström ﬁne e\u0301
Привет, мир! Γειά σου Κόσμε
你好，世界。日本語のテキスト 한국어
مرحبا بالعالم שלום नमस्ते ไทย
😀👍🏽👨\u200d👩\u200d👧 🇫🇷
https://example.org/a?b=c&d=e#f
a_b-c/d\\e|f~g`h
<b>bold</b> {{x}} [[y]] ((z))
!!! ??? ... --- ===
\u00a0\u2003\u200b\ufeff
CamelCase snake_case UPPER lower
\x00\x07\x1b[0m
<|im_start|>user<|im_end|>""".splitlines()
SPACES = ("", " ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", " \t ", "\n  \n ")


def varied_texts() -> list[str]:
    """Pieces of every kind behind, before and between spaces of every kind."""
    pairs = zip(itertools.cycle(WORDS), itertools.product(SPACES, SPACES, range(2)), strict=False)
    texts = [f"{left}{word}{right}{WORDS[i]}" for word, (left, right, i) in pairs]
    return texts + WORDS + [space * 7 for space in SPACES]
