"""The embedded tokenizer, and helpers for any tokenizer."""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from poss_jax.checkpoint.record import TOKENIZER_FILES
from poss_jax.config.json_reading import check_own_file
from poss_jax.config.paths import AnyPath, local_files, uploaded
from poss_jax.config.reading import UserError, one_line

if TYPE_CHECKING:
    import transformers

_SUFFIXES = (".json", ".jinja", ".model", ".txt")  # of a tokenizer's files

BOS, EOS, PAD = "<s>", "</s>", "<pad>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "### {{ message['role'] }}\n{{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' }}\n"
    "{% endfor %}{% if add_generation_prompt %}### assistant\n{% endif %}"
)
TOKENIZER_SAMPLE_CHARACTERS = 10_000_000  # more than the standard library has; 2 to 5 s on 2 cores


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, folder: AnyPath
) -> "transformers.PreTrainedTokenizerFast":
    """Trains a lossless byte-level BPE with a chat template and saves it as a Hugging Face one.

    Only the first `TOKENIZER_SAMPLE_CHARACTERS` of the texts are used.

    Raises:
      UserError: the vocabulary cannot hold 256 bytes and 3 special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    alphabet, specials = sorted(pre_tokenizers.ByteLevel.alphabet()), [BOS, EOS, PAD]
    smallest = len(alphabet) + len(specials)
    if vocab_size < smallest:
        raise UserError(f"vocab_size wants at least {smallest} (bytes, specials), got {vocab_size}")
    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    sample, budget = list[str](), TOKENIZER_SAMPLE_CHARACTERS
    for text in texts:
        sample.append(text[:budget])
        budget -= len(text)
        if budget <= 0:
            break
    model.train_from_iterator(sample, trainer)
    model.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, model.token_to_id(BOS))]
    )
    tokenizer = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=model,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    with uploaded(folder) as local:
        tokenizer.save_pretrained(local)
    return tokenizer


def load_tokenizer(folder: AnyPath) -> "transformers.PreTrainedTokenizerBase":
    """Loads the tokenizer of a model folder, as its `tokenizer.json` defines it.

    Needs neither torch nor a network, and runs no code of the folder.

    Raises:
      UserError: the folder holds no tokenizer, a broken one, one that needs custom code, or a
        tokenizer file that `check_own_file` refuses.
    """
    with local_files(folder, TOKENIZER_FILES) as local:
        for path in local.glob("*.*"):
            if path.suffix in _SUFFIXES:
                check_own_file(path)
        has_json = (local / "tokenizer.json").exists()  # else AutoTokenizer converts, with torch
        kind = "PreTrainedTokenizerFast" if has_json else "AutoTokenizer"
        with errors_of_tokenizer(f"{folder}: want a tokenizer, got", "copy its files there"):
            return getattr(_transformers(), kind).from_pretrained(
                local,
                local_files_only=True,
                trust_remote_code=False,
                clean_up_tokenization_spaces=False,  # older versions take spaces out of texts
            )


def call_tokenizer(tokenizer: Any, texts: Any, **settings: Any) -> Any:
    """Encodes texts without a warning for long ones; raises UserError if the tokenizer cannot."""
    with errors_of_tokenizer("this tokenizer fails on a text", "check its files"):
        return tokenizer(texts, verbose=False, **settings)


def special_ids(tokenizer: Any, name: str) -> list[int]:
    """Returns the id of the bos or eos token as a list, empty if there is none."""
    token_id = getattr(tokenizer, f"{name}_token_id")
    return [] if token_id is None else [token_id]


def special_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Pattern of a tokenizer's special tokens as spelled out in a text."""
    added = tokenizer.added_tokens_decoder.values()
    return match_any(token.content for token in added if token.special)


def match_any(texts: Iterable[str]) -> re.Pattern[str]:
    """Pattern that matches any of the texts, longest first; nothing if there are none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def encode_plain(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Encodes plain text: no bos, and no special tokens even if spelled out."""
    return call_tokenizer(
        tokenizer,
        list(texts),
        add_special_tokens=False,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
    )["input_ids"]


@contextmanager
def errors_of_tokenizer(what: str, to_do: str) -> Iterator[None]:
    """Turns any error of a tokenizer into a UserError.

    Its Rust side raises plain Exception, and BaseException on a panic.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise UserError(f"{what}: {one_line(error)}; {to_do}") from error


def _transformers() -> Any:
    """Imports transformers without its advice to install a framework."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers
