"""What a run trains: the specialists of a draft for a frozen target, or a target."""

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from poss_jax.checkpoint.folder import load_draft, load_target, read_dense, read_draft
from poss_jax.checkpoint.record import ModelRecord, new_record, read_draft_vocabulary, read_record
from poss_jax.checkpoint.whole import write_file
from poss_jax.checkpoint.writing import copy_tokenizer, target_identity
from poss_jax.config.json_reading import read_json
from poss_jax.config.models import LlamaConfig
from poss_jax.config.paths import AnyPath, as_path, uploaded
from poss_jax.config.reading import UserError, config_to_dict
from poss_jax.config.training import TrainConfig
from poss_jax.data.conversations import Tokens, plain_texts
from poss_jax.data.prepared import Prepared, prepare
from poss_jax.data.records import Documents, load_documents
from poss_jax.data.tokenizer import load_tokenizer, train_tokenizer
from poss_jax.learn.step import TrainState, make_draft_step, make_target_step
from poss_jax.learn.task import DraftTask, describe_draft
from poss_jax.learn.validation import (
    Predictions,
    add_up,
    draft_metrics,
    make_draft_validation,
    make_target_validation,
)
from poss_jax.model.documents import TrainBatch
from poss_jax.model.families import family_of, init_draft
from poss_jax.model.parameters import place_weights
from poss_jax.model.specialists import (
    add_layers,
    extend_specialists,
    has_shared_keys_values,
    share_keys_values,
    split_embedding,
)
from poss_jax.model.target import init_target, insert_layers, stack_layers, without_tied_head
from poss_jax.shapes import Array, Params

from .devices import (
    broadcast_from_first,
    compile_on,
    is_first_process,
    make_on,
    make_step_on,
    write_together,
)
from .features import (
    fill_cache,
    find_features,
    is_complete,
    join_features,
    load_layers,
    make_encode,
    measure_deviations,
)
from .memory import PlannedStep, plan_draft_step, plan_target_step

_TOKENIZER = "tokenizer"  # subfolder of a target's run
_LOG = logging.getLogger(__name__)


