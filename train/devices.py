"""The devices and processes of a run: who takes part, what lies where, who writes.

Every process runs the whole program on its own devices. All of them join each computation on the
mesh and each save of the training state; the first process alone writes the other files.
"""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from poss_jax.checkpoint.record import ModelRecord
from poss_jax.checkpoint.writing import write_model
from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.paths import AnyPath
from poss_jax.config.reading import UserError, cut
from poss_jax.data.rows import Rows
from poss_jax.learn.step import TrainState
from poss_jax.model.documents import TrainBatch
from poss_jax.model.parameters import item_shapes, place_tree
from poss_jax.model.sharding import place_batch, replicate
from poss_jax.model.target import stack_layers
from poss_jax.shapes import Params

_LONGEST_ERROR = 2000  # characters, of which JSON makes up to twelve bytes each
_MESSAGE_BYTES = 32 * 1024

AnswerT = TypeVar("AnswerT")


# --------------------------------------------------------------------------------------------------
# Processes


def is_first_process() -> bool:
    """True in the process that writes."""
    return jax.process_index() == 0


def barrier(name: str) -> None:
    """Waits until every process has arrived here."""
    multihost_utils.sync_global_devices(name)


def broadcast_from_first(function: Callable[[], AnswerT]) -> AnswerT:
    """Runs a function in process 0 and broadcasts its JSON value, or its error."""
    answer, unexpected = np.zeros(_MESSAGE_BYTES, np.uint8), None
    if is_first_process():
        try:
            reply = {"value": function()}
        except UserError as error:
            reply = {"error": cut(str(error), _LONGEST_ERROR)}
        except Exception as error:  # the others are waiting for an answer
            reply, unexpected = {"error": "process 0 failed; its own output says why"}, error
        content = json.dumps(reply).encode()
        answer[: len(content)] = np.frombuffer(content, np.uint8)
    answer = multihost_utils.broadcast_one_to_all(answer)
    if unexpected is not None:
        raise unexpected
    reply = json.loads(answer.tobytes().rstrip(b"\0"))
    if "error" in reply:
        raise UserError(reply["error"])
    return reply["value"]


# --------------------------------------------------------------------------------------------------
# Arrays


def put_batch(rows: Rows, mesh: Mesh) -> TrainBatch:
    """Places a batch; every process supplies its devices' part."""
    sharding = place_batch(mesh)

    def put(array: Any) -> jax.Array:
        parts: dict[Any, Any] = {}  # read from disk here, so once per part

        def read(index: Any) -> Any:
            bounds = tuple((span.start, span.stop) for span in index)
            if bounds not in parts:
                parts[bounds] = array[index]
            return parts[bounds]

        return jax.make_array_from_callback(array.shape, sharding, read)

    return TrainBatch(**{name: put(array) for name, array in vars(rows).items()})


class OnMesh:
    """A jitted function of arrays on a mesh."""

    def __init__(self, mesh: Mesh, jitted: Any) -> None:
        self._mesh, self._jitted = mesh, jitted

    def __call__(self, *args: Any) -> Any:
        with jax.set_mesh(self._mesh):
            return self._jitted(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Lowers for shapes with shardings; nothing is computed."""
        with jax.set_mesh(self._mesh):
            return self._jitted.lower(*args)


def compile_on(
    mesh: Mesh, function: Callable[..., Any], out: Any = None, *, donate: tuple[int, ...] = ()
) -> OnMesh:
    """Jits a function for the mesh.

    Args:
      out: sharding of the results, a prefix of their tree; None: replicated.
      donate: arguments whose memory becomes the result's.
    """
    out = replicate(mesh) if out is None else out
    return OnMesh(mesh, jax.jit(function, donate_argnums=donate, out_shardings=out))


def make_on(mesh: Mesh, function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function with its result sharded by the table; no device ever holds it whole."""
    shardings = place_tree(jax.eval_shape(function, *args), mesh)
    return compile_on(mesh, function, shardings)(*args)


def stack_on(mesh: Mesh, layers: list[Params]) -> Params:
    """`stack_layers` array by array; deletes the inputs, so that only one copy is held."""

    def stack(sharding: jax.sharding.Sharding, *parts: jax.Array) -> jax.Array:
        stacked = jax.jit(_stack, out_shardings=sharding)(*parts)
        for array in parts:
            array.delete()
        return stacked

    shapes = {"layers": jax.eval_shape(stack_layers, layers)}
    return jax.tree.map(stack, place_tree(shapes, mesh)["layers"], *layers)


def _stack(*parts: jax.Array) -> jax.Array:
    return jnp.stack(parts)


def make_step_on(mesh: Mesh, step: Callable[..., Any], state: TrainState) -> OnMesh:
    """Jits `(state, ...) -> (state, metrics)`: the state keeps its sharding and is donated."""
    return compile_on(mesh, step, (place_tree(state, mesh), replicate(mesh)), donate=(0,))


def write_together(
    folder: AnyPath, record: ModelRecord, params: Params, mesh: Mesh, *, tokenizer_from: AnyPath
) -> None:
    """Calls `write_model` for stacked layers or specialists; only process 0 writes."""
    items = _whole_items(record.config, params, mesh)
    if is_first_process():
        write_model(folder, record, items, tokenizer_from=tokenizer_from)
    for _ in items:  # all processes join in gathering each item
        pass
    barrier("model written")


def _whole_items(
    config: LlamaConfig | DraftConfig, params: Params, mesh: Mesh
) -> Iterator[tuple[str, Params]]:
    """Gathers a model item by item; no device holds more than one item whole."""
    gather = compile_on(mesh, lambda item: item)
    gather_at = compile_on(mesh, lambda stack, index: jax.tree.map(lambda leaf: leaf[index], stack))
    for name in item_shapes(config):
        group, _, index = name.partition("/")
        held = params[group]
        if index and not isinstance(held, list):
            yield name, gather_at(held, int(index))
        else:
            yield name, gather(held[int(index)] if index else held)


# --------------------------------------------------------------------------------------------------
# Preemption


@contextmanager
def preemption_notice() -> Iterator[Callable[[int], bool]]:
    """Yields a function to call after every step: True if the run is to save and stop there.

    It takes the number of steps since the process started, from 1. If any process is preempted, all
    stop at the next step that none has passed. After the first SIGTERM, another one or Ctrl-C ends
    the process at once.
    """
    if jax.distributed.is_initialized():

        def all_stop(step: int) -> bool:
            if is_reached := multihost_utils.reached_preemption_sync_point(step):
                _quit_at_the_next_signal()
            return is_reached

        yield all_stop
        return
    told = threading.Event()

    def note(*_: Any) -> None:
        told.set()
        _quit_at_the_next_signal()

    handlers = {}
    if threading.current_thread() is threading.main_thread():  # only it may set handlers
        handlers = {name: signal.getsignal(name) for name in (signal.SIGTERM, signal.SIGINT)}
        signal.signal(signal.SIGTERM, note)
    try:
        yield lambda step: told.is_set()
    finally:
        for name, handler in handlers.items():
            signal.signal(name, handler)


def _quit_at_the_next_signal() -> None:
    os.write(2, b"\nSIGTERM: saving and stopping; a second one quits at once\n")
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, signal.SIG_DFL)
