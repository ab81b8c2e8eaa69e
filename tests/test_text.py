"""Text that grows token by token: equal to decoding all tokens at once, cut at stop strings."""

import itertools
import random
from pathlib import Path

import pytest
import tokenizer_pool
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from poss_jax.data.tokenizer import load_tokenizer
from poss_jax.engine.text import Piece, TextStream, decode_behind, find_anchor

WORDS = ["a", "the ", " ", "é", "e\u0301", "中文", "日本", "😀", "\ufffd", "\n"]
WORDS += ["👨\u200d👩\u200d👧"]
SPECIAL = ["<s>", "</s>"]


def byte_level() -> PreTrainedTokenizerFast:
    """Llama 3's kind: every token is one or several bytes, not always whole characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ends = {text[i:] for text in map(mapped, ["中a", "a😀", "é "]) for i in range(3)}
    backend = Tokenizer(models.BPE(vocabulary([*alphabet, *sorted(ends)]), merges=[]))
    backend.pre_tokenizer, backend.decoder = encode, decoders.ByteLevel()
    return wrap(backend)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama 2's kind: words, and bytes for the rest."""
    names = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁a", "b", "▁▁", "é", "<0xZZ>"]
    backend = Tokenizer(models.BPE(vocabulary(names), merges=[], byte_fallback=True))
    space, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([space, decoders.ByteFallback(), decoders.Fuse(), strip])
    return wrap(backend)


def mapped(text: str) -> str:
    """Bytes as the characters that byte-level tokens are spelled with."""
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return encode.pre_tokenize_str(text)[0][0]


