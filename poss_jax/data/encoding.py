"""Documents -> tokens and loss masks."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from poss_jax.data.conversations import Chat, Document, Rendered, Tokens
from poss_jax.data.records import Broken
from poss_jax.data.templates import ChatTemplate, RenderedChat
from poss_jax.data.tokenizer import call_tokenizer, encode_plain, special_ids

_DOCUMENTS_PER_CHUNK = 64


def encode_documents(
    documents: Sequence[Document], tokenizer: Any, template: ChatTemplate | None = None
) -> Iterator[list[Tokens] | Broken]:
    """Tokenises documents of one kind.

    A text becomes bos + tokens + eos, all trained on; what looks like a special token in it is
    plain text. Of a chat the answers are trained on.

    Args:
      documents: all of them texts, chats, chats as text, or tokens.
      tokenizer: tokenizer of the target.
      template: chat template.

    Yields:
      For every document the sequences it becomes (of a chat perhaps several, see
      `ChatTemplate.render`), or why it cannot be used.
    """
    with tqdm(total=len(documents), desc="tokenise", unit="doc", delay=2) as progress:
        for start in range(0, len(documents), _DOCUMENTS_PER_CHUNK):
            chunk = documents[start : start + _DOCUMENTS_PER_CHUNK]
            if isinstance(chunk[0], Tokens):
                yield from ([one] for one in chunk if isinstance(one, Tokens))
            elif isinstance(chunk[0], str):
                yield from _encode_texts(chunk, tokenizer)
            else:
                assert template is not None
                yield from _encode_chats([_render(one, template) for one in chunk], tokenizer)
            progress.update(len(chunk))


def _encode_texts(texts: Sequence[Any], tokenizer: Any) -> Iterator[list[Tokens]]:
    bos, eos = special_ids(tokenizer, "bos"), special_ids(tokenizer, "eos")
    for ids in encode_plain(tokenizer, texts):
        whole = np.asarray([*bos, *ids, *eos], np.int32)
        yield [Tokens(whole, np.ones(len(whole), bool))]


def _render(document: Document, template: ChatTemplate) -> list[RenderedChat] | Broken:
    if isinstance(document, Chat):
        return template.render(document)
    assert isinstance(document, Rendered)
    return template.find_answers(document.text)


def _encode_chats(
    rendered: Sequence[list[RenderedChat] | Broken], tokenizer: Any
) -> Iterator[list[Tokens] | Broken]:
    chats = [chat for one in rendered if not isinstance(one, Broken) for chat in one]
    encoded = _encode_rendered(chats, tokenizer)
    for one in rendered:
        if isinstance(one, Broken):
            yield one
            continue
        sequences = list(itertools.islice(encoded, len(one)))
        broken = next((item for item in sequences if isinstance(item, Broken)), None)
        yield broken or [item for item in sequences if isinstance(item, Tokens)]


def _encode_rendered(chats: Sequence[RenderedChat], tokenizer: Any) -> Iterator[Tokens | Broken]:
    if not chats:
        return
    texts = [chat.text for chat in chats]
    bos = special_ids(tokenizer, "bos")
    adds_bos = bos != [] and call_tokenizer(tokenizer, "")["input_ids"][:1] == bos
    encoded = _call(tokenizer, texts, return_offsets_mapping=tokenizer.is_fast)
    for index, chat in enumerate(chats):
        ids = encoded["input_ids"][index]
        if tokenizer.is_fast:
            trained = _inside(_begins(encoded["offset_mapping"][index]), chat.spans)
        else:
            trained = _inside_by_prefixes(ids, chat, tokenizer)
        if isinstance(trained, Broken):
            yield trained
            continue
        # As the engine does for prompts: a template that writes no bos leaves it to the tokenizer.
        head = bos if adds_bos and not chat.text.startswith(tokenizer.bos_token) else []
        yield Tokens(
            np.asarray([*head, *ids], np.int32),
            np.concatenate([np.zeros(len(head), bool), trained]),
        )


def _call(tokenizer: Any, texts: Any, **settings: Any) -> Any:
    return call_tokenizer(
        tokenizer,
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        **settings,
    )


def _begins(offsets: Sequence[tuple[int, int]]) -> np.ndarray:
    """First character of every token.

    Some tokenizers leave blanks out of the offsets; a token that has them begins where the token
    before it ends. Tokens that share a character have the same offsets.
    """
    begin, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    previous = np.concatenate([[0], np.maximum.accumulate(end)])[:-1]
    return np.minimum(begin, previous)


def _inside(begins: np.ndarray, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Marks characters that lie in one of the spans, which are in order."""
    bounds = np.asarray(spans, np.int64).reshape(-1)
    return np.searchsorted(bounds, begins, side="right") % 2 == 1


def _inside_by_prefixes(
    ids: Sequence[int], chat: RenderedChat, tokenizer: Any
) -> np.ndarray | Broken:
    """For tokenizers that tell no characters: tokenises up to every bound."""
    bounds = []
    for bound in itertools.chain(*chat.spans):
        prefix = _call(tokenizer, chat.text[:bound])["input_ids"]
        if list(ids[: len(prefix)]) != list(prefix):
            return Broken("tokens reach across the bound of an answer")
        bounds.append(len(prefix))
    pairs = list(zip(bounds[::2], bounds[1::2], strict=True))
    return _inside(np.arange(len(ids)), pairs)
