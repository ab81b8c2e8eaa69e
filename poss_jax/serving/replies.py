"""Chunks of answers -> the bodies and events of the OpenAI API."""

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

from poss_jax.engine.answers import Chunk, Generation, TokenLogprobs, answer_anchor
from poss_jax.engine.engine import Engine
from poss_jax.engine.prompts import PreparedPrompt
from poss_jax.engine.streams import Chunks
from poss_jax.engine.text import TextStream, decode_behind, find_anchor, special_names, token_bytes
from poss_jax.serving.bodies import ApiError
from poss_jax.serving.requests import Job
from poss_jax.serving.tools import Call, CallReader

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_PART = re.compile(r"bytes:((?:\\x[0-9a-f]{2})+)")


@dataclass
class _Choice:
    """One choice of a reply, as far as it has come."""

    prompt: PreparedPrompt
    echo: str
    places: "_Places"
    reader: CallReader | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    answer: Generation | None = None

    @property
    def calls(self) -> list[Call]:
        """The calls so far."""
        return self.reader.calls if self.reader else []


class Reply:
    """The reply to one request, built from the chunks of its choices."""

    def __init__(self, engine: Engine, job: Job, *, model: str) -> None:
        """Begins a reply of the model of some name."""
        self._engine, self._job = engine, job
        self._about = {
            "id": f"{'chatcmpl' if job.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if job.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": engine.fingerprint,
        }
        tokenizer = engine.tokenizer
        anchor = tokenizer and find_anchor(tokenizer, job.prompts[0].ids)
        self._name = cache(partial(_find_name, tokenizer, anchor))
        self._choices = []
        for prompt, echo in zip(job.prompts, job.echo, strict=True):
            # The answer's text begins without what it continues.
            text = tokenizer and TextStream(tokenizer, anchor=answer_anchor(prompt, tokenizer))
            reader = CallReader(job.caller) if job.caller else None
            self._choices.append(_Choice(prompt, echo, _Places(text, len(echo), {}, ""), reader))
        # By prompt, in the forms of completions and of vLLM.
        self._echoed: dict[int, dict[str, Any]] = {}
        self._scored: dict[int, list[dict[str, Any] | None]] = {}

    def take_scores(self, index: int, scores: Sequence[TokenLogprobs]) -> None:
        """Adds the log-probabilities of a prompt's tokens but the first, before anything else."""
        job, tokenizer = self._job, self._engine.tokenizer
        first = self._choices[index * job.num_choices]
        tokens, names = first.prompt.ids, {}
        if job.num_logprobs is not None and not job.is_chat:
            # A prompt that was sent as text may spell out special tokens.
            if tokenizer and tokenizer.decode(tokens, skip_special_tokens=True) != first.echo:
                names = special_names(tokenizer)
            places = _Places(tokenizer and TextStream(tokenizer), 0, names, first.echo)
            self._echoed[index] = self._of_completion(tokens, [None, *scores], places)
        if job.num_prompt_logprobs is not None:
            self._scored[index] = [None, *map(self._of_position, tokens[1:], scores)]

    def first_events(self) -> list[dict[str, Any]]:
        """Events that begin a stream: a chat's role, an echo's prompt, its token ids."""
        events, has_ids = [], "token_ids" in self._job.extras
        for index, choice in enumerate(self._choices):
            first: dict[str, Any] = {"text": choice.echo}
            if self._job.is_chat:
                first = {"delta": {"role": "assistant", "content": ""}}
            if has_ids:
                first["prompt_token_ids"] = choice.prompt.ids
            if self._job.is_chat or has_ids or choice.echo:
                logprobs = self._echoed.get(index // self._job.num_choices)
                shown = {"index": index, **first, "logprobs": logprobs, "finish_reason": None}
                events.append(self._event([shown]))
        return events

    def take(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """Adds a chunk to a choice; returns its event, None if it shows nothing."""
        choice, extras = self._choices[index], self._job.extras
        if not self._job.has_answer:
            chunk = Chunk([], [], [], answer=chunk.answer and replace(chunk.answer, text=""))
        choice.tokens += chunk.output_ids
        logprobs = None
        if self._job.num_logprobs is not None and chunk.output_ids:
            logprobs = self._format_logprobs(choice, chunk.output_ids, chunk.logprobs)
            choice.logprobs.append(logprobs)
        choice.answer = answer = chunk.answer
        text = self._delta(choice, chunk)
        if not (any(text.values()) or answer or logprobs or "token_ids" in extras):
            return None
        shown = {"index": index, **({"delta": text} if self._job.is_chat else text)}
        shown |= {"logprobs": logprobs, "finish_reason": answer and self._finish(choice)}
        if "speculation" in extras:
            shown["speculation"] = {"pieces": [[p.text, p.depth] for p in chunk.pieces]}
        if "token_ids" in extras:
            shown["token_ids"] = chunk.output_ids
        return self._event([shown])

    def _split(self, choice: _Choice, chunk: Chunk) -> list[str | Call]:
        """Texts and calls that a chunk adds to a message, in their order."""
        if choice.reader is None:
            return [chunk.text] if chunk.text else []
        return choice.reader.push(chunk.text, is_last=chunk.answer is not None)

    def _delta(self, choice: _Choice, chunk: Chunk) -> dict[str, Any]:
        """The delta that a chunk adds to the text, or to a message: text and calls."""
        if not self._job.is_chat:
            return {"text": chunk.text}
        num_before, items = len(choice.calls), self._split(choice, chunk)
        text = "".join(item for item in items if isinstance(item, str))
        calls = [item for item in items if isinstance(item, dict)]
        calls = [{"index": number, **call} for number, call in enumerate(calls, num_before)]
        return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _finish(self, choice: _Choice) -> str:
        """Why a choice ended; the API has no word for a deadline."""
        answer = choice.answer
        if answer is None or answer.stop_reason != "stop" or not self._job.has_answer:
            return "length"
        return "tool_calls" if choice.calls else "stop"

    async def write_body(self, chunks: Chunks) -> dict[str, Any]:
        """Takes all chunks; returns the whole reply."""
        async for item in chunks:
            if item is not None:
                self.take(*item)
        return self.body()

    async def write_events(self, chunks: Chunks) -> AsyncIterator[bytes]:
        """Takes all chunks; yields server-sent events."""
        try:
            for first in self.first_events():
                yield event(first)
            async for item in chunks:
                if item is None:
                    yield KEEP_ALIVE
                elif (data := self.take(*item)) is not None:
                    yield event(data)
            if "usage" in self._job.extras:
                yield event(self._event([]) | {"usage": self.usage()} | self.metrics())
            yield DONE
        except ApiError as error:
            yield event(error.body())

    def body(self) -> dict[str, Any]:
        """The whole reply, once all choices have ended."""
        is_chat, has_scores = self._job.is_chat, self._job.num_prompt_logprobs is not None
        choices = []
        for index, choice in enumerate(self._choices):
            assert choice.answer is not None, "want the end of every choice"
            prompt_index = index // self._job.num_choices
            text = choice.echo + (choice.answer.text or "")
            shown: dict[str, Any] = {"index": index, "text": text}
            if is_chat:
                message = {"role": "assistant", "content": text, "refusal": None}
                if choice.reader and choice.calls:
                    message |= {"content": choice.reader.text or None, "tool_calls": choice.calls}
                shown = {"index": index, "message": message}
            logprobs = None
            if self._job.num_logprobs is not None:
                echoed = self._echoed.get(prompt_index)
                rows = [echoed or self._format_logprobs(choice, (), ()), *choice.logprobs]
                logprobs = {
                    name: None if first is None else [item for row in rows for item in row[name]]
                    for name, first in rows[0].items()
                }
            shown |= {"logprobs": logprobs, "finish_reason": self._finish(choice)}
            if has_scores and not is_chat:
                shown["prompt_logprobs"] = self._scored[prompt_index]
            if "token_ids" in self._job.extras:
                shown |= {"token_ids": choice.tokens, "prompt_token_ids": choice.prompt.ids}
            choices.append(shown)
        reply = self._about | {"choices": choices, "usage": self.usage()} | self.metrics()
        return reply | ({"prompt_logprobs": self._scored[0]} if has_scores and is_chat else {})

    def usage(self) -> dict[str, Any]:
        """Token counts, and (ours) counts of drafted and copied tokens."""
        answers = [choice.answer for choice in self._choices if choice.answer is not None]
        completion = sum(len(choice.tokens) for choice in self._choices)
        firsts = self._choices[:: self._job.num_choices]
        prompt = sum(len(choice.prompt.ids) for choice in firsts)
        cached = sum(choice.answer.cached_tokens for choice in firsts if choice.answer is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "speculation": count_accepted(answers),
        }

    def metrics(self) -> dict[str, Any]:
        """The acceptance of a single answer in vLLM's place; nothing without drafts or copies."""
        max_accepted, answer = self._engine.max_accepted, self._choices[0].answer
        if answer is None or len(self._choices) > 1 or not max_accepted:
            return {}
        return {"metrics": {"speculative_decoding": describe_acceptance(answer, max_accepted)}}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._job.is_chat else "text_completion"
        event = self._about | {"object": kind, "choices": choices}
        return event | {"usage": None} if "usage" in self._job.extras else event

    def _format_logprobs(
        self, choice: _Choice, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Log-probabilities of some tokens, in the form of chats or of completions."""
        if not self._job.is_chat:
            return self._of_completion(tokens, logprobs, choice.places)
        k, content = self._job.num_logprobs or 0, []
        for token, row in zip(tokens, logprobs, strict=True):
            best = zip(map(self._name, row.ids[:k]), row.top[:k], strict=True)
            top = [format_token(name, value) for name, value in best]
            content.append(format_token(self._name(token), row.chosen) | {"top_logprobs": top})
        return {"content": content, "refusal": None}

    def _of_completion(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], places: "_Places"
    ) -> dict[str, Any]:
        """Log-probabilities in the form of completions; a prompt's first token has none."""
        k = self._job.num_logprobs or 0
        best = [([], []) if row is None else (row.ids[:k], row.top[:k]) for row in logprobs]
        return {
            "tokens": [
                self._names([*ids, token])[token]
                for token, (ids, _) in zip(tokens, best, strict=True)
            ],
            "token_logprobs": [row and row.chosen for row in logprobs],
            "top_logprobs": [
                row and dict(zip(self._names(ids).values(), top, strict=True))
                for row, (ids, top) in zip(logprobs, best, strict=True)
            ],
            "text_offset": list(map(places.take, tokens)),
        }

    def _of_position(self, token: int, row: TokenLogprobs) -> dict[str, Any]:
        """Log-probabilities at a prompt's token in vLLM's form: its own, and the likeliest."""
        k = self._job.num_prompt_logprobs or 0
        values = {token: row.chosen} | dict(zip(row.ids[:k], row.top[:k], strict=True))
        ranks = {candidate: rank for rank, candidate in enumerate(row.ids, start=1)}
        return {
            str(candidate): {
                "logprob": value,
                "rank": ranks.get(candidate),  # None: beyond what is computed
                "decoded_token": self._name(candidate),
            }
            for candidate, value in values.items()
        }

    def _names(self, tokens: Sequence[int]) -> dict[int, str]:
        """Names of tokens by id; only the first of several with one text is named by it."""
        names: dict[int, str] = {}
        for token in dict.fromkeys(tokens):
            name = self._name(token)
            names[token] = f"token_id:{token}" if not name or name in names.values() else name
        return names


def _find_name(tokenizer: Any, anchor: int | None, token: int) -> str:
    """The text of a token; for part of a character its bytes, as OpenAI names them."""
    if tokenizer is None:
        return str(token)
    text = decode_behind(tokenizer, anchor, [token], skip_special_tokens=False)
    spelled = token_bytes(tokenizer, token) if _UNKNOWN in text else None
    if spelled is None or spelled == text.encode():
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def format_token(name: str, logprob: float) -> dict[str, Any]:
    """Converts a token's completions name to the form of chats."""
    if match := _PART.fullmatch(name):
        spelled = bytes.fromhex(match.group(1).replace("\\x", ""))
        text = spelled.decode(errors="replace")
        return {"token": text, "logprob": logprob, "bytes": list(spelled)}
    spelled_out = None if _UNKNOWN in name else list(name.encode())
    return {"token": name, "logprob": logprob, "bytes": spelled_out}


class _Places:
    """Offsets of tokens in a text; parts of a character get the character's."""

    def __init__(
        self, text: TextStream | None, begin: int, names: Mapping[int, str], spelled: str
    ) -> None:
        """Begins at an offset; tokens with `names` are text where they are `spelled` out."""
        self._text, self._end = text, begin
        self._names, self._spelled = names, spelled

    def take(self, token: int) -> int:
        """Adds the next token; returns the offset where its text begins."""
        begin, pieces = self._end, self._text.push(token, depth=0) if self._text else []
        self._end += sum(len(piece.text) for piece in pieces)
        name = self._names.get(token, "")
        self._end += len(name) if self._spelled.startswith(name, begin) else 0
        return begin


# --------------------------------------------------------------------------------------------------
# What answers say about their drafts: our counts, and each answer's in the shape of vLLM


def count_accepted(answers: Sequence[Generation]) -> dict[str, Any]:
    """Counts the rounds and accepted tokens of some answers."""
    rounds = [count for answer in answers for count in answer.accepted_per_round]
    positions = Counter(i for count in rounds for i in range(1, count + 1))
    return {
        "rounds": len(rounds),
        "accepted_tokens": sum(rounds),
        "copied_tokens": sum(sum(answer.copied_per_round) for answer in answers),
        "acceptance_length": sum(rounds) / len(rounds) + 1 if rounds else 1.0,
        "accepted_per_position": [positions[i] for i in range(1, len(positions) + 1)],
    }


def describe_acceptance(answer: Generation, max_accepted: int) -> dict[str, Any]:
    """Describes the rounds of one answer that had drafts, as vLLM's `speculative_decoding`.

    A tree counts as long as the path that the text took through it: to its deepest position there.

    Args:
      max_accepted: most drafted tokens that a round can accept.
    """
    rounds = zip(answer.accepted_per_round, answer.offered_per_round, strict=True)
    steps = [(accepted, offered) for accepted, offered in rounds if offered]
    num_accepted, num_drafted = (sum(step[i] for step in steps) for i in (0, 1))
    by_length = {length: [0] * (length + 1) for length in sorted({step[1] for step in steps})}
    for accepted, offered in steps:
        by_length[offered][accepted] += 1
    counts = Counter(accepted for accepted, _ in steps)
    return {
        "mean_acceptance_length": 1 + num_accepted / max(len(steps), 1),
        "draft_acceptance_rate": num_accepted / max(num_drafted, 1),
        "acceptance_histogram": [counts[i] for i in range(max_accepted + 1)],
        "acceptance_histogram_by_draft_length": {str(k): row for k, row in by_length.items()},
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": max_accepted,
    }
