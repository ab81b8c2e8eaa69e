"""Documents -> tokens and loss masks."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from poss_jax.data.conversations import Chat, Document, Rendered, Tokens
from poss_jax.data.marks import encode_rendered
from poss_jax.data.progress import progress_bar
from poss_jax.data.records import Broken
from poss_jax.data.templates import ChatTemplate, RenderedChat
from poss_jax.data.tokenizer import encode_plain, special_ids

_DOCUMENTS_PER_CHUNK = 64


def encode_documents(
    documents: Sequence[Document], tokenizer: Any, template: ChatTemplate | None = None
) -> Iterator[list[Tokens] | Broken]:
    """Tokenises documents of one kind.

    A text becomes bos + tokens + eos, all trained; special tokens spelled out in it are plain
    text. In a chat the answers are trained, each after the tokens of its prompt.

    Args:
      documents: all of them texts, chats, chats as text, or tokens.

    Yields:
      The sequences of every document (several for some chats, see `ChatTemplate.render` and
      `_join`), or why it cannot be used.
    """
    with progress_bar(total=len(documents), desc="tokenise", unit="doc", delay=2) as progress:
        for start in range(0, len(documents), _DOCUMENTS_PER_CHUNK):
            chunk = documents[start : start + _DOCUMENTS_PER_CHUNK]
            if isinstance(chunk[0], Tokens):
                yield from ([tokens] for tokens in chunk if isinstance(tokens, Tokens))
            elif isinstance(chunk[0], str):
                yield from _encode_texts(chunk, tokenizer)
            else:
                assert template is not None
                yield from _encode_chats([_render(chat, template) for chat in chunk], tokenizer)
            progress.update(len(chunk))


def _encode_texts(texts: Sequence[Any], tokenizer: Any) -> Iterator[list[Tokens]]:
    bos, eos = special_ids(tokenizer, "bos"), special_ids(tokenizer, "eos")
    for ids in encode_plain(tokenizer, texts):
        row = np.asarray([*bos, *ids, *eos], np.int32)
        yield [Tokens(row, np.ones(len(row), bool))]


def _render(document: Document, template: ChatTemplate) -> list[RenderedChat] | Broken:
    if isinstance(document, Chat):
        return template.render(document)
    assert isinstance(document, Rendered)
    return template.find_answers(document.text)


def _encode_chats(
    rendered: Sequence[list[RenderedChat] | Broken], tokenizer: Any
) -> Iterator[list[Tokens] | Broken]:
    chats = [chat for item in rendered if not isinstance(item, Broken) for chat in item]
    bounds = [[*itertools.chain(*chat.spans), len(chat.text)] for chat in chats]
    beginnings = [chat.text[:end] for chat, ends in zip(chats, bounds, strict=True) for end in ends]
    encoded = iter(encode_rendered(tokenizer, beginnings) if beginnings else [])
    sequences = (
        _join(chat, list(itertools.islice(encoded, len(ends))), tokenizer)
        for chat, ends in zip(chats, bounds, strict=True)
    )
    for item in rendered:
        if isinstance(item, Broken):
            yield item
        else:
            yield list(itertools.chain(*itertools.islice(sequences, len(item))))


def _join(chat: RenderedChat, encoded: Sequence[list[int]], tokenizer: Any) -> Iterator[Tokens]:
    """Joins prompts, as the target reads them, and answers, as it writes them.

    One sequence holds all turns, unless a prompt tokenises differently from the turns before it. If
    an answer's start merges with the end of its prompt, later prompts hold the merged tokens; then
    a new sequence starts with that prompt.

    Args:
      encoded: tokens up to the start and the end of each answer, then of the whole text.
    """
    ids: list[int] = []
    trained: list[bool] = []
    *bounds, complete = encoded
    for asked, answered, span in zip(bounds[::2], bounds[1::2], chat.spans, strict=True):
        if asked[: len(ids)] != ids:
            yield _as_tokens(ids, trained)
            trained = []
        answer = answered[len(asked) :]
        if answered[: len(asked)] != asked:
            answer = _encode_alone(tokenizer, chat.text[slice(*span)])
        trained += [False] * (len(asked) - len(trained)) + [True] * len(answer)
        ids = asked + answer
    yield _as_tokens(complete if complete[: len(ids)] == ids else ids, trained)


def _as_tokens(ids: Sequence[int], trained: Sequence[bool]) -> Tokens:
    """Makes a document; tokens after the last flag are not trained."""
    mask = np.zeros(len(ids), bool)
    mask[: len(trained)] = trained
    return Tokens(np.asarray(ids, np.int32), mask)


def _encode_alone(tokenizer: Any, answer: str) -> list[int]:
    """Encodes an answer after a letter that it does not merge with.

    Some tokenizers put a space before the start of a text.
    """
    for prefix in ("x", "\n", "1"):
        alone, both = encode_rendered(tokenizer, [prefix, prefix + answer])
        if both[: len(alone)] == alone:
            return both[len(alone) :]
    return encode_rendered(tokenizer, [answer])[0]