def vocabulary(names: list[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate([*SPECIAL, *dict.fromkeys(names)])}


def wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    backend.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
CHARACTERS = bytes_to_unicode()  # byte-level spelling of every byte
BYTES = {
    id(BYTE_LEVEL): BYTE_LEVEL.convert_tokens_to_ids([CHARACTERS[byte] for byte in range(256)]),
    id(BYTE_FALLBACK): BYTE_FALLBACK.convert_tokens_to_ids([f"<0x{b:02X}>" for b in range(256)]),
}


def spell(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return [BYTES[id(tokenizer)][byte] for byte in text.encode()]


def decode(tokenizer: PreTrainedTokenizerFast, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


def shown(
    tokenizer, tokens: list[int], stop: tuple[str, ...] = (), anchor: int | None = None
) -> tuple[list[str], TextStream]:
    """Text that each token adds, and that the end adds."""
    stream = TextStream(tokenizer, stop, anchor=anchor)
    parts = [stream.push(token, depth=0) for token in tokens] + [stream.finish()]
    return ["".join(piece.text for piece in part) for part in parts], stream


# --------------------------------------------------------------------------------------------------
# Characters


def test_spaces_stay_where_a_tokenizer_says_to_clean_them_up(tmp_path: Path) -> None:
    """As the files of Llama 3 say; `make test-oldest` runs versions that would do it."""
    backend = byte_level().backend_tokenizer
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"clean_up_tokenization_spaces": true}')
    tokenizer = load_tokenizer(tmp_path)
    for text in ("x != y and a . b", "it 's , don 't ! I 'm", "f ( a , b ) ."):
        tokens = spell(BYTE_LEVEL, text)
        assert decode(tokenizer, tokens) == backend.decode(tokens) == text
        assert decode_behind(tokenizer, None, tokens) == text
        assert "".join(shown(tokenizer, tokens)[0]) == text


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
def test_all_parts_make_the_whole_text(tokenizer: PreTrainedTokenizerFast) -> None:
    rng, broken, letters = random.Random(0), 0, BYTES[id(tokenizer)]
    others = set(range(len(tokenizer) + 3)) - set(letters)  # targets embed more than there are
    for _ in range(400):
        tokens: list[int] = []
        for _ in range(rng.randrange(1, 8)):
            kind = rng.random()
            if kind < 0.5:
                tokens += spell(tokenizer, rng.choice(WORDS))
            elif kind < 0.7:
                tokens += [rng.choice(letters)]
            else:
                tokens += [rng.choice(sorted(others))]
        text = decode(tokenizer, tokens)
        broken += "\ufffd" in text
        parts, _ = shown(tokenizer, tokens)
        assert "".join(parts) == text, tokens
    assert 50 < broken < 350


def shown_and_counted(tokens: list[int]) -> tuple[str, list[int]]:
    """The text, and how many tokens were decoded each time."""
    num_decoded, original = list[int](), PreTrainedTokenizerFast.decode

    def counted(self, ids, **kwargs):
        num_decoded.append(len(ids))
        return original(self, ids, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PreTrainedTokenizerFast, "decode", counted)
        return "".join(shown(BYTE_LEVEL, tokens)[0]), num_decoded


def test_long_runs_of_broken_bytes_are_decoded_in_pieces() -> None:
    rng, letters = random.Random(1), BYTES[id(BYTE_LEVEL)]
    ranges = [(0x80, 0xBF), (0x80, 0xFF), (0xC2, 0xF4), (0x60, 0xFF)] * 5
    runs = [[letters[rng.randint(*ends)] for _ in range(300)] for ends in ranges]
    runs += [[letters[byte] for byte in cut] * 100 for cut in (b"\xf0\x90\x80", b"\xf0\x90")]
    for tokens in runs:
        text, num_decoded = shown_and_counted(tokens)
        assert text == decode(BYTE_LEVEL, tokens)
        assert sum(num_decoded) < 60 * len(tokens)
    _, num_decoded = shown_and_counted(spell(BYTE_LEVEL, "def area(width): return 中 " * 20))
    assert max(num_decoded) <= 5


WORD = BYTE_FALLBACK.convert_tokens_to_ids("b")


@pytest.mark.parametrize(
    ("tokenizer", "tokens", "stop", "parts"),
    [
        (BYTE_LEVEL, spell(BYTE_LEVEL, "x中y"), "", ["x", "", "", "中", "y", ""]),
        (BYTE_LEVEL, spell(BYTE_LEVEL, "x中")[:-1], "", ["x", "", "", "\ufffd"]),
        # A run of bytes is decided at its end, or by the next word.
        (BYTE_FALLBACK, spell(BYTE_FALLBACK, "x中y"), "", ["", "", "", "", "", "x中y"]),
        (BYTE_FALLBACK, [*spell(BYTE_FALLBACK, "中"), WORD], "", ["", "", "", "中b", ""]),
        # What may begin a stop string is held back; an unfinished character may complete one.
        (BYTE_LEVEL, spell(BYTE_LEVEL, "a\n\nb\n"), "\n\n\n", ["a", "", "", "\n\nb", "", "\n"]),
        (BYTE_LEVEL, spell(BYTE_LEVEL, "ab中")[:-1], "b\ufffd", ["a", "", "", "", ""]),
    ],
)
def test_when_a_character_appears(tokenizer, tokens, stop, parts) -> None:
    found, stream = shown(tokenizer, tokens, (stop,) if stop else ())
    assert found == parts and stream.is_stopped == ("\ufffd" in stop)


def test_pieces_carry_the_mark_of_the_token_that_completed_them() -> None:
    word = BYTE_FALLBACK.convert_tokens_to_ids("b")
    tokens = [word, *spell(BYTE_FALLBACK, "é"), word]
    stream = TextStream(BYTE_FALLBACK)
    pieces: list[Piece] = []
    for token, depth in zip(tokens, (0, 0, 3, 0), strict=True):
        pieces += stream.push(token, depth=depth)
    assert pieces == [Piece("b", 0), Piece("é", 3), Piece("b", 0)]
    stream = TextStream(BYTE_LEVEL)
    for token in spell(BYTE_LEVEL, "é")[:1]:
        assert stream.push(token, depth=1) == []
    assert stream.finish() == [Piece("\ufffd", 1)]


# --------------------------------------------------------------------------------------------------
# Text behind a prompt


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
def test_prompt_and_answer_make_the_whole_text(tokenizer: PreTrainedTokenizerFast) -> None:
    rng, num_spaces = random.Random(0), 0
    others = sorted(set(range(len(tokenizer))) - set(BYTES[id(tokenizer)]))
    for _ in range(200):
        prompt, answer = ([rng.choice(others) for _ in range(rng.randrange(1, 6))] for _ in "pa")
        prompt += spell(tokenizer, rng.choice(["", "中", "é "]))
        anchor, before = find_anchor(tokenizer, prompt), decode(tokenizer, prompt)
        text = decode_behind(tokenizer, anchor, answer)
        if anchor is not None and "\ufffd" not in before:
            assert before + text == decode(tokenizer, prompt + answer), (prompt, answer)
        assert "".join(shown(tokenizer, answer, anchor=anchor)[0]) == text
        if tokenizer is BYTE_LEVEL:
            assert text == decode(tokenizer, answer)
        num_spaces += text != decode(tokenizer, answer)
    assert (num_spaces > 20) == (tokenizer is BYTE_FALLBACK)


def test_an_anchor_is_whole_characters_of_the_text() -> None:
    ids = BYTE_FALLBACK.convert_tokens_to_ids(["<s>", "b", "<0x41>"])
    assert find_anchor(BYTE_FALLBACK, [*ids, 10**6]) == ids[1]
    assert find_anchor(BYTE_FALLBACK, ids[:1]) is None
    half = spell(BYTE_LEVEL, "中")[:2]
    assert find_anchor(BYTE_LEVEL, half) is None


# --------------------------------------------------------------------------------------------------
# Stop strings


def first_complete(text: str, stops: tuple[str, ...]) -> str:
    """The rest of a text, found the slow way: stop as soon as a stop string is complete."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


def test_overlapping_stop_strings_in_any_tokens() -> None:
    words = ["".join(word) for n in (1, 2, 3) for word in itertools.product("ab", repeat=n)]
    names = vocabulary([*words, "c"])
    backend = Tokenizer(models.BPE(names, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer, rng, stopped = wrap(backend), random.Random(1), 0
    for _ in range(500):
        tokens = [rng.randrange(2, len(names)) for _ in range(6)]
        stops = tuple("".join(rng.choices("abc", k=rng.randrange(1, 6))) for _ in range(3))
        parts, stream = shown(tokenizer, tokens, stops)
        text = decode(tokenizer, tokens)
        assert "".join(parts) == first_complete(text, stops), (text, stops)
        assert stream.is_stopped == any(stop in text for stop in stops)
        stopped += stream.is_stopped
    assert 100 < stopped < 500


# --------------------------------------------------------------------------------------------------
# Stop strings that name special tokens


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("</s>", "a\nb"),
        ("b</s>", "a\n"),
        ("\nb</s>c", "a"),
        ("</s>c</s>", "a\nb"),
        ("c</s>\n", "a\nb"),
        ("bc", "a\n"),  # names none
        ("<s>", "a\nbc\n"),
        ("b</s>\n", "a\nbc\n"),
    ],
)
def test_stop_strings_meet_the_special_tokens_they_name(tokenizer, stop: str, text: str):
    """The text has none, up to the stop string and without one."""
    end = tokenizer.convert_tokens_to_ids("</s>")
    tokens = [*spell(tokenizer, "a\nb"), end, *spell(tokenizer, "c"), end, *spell(tokenizer, "\n")]
    parts, stream = shown(tokenizer, tokens, (stop,))
    assert "".join(parts) == text and stream.is_stopped == (text != "a\nbc\n")


@pytest.mark.parametrize("kind", tokenizer_pool.POOL)
@pytest.mark.parametrize("name", [*tokenizer_pool.SPECIAL, *tokenizer_pool.TAGS])
def test_stop_strings_may_be_any_token_of_public_tokenizers(kind: str, name: str):
    """Whether it is one token, special or not, or spelled in several."""
    tokenizer = tokenizer_pool.tokenizer_of(kind)
    before, after = (tokenizer_pool.spell(tokenizer, text) for text in ("so it is", " on"))
    letters = [tokenizer_pool.spell(tokenizer, letter) for letter in name]
    spellings = [tokenizer_pool.spell(tokenizer, name), list(itertools.chain(*letters))]
    for spelling in spellings:
        parts, stream = shown(tokenizer, [*before, *spelling, *after], (name,), before[0])
        assert stream.is_stopped
        assert "".join(parts) == decode_behind(tokenizer, before[0], before)


def test_stop_strings_that_do_not_occur_change_no_text():
    rng, num_stopped = random.Random(2), 0
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        specials = tokenizer.convert_tokens_to_ids(SPECIAL)
        others = sorted(set(range(len(tokenizer))) - set(BYTES[id(tokenizer)]) - set(specials))
        for _ in range(300):
            tokens = [rng.choice(rng.choice((others, specials))) for _ in range(8)]
            stop = "".join(rng.choices([*SPECIAL, "a", "b", " "], k=rng.randrange(1, 4)))
            anchor = rng.choice([None, others[-1]])
            parts, stream = shown(tokenizer, tokens, (stop,), anchor)
            whole, begin = "".join(shown(tokenizer, tokens, (), anchor)[0]), "".join(parts)
            num_stopped += stream.is_stopped
            assert whole.startswith(begin) if stream.is_stopped else begin == whole
    assert 100 < num_stopped < 500


def test_names_are_no_text_before_a_stop_string_may_match():
    stream = TextStream(BYTE_LEVEL, ("</s>",))
    end, letter = BYTE_LEVEL.convert_tokens_to_ids("</s>"), spell(BYTE_LEVEL, "a")[0]
    assert stream.push(end, depth=0, may_stop=False) == []
    assert stream.push(letter, depth=0, may_stop=False) == [Piece("a", 0)]
    assert stream.push(end, depth=0) == [] and stream.is_stopped