class DraftStage:
    """Trains the specialists of a frozen target; `TargetStage` has the same methods."""

    # How many tokens after its own a row predicts first: it reads its feature and the next token.
    lookahead = 2

    def __init__(self, config: TrainConfig, folder: AnyPath, mesh: Mesh) -> None:
        assert config.target is not None
        self._run, self._key, self.mesh = config, jax.random.key(config.seed), mesh
        self._record, self._dtype = read_dense(config.target), _run_dtype(config, mesh)
        # Properties that a draft to start from must share.
        allowed = config.allow_target_mismatch
        self._fit = {"target": self._record, "allow_target_mismatch": allowed}
        trained, length = config.specialists.depth, config.data.sequence_length
        self._validation_depth = config.validation_depth or trained
        if (depth := max(trained, self._validation_depth)) >= length:
            name = "validation_depth" if trained < length else "specialists.depth"
            raise UserError(
                f"{name} {depth} does not fit rows of {length} tokens; lower it or raise "
                "data.sequence_length"
            )
        self._open_draft()
        self._refuse_other_models(folder)
        self.tokenizer = load_tokenizer(as_path(config.target))
        prepared = prepare_rows(folder, config, self.tokenizer, self._record.llama)
        self._features = find_features(config, self._record, prepared, self._dtype, self.config)
        if self._features is not None:
            prepared = join_features(prepared, self._features)
        self.rows, self.validation_rows = prepared.train, prepared.validation
        self.report = prepared.report
        self._task = DraftTask(
            target=self._record.llama,
            draft=self.config,
            objective=config.objective,
            step=config.step,
            num_frozen=config.specialists.num_frozen,
            vocabulary=self._vocabulary,
        )

    def _open_draft(self) -> None:
        """Sets the draft's shape, following the draft it starts from if there is one."""
        settings, self._vocabulary = self._run.specialists, None
        if settings.draft_vocabulary is not None:
            ids = read_draft_vocabulary(settings.draft_vocabulary, self._record.llama.vocab_size)
            self._vocabulary = tuple(ids.tolist())
        if self._run.init_draft is None:
            target = self._record.llama
            num_tokens = len(self._vocabulary or range(target.vocab_size))
            draft = describe_draft(settings, target, num_tokens)
        else:
            record = read_draft(self._run.init_draft, **self._fit)
            self._check_init_draft(record)
            draft = record.draft
            self._vocabulary = record.draft_vocabulary or self._vocabulary
        family = family_of(draft)
        self.config = replace(
            draft,
            positions_per_specialist=settings.positions_per_specialist,
            layers_per_specialist=settings.layers_per_specialist,
            trained_depth=settings.depth,
            kv=settings.kv if family.may_share_kv else draft.kv,
        )
        unfit = None  # a setting without meaning for drafts of this family
        if family.is_trained_in_chains and self._run.objective.feature_weight:
            unfit = "objective.feature_weight", "predict no feature of the target; set it to 0"
        elif settings.kv == "shared" and not family.may_share_kv:
            unfit = "specialists.kv", "have separate projections of keys and values; leave it out"
        elif settings.start == "pass_through" and family.pass_through is None:
            unfit = "specialists.start", "start at random; leave it out"
        if unfit is not None:
            raise UserError(f"{unfit[0]}: drafts of the family {draft.family} {unfit[1]}")

    def _refuse_other_models(self, folder: AnyPath) -> None:
        """Refuses to continue with other models than the run began with, and records them."""
        ids = hashlib.sha256(json.dumps(self._vocabulary).encode()).hexdigest()
        now = {"target": self._record.fingerprint, "specialists.draft_vocabulary": ids}
        if self._run.init_draft is not None:
            now["init_draft"] = read_record(self._run.init_draft).fingerprint
        path = folder / "made_with.json"
        recorded = read_json(path) if path.is_file() else now
        if changed := [name for name, value in now.items() if recorded.get(name, value) != value]:
            raise UserError(
                f"{changed[0]}: its file has changed since this run began; put it back, or "
                "start from scratch with --overwrite"
            )
        if is_first_process():
            write_file(path, json.dumps(now) + "\n")

    def _check_init_draft(self, record: ModelRecord) -> None:
        """Refuses settings that contradict the draft to start from."""
        settings, draft = self._run.specialists, record.draft
        positions, layers = settings.positions_per_specialist, settings.layers_per_specialist
        num_specialists, num_layers = draft.num_specialists, draft.layers_per_specialist[0]
        has_vocabulary = draft.head_size or record.draft_vocabulary
        has_other_vocabulary = self._vocabulary not in (None, record.draft_vocabulary)
        for name, is_unfit, required in (
            (
                "positions_per_specialist",
                len(positions) < num_specialists,
                f"{num_specialists} or more",
            ),
            ("layers_per_specialist", layers[0] < num_layers, f"{num_layers} or more"),
            ("num_frozen", settings.num_frozen > num_specialists, f"at most {num_specialists}"),
            ("family", settings.family not in (None, draft.family), "the same"),
            ("aux_layers", settings.aux_layers not in (None, draft.aux_layers), "the same"),
            ("draft_vocabulary", has_vocabulary and has_other_vocabulary, "the same"),
            ("fc_bias", settings.fc_bias and not draft.fc_bias, "the same"),
        ):
            if is_unfit:
                raise UserError(
                    f"specialists.{name}: want {required}, as init_draft {self._run.init_draft} "
                    "has; leave the setting out, or start from scratch"
                )

    def load_weights(self) -> None:
        """Reads the weights needed from the first step on, once the step is known to fit."""
        assert self._run.target is not None
        target, dtype, sharding = self._run.target, self._dtype, place_weights(self.mesh)
        _, self._target = load_target(target, dtype, with_layers=False, sharding=sharding)
        if (folder := self._run.init_draft) is not None:
            settings = self._run.specialists
            _, draft = load_draft(folder, jnp.float32, sharding=sharding, **self._fit)
            if settings.kv == "shared" and not has_shared_keys_values(draft):
                raise UserError(
                    f"init_draft {folder}: want specialists with the same keys and values, got "
                    "different ones; start from another or leave out specialists.kv"
                )
            draft = extend_specialists(draft, len(settings.positions_per_specialist))
            self._init_draft, self._target["draft"] = split_embedding(draft)
        if not is_complete(self._features):
            self._target["layers"] = load_layers(target, self._record, dtype, self.mesh)

    def write_features(self) -> None:
        """Writes features to disk, so that steps need not compute them."""
        if self._features is not None and "layers" in self._target:
            layers = self.config.aux_layers
            encode_batch = make_encode(self._target, self._run, self._record, self.mesh, layers)
            parts = self.rows, self.validation_rows
            num_rows = self._run.batch_size // self._run.step.accumulation_steps
            fill_cache(self._features, parts, encode_batch, num_rows, self.mesh)
            del self._target["layers"]

    def plan_step(self) -> PlannedStep:
        """The step, from shapes alone; missing features are written first."""
        has_features, run = self._features is not None, self._run
        return plan_draft_step(self._task, run, self._dtype, self.mesh, has_features=has_features)

    def init_params(self) -> Params:
        """Initial parameters on the mesh, specialists stacked.

        A draft's own head starts as the target's rows for its tokens.
        """
        passes = self._run.specialists.start == "pass_through"
        pass_through = family_of(self.config).pass_through if passes else None
        is_tied = self.config.kv == "shared" and family_of(self.config).may_share_kv

        def stack(draft: Params) -> Params:
            return draft | {"specialists": stack_layers(draft["specialists"])}

        def init(key: Array, head: Array) -> Params:
            draft = init_draft(self.config, key)
            draft = stack(draft if pass_through is None else pass_through(draft))
            if "head" in draft:
                ids = self._task.vocabulary_ids
                draft["head"] = {"weight": (head if ids is None else head[ids]).astype(jnp.float32)}
            return share_keys_values(draft, lambda leaf: leaf[:1]) if is_tied else draft

        if self._run.init_draft is None:
            return make_on(self.mesh, init, self._key, self._target["head"]["weight"])
        draft, self._init_draft = self._init_draft, None  # frees its memory for the steps

        def extend(key: Array, draft: Params) -> Params:
            return add_layers(stack(draft), self.config, key)

        return make_on(self.mesh, extend, self._key, draft)

    def make_step(self, optimizer: optax.GradientTransformation, state: TrainState) -> Callable:
        """Returns the step for states like this: (state, batch) -> (state, metrics)."""
        step = make_step_on(self.mesh, make_draft_step(self._measured_task, optimizer), state)
        return lambda state, batch: step(state, self._target, batch, self._key)

    @functools.cached_property
    def _measured_task(self) -> DraftTask:
        """The task, with the deviations of the target's features if the loss uses them."""
        if not self._run.objective.normalised_features:
            return self._task
        deviations = measure_deviations(self._target, self._run, self._record, self.rows, self.mesh)
        return self._task._replace(deviations=deviations)

    @functools.cached_property
    def _validation(self) -> Callable:
        validation = make_draft_validation(self._measured_task, self._validation_depth)
        return compile_on(self.mesh, validation)

    def validate(
        self, params: Params, batches: Iterable[TrainBatch]
    ) -> tuple[dict[str, Any], Predictions]:
        """Measures the parameters on held-out batches, and returns predictions for the first."""
        total, shown = add_up([self._validation(params, self._target, batch) for batch in batches])
        if not total.num_chains:
            _LOG.warning(
                "no held-out answer is %d tokens long, so that acceptance is not measured; lower "
                "validation_depth",
                len(total.accepted),
            )
        return draft_metrics(total), shown

    def score(self, results: dict[str, Any]) -> float:
        """Scores a validation; the best state has the highest score."""
        return results["simulated_acceptance_length"]

    def save_model(self, params: Params, folder: AnyPath) -> None:
        """Writes a model folder."""
        assert self._run.target is not None
        tokenizer_from = as_path(self._run.target)
        record = new_record(
            self.config,
            self._record.target,
            tokenizer_from=tokenizer_from,
            draft_vocabulary=self._vocabulary,
        )
        params = params | self._target.get("draft", {})
        write_together(folder, record, params, self.mesh, tokenizer_from=tokenizer_from)


