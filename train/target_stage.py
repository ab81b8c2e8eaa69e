"""Pre-trains a target."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from poss_jax.checkpoint.folder import load_target, read_dense
from poss_jax.checkpoint.record import new_record
from poss_jax.checkpoint.writing import copy_tokenizer, target_identity
from poss_jax.config.paths import AnyPath, as_path, uploaded
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.config.training import TrainConfig
from poss_jax.data.conversations import Tokens, plain_texts
from poss_jax.data.sources import Documents, load_documents
from poss_jax.data.tokenizer import load_tokenizer, train_tokenizer
from poss_jax.learn.state import TrainState
from poss_jax.learn.step import make_target_step
from poss_jax.learn.validation import Predictions, add_up, make_target_validation
from poss_jax.model.documents import TrainBatch
from poss_jax.model.parameters import place_weights
from poss_jax.model.target import init_target, insert_layers, stack_layers, without_tied_head
from poss_jax.shapes import Params

from .devices import broadcast_from_first, compile_on, make_on, make_step_on, write_together
from .memory import PlannedStep, plan_target_step
from .preparation import prepare_rows, run_dtype

_TOKENIZER = "tokenizer"  # subfolder of a target's run


class TargetStage:
    """Pre-trains a language model, with a tokenizer trained on the same text, or continues one.

    Attributes and methods: see `DraftStage`.
    """

    lookahead = 1

    def __init__(self, config: TrainConfig, folder: AnyPath, mesh: Mesh) -> None:
        """Reads text and tokenizer."""
        assert config.model is not None
        load = functools.cache(lambda: load_documents(config.data))
        self._run, self._key, self.config = config, jax.random.key(config.seed), config.model
        self.mesh = mesh
        self._check_init_target()
        tokenizer_folder = folder / _TOKENIZER
        broadcast_from_first(lambda: self._write_tokenizer(tokenizer_folder, load))
        self._write_tokenizer(tokenizer_folder, load)  # a dry run has a folder per process
        self.tokenizer = load_tokenizer(tokenizer_folder)
        prepared = prepare_rows(folder, config, self.tokenizer, self.config, load)
        self.rows, self.validation_rows = prepared.train, prepared.validation
        self.report = prepared.report
        self._dtype = run_dtype(config, mesh)

        validate = make_target_validation(self.config, config.step, self._dtype)
        self._validation = compile_on(mesh, validate)

    def _check_init_target(self) -> None:
        """Refuses a target to start from that has another shape than the run's."""
        if (folder := self._run.init_target) is None:
            return
        initial, config = config_to_dict(read_dense(folder).llama), config_to_dict(self.config)
        initial["num_layers"] = max(initial["num_layers"], config["num_layers"])
        for name, value in initial.items():
            if config[name] != value:
                raise UserError(
                    f"model.{name}: want {value} as init_target {folder} has, got {config[name]}; "
                    "only layers may be added"
                )

    def _write_tokenizer(self, folder: AnyPath, load: Callable[[], Documents]) -> None:
        """Copies the tokenizer of the target to start from, or trains one on the documents."""
        if (folder / "tokenizer.json").is_file():
            return
        if self._run.init_target is None:
            documents = load().train
            if any(isinstance(document, Tokens) for document in documents):
                raise UserError(
                    f"data.source {self._run.data.source!r}: want text to train a tokenizer on, "
                    "got token ids; give text or chats, or the init_target whose tokens these are"
                )
            train_tokenizer(plain_texts(documents), self.config.vocab_size, folder)
            return
        with uploaded(folder) as local:
            local.mkdir(parents=True, exist_ok=True)
            copy_tokenizer(as_path(self._run.init_target), local)

    def load_weights(self) -> None:
        """Does nothing: `init_target` is read when the state is made."""

    def write_features(self) -> None:
        """Does nothing: a target needs no features."""

    def plan_step(self) -> PlannedStep:
        return plan_target_step(self.config, self._run, self._dtype, self.mesh)

    def init_params(self) -> Params:
        def stack(params: Params) -> Params:
            layers = insert_layers(params["layers"], self.config.num_layers)
            return without_tied_head(params, self.config) | {"layers": stack_layers(layers)}

        if self._run.init_target is None:
            return make_on(self.mesh, lambda key: stack(init_target(self.config, key)), self._key)
        sharding = place_weights(self.mesh)
        _, params = load_target(self._run.init_target, jnp.float32, sharding=sharding)
        return make_on(self.mesh, stack, params)

    def make_step(self, optimizer: optax.GradientTransformation, state: TrainState) -> Callable:
        step = make_target_step(self.config, optimizer, self._run.step, self._dtype)
        return make_step_on(self.mesh, step, state)

    def validate(
        self, params: Params, batches: Iterable[TrainBatch]
    ) -> tuple[dict[str, Any], Predictions]:
        total, shown = add_up([self._validation(params, batch) for batch in batches])
        return {"validation_loss": float(total.loss / max(total.num_trained, 1))}, shown

    def score(self, results: dict[str, Any]) -> float:
        return -results["validation_loss"]

    def save_model(self, params: Params, folder: AnyPath) -> None:
        gather = compile_on(self.mesh, lambda weight: weight)
        embed = head = np.asarray(gather(params["embed"]["weight"]))
        if not self.config.tie_embeddings:
            head = np.asarray(gather(params["head"]["weight"]))
        identity = target_identity(folder.parent.name, None, embed, head)
        tokenizer_from = folder.parent / _TOKENIZER
        record = new_record(self.config, identity, tokenizer_from=tokenizer_from)
        write_together(folder, record, params, self.mesh, tokenizer_from=tokenizer_from)
