"""One model on several hosts: process 0 decides the steps of the slots, the others repeat them.

    process 0:   Leader(slots).run(...)  ─► sends ("run", ...) ─► slots.run(...)
    the others:  follow(slots)           ─►                       slots.run(...)

All that the host decides, such as the masks of a grammar, is an argument of a step. Steps go
through the key-value store of `jax.distributed`, not a collective: a waiting follower keeps no
device busy and may wait for any time, and the leader need not wait for a round to end before it
announces the next. If a process dies, `jax.distributed` ends all others.
"""

import pickle
import zlib
from itertools import count
from typing import Any

import jax
from jax._src import distributed  # jax.distributed has the store, but no name for it

from poss_jax.engine.slots import Slots

_STEPS = "begin extend insert run draft verify resize begin_scores score_next".split()
_WAIT_MILLISECONDS = 3_600_000  # then the same question again
_KEPT = 1024
"""Steps kept in the store; the rounds' collectives keep followers within a few of them."""


class Leader:
    """The slots of process 0; broadcasts each step before running it."""

    def __init__(self, slots: Slots) -> None:
        self._slots, self._num_told = slots, 0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._slots, name)
        if name not in _STEPS:
            return attribute

        def tell_and_take(*args: Any) -> Any:
            self._tell((name, args))
            return attribute(*args)

        return tell_and_take

    def dismiss(self) -> None:
        """Lets the other processes return from `follow`."""
        self._tell(None)

    def _tell(self, message: Any) -> None:
        store, index = _store(), self._num_told
        # Masks are large and uniform: fast compression makes them some 70 times smaller.
        store.key_value_set_bytes(_key(index), zlib.compress(pickle.dumps(message), 1))
        if index >= _KEPT:
            store.key_value_delete(_key(index - _KEPT))
        self._num_told += 1


def follow(slots: Slots) -> None:
    """Runs the steps that process 0 sends, until it dismisses."""
    for index in count():
        packed = None
        while packed is None:
            try:
                packed = _store().blocking_key_value_get_bytes(_key(index), _WAIT_MILLISECONDS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
        message = pickle.loads(zlib.decompress(packed))
        if message is None:
            return
        name, args = message
        getattr(slots, name)(*args)


def _key(index: int) -> str:
    return f"poss_jax/steps/{index}"


def _store() -> Any:
    return distributed.global_state.client
