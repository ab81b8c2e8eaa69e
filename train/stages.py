"""The two things a run can train. Each says what its rows, parameters, step and model are."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from poss_jax import data
from poss_jax.checkpoint import (
    ModelRecord,
    load_draft,
    load_target,
    new_record,
    read_draft,
    read_target,
    target_identity,
)
from poss_jax.config import DraftConfig, LlamaConfig, TrainConfig, UserError
from poss_jax.draft import (
    extend_specialists,
    has_shared_keys_values,
    init_draft,
    share_keys_values,
)
from poss_jax.packing import TrainBatch
from poss_jax.pretraining import make_target_step
from poss_jax.shapes import Array, Params
from poss_jax.sharding import check_batch_size, place_weights
from poss_jax.target import init_target, stack_layers
from poss_jax.train_state import TrainState
from poss_jax.train_step import DraftTask, make_draft_step
from poss_jax.validation import (
    Predictions,
    add_up,
    draft_metrics,
    make_draft_validation,
    make_target_validation,
)
from train.devices import (
    compile_on,
    is_first_process,
    make_on,
    make_step_on,
    meet,
    write_together,
)
from train.features import fill_cache, find_features, is_complete, load_layers, make_encode
from train.memory import PlannedStep, mesh_for, plan_draft_step, plan_target_step

_TOKENIZER = "tokenizer"  # subfolder of a target's run


class Stage(Protocol):
    """What the training loop needs to know.

    Attributes:
      config: shape of the model that is trained.
      mesh: the devices it is trained on.
      rows: what is trained on.
      validation_rows: held-out rows.
      report: what both were made of.
      tokenizer: cuts text into the tokens of both.
      lookahead: how many tokens after its own a row predicts first.
    """

    lookahead: int
    config: LlamaConfig | DraftConfig
    mesh: Mesh
    rows: data.Rows
    validation_rows: data.Rows
    report: dict[str, Any]
    tokenizer: Any

    def write_features(self) -> None:
        """Writes to disk what is not to be computed in every step."""
        ...

    def plan_step(self) -> PlannedStep:
        """The step, from shapes alone."""
        ...

    def init_params(self) -> Params:
        """Parameters before the first step on the mesh, layers or specialists stacked."""
        ...

    def make_step(
        self, optimizer: optax.GradientTransformation, state: TrainState
    ) -> Callable[[TrainState, TrainBatch], tuple[TrainState, dict[str, Array]]]:
        """Returns the step for states like this: (state, batch) -> (state, metrics)."""
        ...

    def validate(
        self, params: Params, batches: Iterable[TrainBatch]
    ) -> tuple[dict[str, Any], Predictions]:
        """Measures the parameters on held-out batches, and shows the first of them."""
        ...

    def score(self, results: dict[str, Any]) -> float:
        """How good a validation is; the best state has the highest."""
        ...

    def save_model(self, params: Params, folder: Path) -> None:
        """Writes a model folder."""
        ...


class TargetStage:
    """Pre-trains a language model, with a tokenizer trained on the same text."""

    lookahead = 1

    def __init__(
        self, config: TrainConfig, folder: Path, mesh: Mesh, *, with_weights: bool = True
    ) -> None:
        del with_weights  # it starts from none
        assert config.model is not None
        load = functools.cache(lambda: data.load_documents(config.data))
        self._run, self._key, self.config = config, jax.random.key(config.seed), config.model
        self.mesh = mesh
        place = folder / _TOKENIZER
        if is_first_process() and not (place / "tokenizer.json").is_file():
            texts = data.plain_texts(load().train)
            data.train_tokenizer(texts, self.config.vocab_size, place)
        meet("tokenizer trained")
        self.tokenizer = data.load_tokenizer(place)
        prepared = _prepare(folder, config, self.tokenizer, self.config.vocab_size, load)
        self.rows, self.validation_rows = prepared.train, prepared.validation
        self.report = prepared.report
        self._dtype = _dtype(config, mesh)

        validate = make_target_validation(self.config, config.step, self._dtype)
        self._validation = compile_on(mesh, validate)

    def write_features(self) -> None:
        """See `Stage`; a target has no use for any."""

    def plan_step(self) -> PlannedStep:
        """See `Stage`."""
        return plan_target_step(self.config, self._run, self._dtype, self.mesh)

    def init_params(self) -> Params:
        """See `Stage`."""

        def init(key: Array) -> Params:
            params = init_target(self.config, key)
            return params | {"layers": stack_layers(params["layers"])}

        return make_on(self.mesh, init, self._key)

    def make_step(self, optimizer: optax.GradientTransformation, state: TrainState) -> Callable:
        """See `Stage`."""
        step = make_target_step(self.config, optimizer, self._run.step, self._dtype)
        return make_step_on(self.mesh, step, state)

    def validate(
        self, params: Params, batches: Iterable[TrainBatch]
    ) -> tuple[dict[str, Any], Predictions]:
        """See `Stage`."""
        total, shown = add_up([self._validation(params, batch) for batch in batches])
        return {"validation_loss": float(total.loss / max(total.num_trained, 1))}, shown

    def score(self, results: dict[str, Any]) -> float:
        """See `Stage`."""
        return -results["validation_loss"]

    def save_model(self, params: Params, folder: Path) -> None:
        """See `Stage`."""
        whole = compile_on(self.mesh, lambda weight: weight)
        embed = head = np.asarray(whole(params["embed"]["weight"]))
        if not self.config.tie_embeddings:
            head = np.asarray(whole(params["head"]["weight"]))
        identity = target_identity(folder.parent.name, None, embed, head)
        tokenizer_from = folder.parent / _TOKENIZER
        record = new_record(self.config, identity, tokenizer_from=tokenizer_from)
        write_together(folder, record, params, self.mesh, tokenizer_from=tokenizer_from)


class DraftStage:
    """Trains the specialists of a frozen target."""

    lookahead = 2  # a draft is given a row's feature and the token after it

    def __init__(
        self, config: TrainConfig, folder: Path, mesh: Mesh, *, with_weights: bool = True
    ) -> None:
        assert config.target is not None
        self._run, self._key, self.mesh = config, jax.random.key(config.seed), mesh
        self._record, dtype = read_target(config.target), _dtype(config, mesh)
        if with_weights:
            place = place_weights(mesh)
            _, self._target = load_target(config.target, dtype, with_layers=False, sharding=place)
        validation_depth = _check_depths(config)
        wanted = config.specialists
        layer, fc_bias = replace(self._record.llama, num_layers=1), wanted.fc_bias
        self._init_draft = None
        self._vocabulary = None
        if config.init_draft is not None:
            record = self._open_init_draft(config.init_draft, with_weights=with_weights)
            layer, fc_bias = record.draft.layer, record.draft.fc_bias
            self._vocabulary = record.draft_vocabulary
        self.tokenizer = data.load_tokenizer(Path(config.target))
        target = self._record.llama
        load = functools.partial(data.load_documents, config.data, target.hidden_size)
        prepared = _prepare(folder, config, self.tokenizer, target.vocab_size, load)
        self._features = find_features(config, self._record, prepared, dtype)
        if self._features is not None:
            prepared = data.join_features(prepared, self._features)
        self.rows, self.validation_rows = prepared.train, prepared.validation
        self.report = prepared.report
        if with_weights and not is_complete(self._features):
            self._target["layers"] = load_layers(config.target, self._record, dtype, mesh)
        self.config = DraftConfig(
            layer=layer,
            positions_per_specialist=wanted.positions_per_specialist,
            trained_depth=wanted.depth,
            fc_bias=fc_bias,
        )
        self._task = DraftTask(
            target=self._record.llama,
            draft=self.config,
            objective=config.objective,
            step=config.step,
            num_frozen=wanted.num_frozen,
            kv=wanted.kv,
        )
        validated = replace(self.config, trained_depth=validation_depth)
        self._validation = compile_on(
            mesh, make_draft_validation(self._task._replace(draft=validated))
        )

    def write_features(self) -> None:
        """See `Stage`."""
        if isinstance(self._features, data.FeatureCache) and "layers" in self._target:
            encode_batch = make_encode(self._target, self._run, self._record, self.mesh)
            parts = self.rows, self.validation_rows
            fill_cache(self._features, parts, encode_batch, self._run.batch_size, self.mesh)
            del self._target["layers"]

    def _open_init_draft(self, folder: str, *, with_weights: bool) -> ModelRecord:
        """Reads the draft to start from."""
        wanted = self._run.specialists
        fit: dict[str, Any] = {
            "target": self._record,
            "allow_target_mismatch": self._run.allow_target_mismatch,
        }
        if not with_weights:
            return read_draft(folder, **fit)
        record, draft = load_draft(folder, jnp.float32, sharding=place_weights(self.mesh), **fit)
        if wanted.kv == "shared" and not has_shared_keys_values(draft):
            raise UserError(
                f"init_draft {folder}: want specialists with the same keys and values, got "
                "different ones; start from another or leave out specialists.kv"
            )
        self._init_draft = extend_specialists(draft, len(wanted.positions_per_specialist))
        return record

    def plan_step(self) -> PlannedStep:
        """See `Stage`."""
        return plan_draft_step(self._task, self._run, _dtype(self._run, self.mesh), self.mesh)

    def init_params(self) -> Params:
        """See `Stage`."""
        is_shared = self._run.specialists.kv == "shared"

        def stack(draft: Params) -> Params:
            return draft | {"specialists": stack_layers(draft["specialists"])}

        def init(key: Array) -> Params:
            draft = stack(init_draft(self.config, key))
            return share_keys_values(draft, lambda leaf: leaf[:1]) if is_shared else draft

        if self._init_draft is None:
            return make_on(self.mesh, init, self._key)
        return make_on(self.mesh, stack, self._init_draft)

    def make_step(self, optimizer: optax.GradientTransformation, state: TrainState) -> Callable:
        """See `Stage`."""
        step = make_step_on(self.mesh, make_draft_step(self._task, optimizer), state)

        def run(state: TrainState, batch: TrainBatch) -> tuple[TrainState, dict[str, Array]]:
            return step(state, self._target, batch, self._key)

        return run

    def validate(
        self, params: Params, batches: Iterable[TrainBatch]
    ) -> tuple[dict[str, Any], Predictions]:
        """See `Stage`."""
        results = [self._validation(params, self._target, batch) for batch in batches]
        total, shown = add_up(results)
        return draft_metrics(total), shown

    def score(self, results: dict[str, Any]) -> float:
        """See `Stage`."""
        return results["simulated_acceptance_length"]

    def save_model(self, params: Params, folder: Path) -> None:
        """See `Stage`."""
        assert self._run.target is not None
        tokenizer_from = Path(self._run.target)
        record = new_record(
            self.config,
            self._record.target,
            tokenizer_from=tokenizer_from,
            draft_vocabulary=self._vocabulary,
            kv=self._run.specialists.kv,
        )
        write_together(folder, record, params, self.mesh, tokenizer_from=tokenizer_from)


def open_stage(config: TrainConfig, folder: Path, *, plan_for: str | None = None) -> Stage:
    """Reads what the run needs: text, tokenizer, and the models it starts from.

    Args:
      config: the run.
      folder: where it keeps what it prepares.
      plan_for: to describe a run on these devices (see `mesh_for`), without any weights.

    Raises:
      UserError: something is missing or does not fit.
    """
    kind = {"target": TargetStage, "draft": DraftStage}[config.stage]
    mesh = mesh_for(config, plan_for or "here")
    check_batch_size(config.batch_size // config.step.accumulation_steps, mesh)
    return kind(config, folder, mesh, with_weights=plan_for is None)


def _check_depths(config: TrainConfig) -> int:
    """Returns the depth of validations; refuses depths that do not fit the rows."""
    trained, length = config.specialists.depth, config.data.sequence_length
    depths = {
        "specialists.depth": trained,
        "validation_depth": config.validation_depth or trained,
    }
    for name, depth in depths.items():
        if depth >= length:
            raise UserError(
                f"{name} {depth} does not fit rows of {length} tokens; lower it or raise "
                "data.sequence_length"
            )
    return depths["validation_depth"]


def _dtype(config: TrainConfig, mesh: Mesh) -> Any:
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return jnp.dtype(config.dtype or ("float32" if is_cpu else "bfloat16"))


def _prepare(
    folder: Path,
    config: TrainConfig,
    tokenizer: Any,
    vocab_size: int,
    load: Callable[[], data.Documents] | None = None,
) -> data.Prepared:
    prepared = data.prepare(folder, config.data, tokenizer, vocab_size, load)
    held_out, length = len(prepared.validation), config.data.sequence_length
    if held_out < config.batch_size:
        raise UserError(
            f"held-out documents fill {held_out} rows of {length} tokens, a batch needs "
            f"{config.batch_size}; raise data.validation_fraction or give more documents"
        )
    return prepared