class TargetStage:
    """Pre-trains a language model, with a tokenizer trained on the same text, or continues one."""

    lookahead = 1

    def __init__(self, config: TrainConfig, folder: AnyPath, mesh: Mesh) -> None:
        """Reads text and tokenizer."""
        assert config.model is not None
        load = functools.cache(lambda: load_documents(config.data))
        self._run, self._key, self.config = config, jax.random.key(config.seed), config.model
        self.mesh = mesh
        if config.init_target is not None:
            initial, asked = map(
                config_to_dict, (read_dense(config.init_target).llama, config.model)
            )
            initial["num_layers"] = max(initial["num_layers"], asked["num_layers"])
            for name, value in initial.items():
                if asked[name] != value:
                    raise UserError(
                        f"model.{name}: want {value} as init_target {config.init_target} has, got "
                        f"{asked[name]}; only layers may be added"
                    )
        tokenizer_folder = folder / _TOKENIZER
        broadcast_from_first(lambda: self._write_tokenizer(tokenizer_folder, load))
        self._write_tokenizer(tokenizer_folder, load)  # a dry run has a folder per process
        self.tokenizer = load_tokenizer(tokenizer_folder)
        prepared = prepare_rows(folder, config, self.tokenizer, self.config, load)
        self.rows, self.validation_rows = prepared.train, prepared.validation
        self.report = prepared.report
        self._dtype = _run_dtype(config, mesh)

        validate = make_target_validation(self.config, config.step, self._dtype)
        self._validation = compile_on(mesh, validate)

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


Stage = DraftStage | TargetStage


def _run_dtype(config: TrainConfig, mesh: Mesh) -> Any:
    """The dtype everything is computed in on these devices."""
    is_cpu = mesh.devices.flat[0].platform == "cpu"
    return jnp.dtype(config.dtype or ("float32" if is_cpu else "bfloat16"))


def prepare_rows(
    folder: AnyPath,
    config: TrainConfig,
    tokenizer: Any,
    llama: LlamaConfig,
    load: Callable[[], Documents] | None = None,
) -> Prepared:
    """Makes training rows and held-out rows, or reads those that the run's folder keeps.

    Process 0 makes them and the others read its file. In a dry run each process has its own folder
    and makes them itself.
    """
    settings = config.data, tokenizer, llama.vocab_size, load, llama.eos_token_ids
    made: list[Prepared] = []
    broadcast_from_first(lambda: made.append(prepare(folder, *settings)))
    prepared = made[0] if made else prepare(folder, *settings)
    length = config.data.sequence_length
    if length > llama.max_position_embeddings:
        _LOG.warning(
            "data.sequence_length %d is more than the %d positions that the target is made for",
            length,
            llama.max_position_embeddings,
        )
    return prepared
