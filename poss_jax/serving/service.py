"""The service behind the endpoints: reads requests, submits them, answers them, and measures.

Metrics are in Prometheus' format, with the names of vLLM and inference gateways after `poss:`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.types import Receive, Scope, Send

from poss_jax.config.decoding import ServeConfig
from poss_jax.config.paths import as_path
from poss_jax.config.reading import UserError
from poss_jax.engine.engine import Engine
from poss_jax.engine.scheduler import Closed, Scheduler
from poss_jax.engine.streams import Chunks, Ticket, merge
from poss_jax.serving.bodies import ApiError, parse_body, receive_body
from poss_jax.serving.replies import Reply
from poss_jax.serving.requests import Job, add_guides, submit_grammar

_KEEP_ALIVE_SECONDS = 10.0
_POLL_SECONDS = 0.25
_LARGE_BYTES = 2**16
_VLLM_NAMES = {
    f"poss:{name}": f"vllm:{name}"
    for name in (
        *("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"),
        *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
        *("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_success"),
        *("spec_decode_num_drafts", "spec_decode_num_draft_tokens"),
        *("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"),
    )
}
_VLLM_NAMES["poss:time_per_output_token_seconds"] = "vllm:request_time_per_output_token_seconds"
_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Service:
    """State shared by the endpoints."""

    def __init__(self, config: ServeConfig, engine: Engine, scheduler: Scheduler) -> None:
        self.config, self.engine, self.scheduler = config, engine, scheduler
        self.limits = replace(config, max_length=scheduler.max_length)
        self.model = config.model_name or as_path(config.target).name
        self.metrics = Metrics(scheduler, self.model)  # what /metrics shows
        self.is_draining = False  # running answers finish, no new ones start
        self._reader_of_large, self._scorer = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def close(self) -> None:
        """Ends the scheduler and the reading threads."""
        for pool in (self._reader_of_large, self._scorer):
            pool.shutdown(wait=False, cancel_futures=True)
        self.scheduler.close()

    async def read(self, request: Request, kind: type[Any], read: Callable[..., Any]) -> Any:
        """Reads a request off the event loop: its body, and what `read` makes of it.

        Large bodies are read one at a time, which bounds their memory. After each, the reading
        thread sleeps as long as parsing took: pydantic holds the GIL and would starve /health.

        Raises:
          ApiError: something in it cannot be served, or the client has left.
        """
        content = await receive_body(request)
        is_large = len(content) > _LARGE_BYTES

        def parse() -> Any:
            begun = time.monotonic()
            try:
                body = parse_body(kind, content)
                self.check_model(getattr(body, "model", None))
                return body, read(self.engine, self.limits, body)
            finally:
                if is_large:
                    time.sleep(time.monotonic() - begun)

        pool = self._reader_of_large if is_large else None
        parsing = asyncio.get_running_loop().run_in_executor(pool, parse)
        return await _unless_left(request, parsing)

    @property
    def is_ready(self) -> bool:
        """True if the server answers requests; some programs may still be compiled."""
        compilation = self.scheduler.compilation
        is_warm = compilation is not None and bool(compilation.sizes)
        return is_warm and not self.is_draining and self.scheduler.error is None

    @property
    def is_compiled(self) -> bool:
        """True if nothing is left to compile."""
        return self.scheduler.compilation is not None and self.scheduler.compilation.is_done

    @property
    def about_model(self) -> dict[str, Any]:
        """The model as the API describes it."""
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "poss_jax"}
        return model | {
            "max_model_len": self.scheduler.max_length,
            "has_chat_template": bool(getattr(self.engine.tokenizer, "chat_template", None)),
        }

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if another model is asked for."""
        if name is not None and name != self.model:
            message, code = f"want the model {self.model}", "model_not_found"
            raise ApiError(404, message, param="model", code=code)

    async def _submit(self, job: Job) -> list[Ticket]:
        """Puts all choices of a request into the queue, or none.

        In a thread if an answer is continued, since its text is decoded first.
        """
        submit = partial(
            self.scheduler.submit_all,
            job.prompts,
            stop=job.stop,
            has_logprobs=job.num_logprobs is not None,
            timeout=self.config.timeout_seconds,
        )
        if not any(prompt.num_continued for prompt in job.prompts):
            return submit()
        submitted = asyncio.create_task(asyncio.to_thread(submit))
        try:
            return await asyncio.shield(submitted)
        except asyncio.CancelledError:
            submitted.add_done_callback(
                lambda task: task.exception() or _cancel(task.result())  # nobody reads them
            )
            raise

    async def answer(
        self, request: Request, job: Job, kind: Callable[..., Reply] = Reply
    ) -> Response:
        """Answers a request, as one body or as a stream of events.

        Raises:
          QueueFull, Closed: no further answer is taken.
        """
        arrived = time.monotonic()
        if job.grammar is not None:
            compiling = await asyncio.to_thread(submit_grammar, self.engine, job.grammar)
            with suppress(UserError):  # `add_guides` has it, too
                await _unless_left(request, asyncio.wrap_future(compiling))
            job = await asyncio.to_thread(add_guides, job, compiling)
        reply = kind(self.engine, job, model=self.model)

        def score(index: int) -> None:
            prompt = job.prompts[index * job.num_choices]
            reply.take_scores(index, self.scheduler.score(prompt.ids))

        if job.scores_prompt:  # one at a time for all requests; answers are decoded meanwhile
            loop = asyncio.get_running_loop()
            for index in range(len(job.prompts) // job.num_choices):
                await loop.run_in_executor(self._scorer, score, index)
        tickets = await self._submit(job)
        interval = self.config.stream_interval_seconds if job.is_streamed else _KEEP_ALIVE_SECONDS
        chunks = merge(tickets, patience=_KEEP_ALIVE_SECONDS, interval=interval)
        chunks = self._timed(chunks, arrived)
        if job.is_streamed:
            return _Events(reply.write_events(chunks), tickets)
        try:
            return JSONResponse(await _unless_left(request, reply.write_body(chunks)))
        finally:
            _cancel(tickets)

    async def _timed(self, chunks: Chunks, arrived: float) -> Chunks:
        """Passes chunks on, measures their times, and refuses an answer cut by the shutdown."""
        begun: dict[int, float] = {}  # choice -> when its first token came
        try:
            async for item in chunks:
                if item is None:
                    yield None
                    continue
                (index, chunk), now = item, time.monotonic()
                is_cancelled = chunk.answer is not None and chunk.answer.stop_reason == "cancelled"
                if is_cancelled and self.scheduler.is_closed:
                    raise ApiError(503, "the server stops; this answer is cut", retry_after=1)
                if index not in begun and chunk.output_ids:
                    begun[index] = now
                    self.metrics.first_token.observe(now - arrived)
                if chunk.answer is not None:
                    self.metrics.whole.observe(now - arrived)
                    if (more := len(chunk.answer.output_ids) - 1) > 0:
                        self.metrics.per_token.observe((now - begun[index]) / more)
                yield item
        except Closed as error:
            raise ApiError(503, "decoding failed") from error
        except UserError as error:  # a grammar that is too complex here
            raise ApiError(400, str(error), param=str(error).partition(":")[0]) from error


def _cancel(tickets: Sequence[Ticket]) -> None:
    """Cancels answers that are still being decoded."""
    for ticket in tickets:
        ticket.cancel()


class _Events(StreamingResponse):
    """A reply in events; frees the slots of a client that leaves, even before the first event."""

    def __init__(self, events: AsyncIterator[bytes], tickets: Sequence[Ticket]) -> None:
        headers = {"cache-control": "no-store"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _cancel(self._tickets)


async def _unless_left(request: Request, work: Awaitable[Any]) -> Any:
    """Waits for some work; cancels it, and raises ApiError, when the client leaves."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=_POLL_SECONDS)
            if not task.done() and await request.is_disconnected():
                raise ApiError(499, "the client has left")
        return task.result()
    finally:
        task.cancel()


class Metrics:
    """Metrics of one server: the scheduler's, and times of its answers."""

    def __init__(self, scheduler: Scheduler, model: str) -> None:
        self._scheduler, self._labels = scheduler, {"engine": "0", "model_name": model}

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(f"poss:{name}", text, buckets=_BUCKETS, registry=None)

        self.first_token = histogram("time_to_first_token_seconds", "From arrival to first token")
        self.per_token = histogram("time_per_output_token_seconds", "Per token after the first")
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the end")

    def collect(self) -> Iterator[Metric]:
        """Reads all metrics; those that vLLM has, too, come again with its names and labels."""
        for metric in self._collect_own():
            yield metric
            if (name := _VLLM_NAMES.get(metric.name)) is not None:
                renamed = Metric(name, metric.documentation, metric.type)
                for sample in metric.samples:
                    suffix, labels = sample.name[len(metric.name) :], sample.labels | self._labels
                    renamed.add_sample(name + suffix, labels, sample.value)
                yield renamed

    def _collect_own(self) -> Iterator[Metric]:
        for histogram in (self.first_token, self.per_token, self.whole):
            yield from histogram.collect()
        scheduler, stats = self._scheduler, self._scheduler.stats
        running, slots = scheduler.num_running, scheduler.num_slots
        for name, text, value in (
            ("num_requests_waiting", "Requests in the queue", scheduler.num_waiting),
            ("num_requests_running", "Requests that are read or decoded", running),
            ("kv_cache_usage_perc", "Share of slots in use, 0 to 1", min(running / slots, 1.0)),
        ):
            yield GaugeMetricFamily(f"poss:{name}", text, value)
        accepted = dict(stats.accepted)
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts", stats.prompt_tokens),
            ("prefix_cache_queries", "Tokens of prompts, cached or not", stats.prompt_tokens),
            ("prefix_cache_hits", "Tokens of prompts that were cached", stats.cached_tokens),
            ("generation_tokens", "Tokens of answers", stats.tokens),
            ("decoding_rounds", "Rounds of the whole batch", stats.rounds),
            ("compilations", "Programs compiled after the warm-up", stats.compilations),
            ("spec_decode_num_drafts", "Trees drafted", stats.drafts),
            ("spec_decode_num_draft_tokens", "Positions drafted", stats.drafted),
            ("spec_decode_num_accepted_tokens", "Drafts accepted", sum(accepted.values())),
            ("spec_decode_num_copied_tokens", "Of these, copied by lookup", stats.copied),
        ):
            yield CounterMetricFamily(f"poss:{name}", text, value)
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Drafts accepted, by position"
        by_position = CounterMetricFamily(f"poss:{name}", text, labels=["position"])
        for position, count in sorted(accepted.items()):
            by_position.add_metric([str(position - 1)], count)
        yield by_position
        ended = CounterMetricFamily("poss:request_success", "Answers", labels=["finished_reason"])
        for reason, count in dict(stats.finished).items():
            ended.add_metric([reason], count)
        yield ended
