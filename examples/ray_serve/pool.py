"""Servers behind the proxy: which are ready, and requests that go to one after the other."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx

MOST_TRIES = 5
"""Servers that may die of one request; it must not kill all of them."""

_BUSY = {429, 503}
_BROKEN = {500, 502, 504}  # as Ray Serve answers where a replica died; another one may answer
_UNREACHED = (httpx.ConnectError, httpx.ConnectTimeout)  # the request was not sent


class GivenUp(Exception):
    """No upstream serves a request."""


class Call(NamedTuple):
    """A request to an upstream, which counts as dead after `silence` seconds without a byte."""

    method: str
    path: str
    content: bytes
    headers: dict[str, str]
    silence: float


class Pool:
    """The upstreams, each in its turn."""

    def __init__(self, urls: Sequence[str], client: httpx.AsyncClient) -> None:
        self._is_ready = dict.fromkeys((url.rstrip("/") for url in urls), False)
        self._client = client
        self._turn = itertools.count()

    @property
    def is_ready(self) -> bool:
        """True if any upstream is."""
        return any(self._is_ready.values())

    async def watch(self) -> None:
        """Asks all upstreams every second whether they are ready."""
        while True:
            await self.check()
            await asyncio.sleep(1)

    async def check(self) -> None:
        """Asks all upstreams whether they are ready."""
        await asyncio.gather(*map(self._check, self._is_ready))

    async def _check(self, url: str) -> None:
        try:
            response = await self._client.get(f"{url}/ready", timeout=5)
            self._is_ready[url] = response.is_success
        except httpx.TransportError:
            self._is_ready[url] = False

    async def open(self, call: Call, *, patience: float = 0.0) -> httpx.Response:
        """Sends a request to one upstream after the other until one takes it.

        Args:
          call: the request.
          patience: seconds to keep trying.

        Returns:
          The response, its body not read yet; a refusal if all refuse.

        Raises:
          GivenUp: none answers, or too many die of it.
        """
        end, num_deaths = time.monotonic() + patience, 0
        while True:
            refusal = None
            for url in self._order():
                try:
                    response = await self._send(url, call)
                    if response.status_code not in _BUSY | _BROKEN:
                        return response
                    await response.aread()
                    refusal = response
                    num_deaths += response.status_code in _BROKEN
                except httpx.TransportError as error:
                    self._is_ready[url] = False
                    num_deaths += not isinstance(error, _UNREACHED)
                if num_deaths >= MOST_TRIES:
                    break
            is_broken = refusal is not None and refusal.status_code in _BROKEN
            is_deadly = num_deaths >= MOST_TRIES
            if is_deadly or (time.monotonic() >= end and not is_broken):
                if refusal is None:
                    raise GivenUp(
                        "servers die of the request" if is_deadly else "no server answers"
                    )
                return refusal
            await asyncio.sleep(0.2)

    async def fetch(self, call: Call, *, patience: float = 0.0) -> httpx.Response:
        """Whole response to a request, of another upstream if one dies on the way; see `open`."""
        for _ in range(MOST_TRIES):
            response = await self.open(call, patience=patience)
            try:
                await response.aread()
                return response
            except httpx.TransportError:
                continue
        raise GivenUp("servers die of the request")

    def _order(self) -> list[str]:
        """Upstreams that are ready, from the next one on, and then the others."""
        urls = list(self._is_ready)
        first = next(self._turn) % len(urls)
        return sorted(urls[first:] + urls[:first], key=lambda url: not self._is_ready[url])

    async def _send(self, url: str, call: Call) -> httpx.Response:
        request = self._client.build_request(
            call.method,
            url + call.path,
            content=call.content,
            headers=call.headers,
            timeout=httpx.Timeout(call.silence, connect=5),
        )
        return await self._client.send(request, stream=True)
