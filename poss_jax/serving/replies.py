"""Chunks of answers -> the bodies and events of the OpenAI API."""

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
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
        self._tokens: list[list[int]] = [[] for _ in job.prompts]
        self._logprobs: list[list[dict[str, Any]]] = [[] for _ in job.prompts]
        self._answers: list[Generation | None] = [None] * len(job.prompts)
        caller = job.caller
        self._readers = [CallReader(caller) for _ in job.prompts] if caller else None
        tokenizer = engine.tokenizer
        self._anchor = tokenizer and find_anchor(tokenizer, job.prompts[0].ids)
        self._places = [
            _Places(_begin_text(engine, prompt), len(text))
            for prompt, text in zip(job.prompts, job.echo, strict=True)
        ]
        self._names_known: dict[int, str] = {}
        # By prompt, in the forms of completions and of vLLM.
        self._echoed: dict[int, dict[str, Any]] = {}
        self._scored: dict[int, list[dict[str, Any] | None]] = {}

    def take_scores(self, index: int, scores: Sequence[TokenLogprobs]) -> None:
        """Adds the log-probabilities of a prompt's tokens but the first, before anything else."""
        job, tokenizer = self._job, self._engine.tokenizer
        tokens = job.prompts[index * job.num_choices].ids
        if job.num_logprobs is not None and not job.is_chat:
            places = _begin_echo(tokenizer, tokens, job.echo[index * job.num_choices])
            self._echoed[index] = self._of_completion(tokens, [None, *scores], places)
        if job.num_prompt_logprobs is not None:
            listed = map(self._of_position, tokens[1:], scores)
            self._scored[index] = [None, *listed]

    def first_events(self) -> list[dict[str, Any]]:
        """Events that begin a stream: a chat's role, an echo's prompt, its token ids."""
        if self._job.is_chat:
            firsts = [{"delta": {"role": "assistant", "content": ""}} for _ in self._job.prompts]
        else:
            firsts = [{"text": text} for text in self._job.echo]
        events = []
        for index, (first, prompt) in enumerate(zip(firsts, self._job.prompts, strict=True)):
            if "token_ids" in self._job.extras:
                first = first | {"prompt_token_ids": prompt.ids}
            if self._job.is_chat or "token_ids" in self._job.extras or self._job.echo[index]:
                logprobs = self._echoed.get(index // self._job.num_choices)
                choice = {"index": index, **first, "logprobs": logprobs, "finish_reason": None}
                events.append(self._event([choice]))
        return events

    def take(self, index: int, chunk: Chunk) -> dict[str, Any] | None:
        """Adds a chunk to a choice; returns its event, None if it shows nothing."""
        if not self._job.has_answer:
            chunk = Chunk([], [], [], answer=chunk.answer and replace(chunk.answer, text=""))
        self._tokens[index] += chunk.output_ids
        logprobs = None
        if self._job.num_logprobs is not None and chunk.output_ids:
            logprobs = self._format_logprobs(index, chunk.output_ids, chunk.logprobs)
            self._logprobs[index].append(logprobs)
        self._answers[index] = answer = chunk.answer
        text = self._delta(index, chunk)
        is_shown = any(text.values()) or answer or logprobs or "token_ids" in self._job.extras
        if not is_shown:
            return None
        choice = {"index": index, **({"delta": text} if self._job.is_chat else text)}
        choice |= {"logprobs": logprobs, "finish_reason": answer and self._finish(index)}
        if "speculation" in self._job.extras:
            choice["speculation"] = {"pieces": [[p.text, p.depth] for p in chunk.pieces]}
        if "token_ids" in self._job.extras:
            choice["token_ids"] = chunk.output_ids
        return self._event([choice])

    def _split(self, index: int, chunk: Chunk) -> list[str | Call]:
        """Texts and calls that a chunk adds to a message, in their order."""
        if self._readers is None:
            return [chunk.text] if chunk.text else []
        return self._readers[index].push(chunk.text, is_last=chunk.answer is not None)

    def _delta(self, index: int, chunk: Chunk) -> dict[str, Any]:
        """The delta that a chunk adds to the text, or to a message: text and calls."""
        if not self._job.is_chat:
            return {"text": chunk.text}
        items = self._split(index, chunk)
        text = "".join(item for item in items if isinstance(item, str))
        calls = [item for item in items if isinstance(item, dict)]
        num_before = len(self._readers[index].calls) - len(calls) if self._readers else 0
        calls = [{"index": number, **call} for number, call in enumerate(calls, num_before)]
        return ({"content": text} if text else {}) | ({"tool_calls": calls} if calls else {})

    def _message(self, index: int, text: str) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        if self._readers is None or not (calls := self._readers[index].calls):
            return message
        return message | {"content": self._readers[index].text or None, "tool_calls": calls}

    def _finish(self, index: int) -> str:
        """Why a choice ended; the API has no word for a deadline."""
        answer = self._answers[index]
        if answer is None or answer.stop_reason != "stop" or not self._job.has_answer:
            return "length"
        return "tool_calls" if self._readers and self._readers[index].calls else "stop"

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
        choices = [self._choice(index) for index in range(len(self._answers))]
        reply = self._about | {"choices": choices, "usage": self.usage()} | self.metrics()
        is_listed = self._job.is_chat and self._job.num_prompt_logprobs is not None
        return reply | {"prompt_logprobs": self._scored[0]} if is_listed else reply

    def usage(self) -> dict[str, Any]:
        """Token counts, and (ours) counts of drafted and copied tokens."""
        answers = [answer for answer in self._answers if answer is not None]
        completion = sum(map(len, self._tokens))
        prompt = sum(len(prepared.ids) for prepared in self._job.prompts[:: self._job.num_choices])
        firsts = self._answers[:: self._job.num_choices]
        cached = sum(answer.cached_tokens for answer in firsts if answer is not None)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "speculation": count_accepted(answers),
        }

    def metrics(self) -> dict[str, Any]:
        """The acceptance of a single answer in vLLM's place; nothing without drafts or copies."""
        max_accepted, answer = self._engine.max_accepted, self._answers[0]
        if answer is None or len(self._answers) > 1 or not max_accepted:
            return {}
        return {"metrics": {"speculative_decoding": describe_acceptance(answer, max_accepted)}}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._job.is_chat else "text_completion"
        event = self._about | {"object": kind, "choices": choices}
        return event | {"usage": None} if "usage" in self._job.extras else event

    def _choice(self, index: int) -> dict[str, Any]:
        answer = self._answers[index]
        assert answer is not None, "want the end of every choice"
        text = self._job.echo[index] + (answer.text or "")
        choice: dict[str, Any] = {"index": index}
        if self._job.is_chat:
            choice["message"] = self._message(index, text)
        else:
            choice["text"] = text
        logprobs = None
        if self._job.num_logprobs is not None:
            echoed = self._echoed.get(index // self._job.num_choices)
            first = echoed or self._format_logprobs(index, (), ())
            logprobs = _join(first, *self._logprobs[index])
        choice |= {"logprobs": logprobs, "finish_reason": self._finish(index)}
        if self._job.num_prompt_logprobs is not None and not self._job.is_chat:
            choice["prompt_logprobs"] = self._scored[index // self._job.num_choices]
        if "token_ids" in self._job.extras:
            choice["token_ids"] = self._tokens[index]
            choice["prompt_token_ids"] = self._job.prompts[index].ids
        return choice

    def _format_logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        """Log-probabilities of some tokens, in the form of chats or of completions."""
        if not self._job.is_chat:
            return self._of_completion(tokens, logprobs, self._places[index])
        k = self._job.num_logprobs or 0
        return {
            "content": [
                self._of_token(token, row.chosen)
                | {
                    "top_logprobs": [
                        self._of_token(candidate, value)
                        for candidate, value in zip(row.ids[:k], row.top[:k], strict=True)
                    ]
                }
                for token, row in zip(tokens, logprobs, strict=True)
            ],
            "refusal": None,
        }

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

    def _of_token(self, token: int, logprob: float) -> dict[str, Any]:
        return format_token(self._name(token), logprob)

    def _name(self, token: int) -> str:
        if token not in self._names_known:
            self._names_known[token] = self._find_name(token)
        return self._names_known[token]

    def _find_name(self, token: int) -> str:
        """The text of a token; for part of a character its bytes, as OpenAI names them."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            return str(token)
        text = decode_behind(tokenizer, self._anchor, [token], skip_special_tokens=False)
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


def _join(*parts: dict[str, Any]) -> dict[str, Any]:
    """Joins the lists of log-probabilities of one choice."""
    return {
        name: None if first is None else [item for logprobs in parts for item in logprobs[name]]
        for name, first in parts[0].items()
    }


def _begin_text(engine: Engine, prompt: PreparedPrompt) -> TextStream | None:
    """Begins the text of an answer, without what it continues."""
    tokenizer = engine.tokenizer
    return tokenizer and TextStream(tokenizer, anchor=answer_anchor(prompt, tokenizer))


def _begin_echo(tokenizer: Any, tokens: Sequence[int], echo: str) -> "_Places":
    """Begins the text of a prompt, which may spell out special tokens if it was sent as text."""
    if tokenizer is None:
        return _Places(None, 0)
    is_bare = tokenizer.decode(tokens, skip_special_tokens=True) == echo
    names = {} if is_bare else special_names(tokenizer)
    return _Places(TextStream(tokenizer), 0, names, echo)


class _Places:
    """Offsets of tokens in a text; parts of a character get the character's."""

    def __init__(
        self,
        text: TextStream | None,
        begin: int,
        names: Mapping[int, str] = MappingProxyType({}),
        spelled: str = "",
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
