"""The models of an engine on their devices: loaded, fused for decoding, placed, joined, replaced.

A draft borrows the embedding and the head of its target (`join_weights`).
"""

import logging
import secrets
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from poss_jax.bundled.default import find_bundled, recommended_sampling
from poss_jax.checkpoint.folder import load_draft, load_target
from poss_jax.checkpoint.record import (
    ModelRecord,
    read_draft_vocabulary,
    read_record,
    with_vocabulary,
)
from poss_jax.config.decoding import EngineConfig, SamplingConfig
from poss_jax.config.models import DraftConfig, Drafting, LlamaConfig, MeshConfig, TreeConfig, Trees
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import UserError, change_config
from poss_jax.data.tokenizer import load_tokenizer, special_ids
from poss_jax.decode.state import StaticShape, Weights
from poss_jax.engine.device import (
    check_weights,
    default_dtype,
    prefill_chunks,
    wants_sums,
    with_rows,
)
from poss_jax.engine.trees import choose_trees, find_tuned, tree_for
from poss_jax.model.kernel import has_kernel
from poss_jax.model.parameters import check_params, place_params, place_weights
from poss_jax.model.quantise import (
    Quantised,
    quantise_specialists,
    round_rows,
    sum_values,
    tile_values,
)
from poss_jax.model.sharding import decoding_mesh
from poss_jax.model.specialists import borrow_from_target, fuse_draft
from poss_jax.model.target import compute_dtype, fuse_target
from poss_jax.shapes import Params

_LOG = logging.getLogger(__package__)

ModelsT = TypeVar("ModelsT", bound="Models")


class Models:
    """A target, optionally a draft, and how they decode.

    Attributes:
      record: record of the target, as it was loaded.
      fingerprint: name of the target's weights: their digest, or drawn by `update_weights`.
      target_config: shape of the target.
      draft_config: shape of the draft; None decodes autoregressively.
      weights: parameters of both, on the device, fused for decoding.
      trees: size of the draft tree per batch size, clamped to what can be drafted.
      settings: how they were loaded and decode.
      tokenizer: the target's tokenizer; None if the model folder has none (token ids still work).
      stop_ids: tokens that end an answer.
      max_length: most tokens of prompt and answer together.
      mesh: grid of devices; None is one device.
      recommended: how the target's authors recommend to sample from it; the calls below are greedy
        unless a call says otherwise.
    """

    def __init__(
        self,
        record: ModelRecord,
        params: Params,
        settings: EngineConfig = EngineConfig(),
        *,
        tokenizer: Any = None,
        mesh: MeshConfig | Mesh | None = None,
    ) -> None:
        """Holds a target; `with_draft` adds a draft.

        Args:
          params: parameters of the target. The engine keeps some of these arrays: do not donate
            them to a function.
          settings, mesh: as in `load`.
          tokenizer: the target's tokenizer; None accepts token ids only.
        """
        self.record = record
        self.fingerprint = record.fingerprint
        self.target_config = record.llama
        self.draft_config: DraftConfig | None = None
        self.mesh = decoding_mesh(mesh)
        self.weights = Weights(fuse(params, self.target_config, self.mesh), {})
        self._own_draft: Params = {}  # the draft's own weights, and `vocabulary`
        self.settings = settings
        self.trees = choose_trees(settings.tree)
        self.tokenizer = tokenizer
        eos = [] if tokenizer is None else special_ids(tokenizer, "eos")
        self.stop_ids = sorted({*self.target_config.eos_token_ids, *eos})
        limit = self.target_config.max_position_embeddings
        self.max_length = length = limit if settings.max_length is None else settings.max_length
        if length < 2:
            raise UserError(f"max_length: want 2 or more, a prompt and an answer, got {length}")
        if length > limit:
            got = f"{length} is more than the {limit} tokens that the target was made for"
            _LOG.warning("max_length %s; later text may be nonsense", got)
        self.recommended = SamplingConfig()

    @property
    def max_accepted(self) -> int:
        """Most drafted or copied tokens that a round can accept; 0 without a draft and lookup."""
        if self.draft_config is None and not self.settings.lookup:
            return 0
        configs = (self.config_with(tree, 2, self.max_length) for tree in self.trees.values())
        return max(config.max_accepted for config in configs)

    @classmethod
    def load(
        cls: type[ModelsT],
        target: str | AnyPath,
        draft: str | AnyPath | None = None,
        settings: EngineConfig = EngineConfig(),
        *,
        dtype: Any = None,
        mesh: MeshConfig | Mesh | None = None,
    ) -> ModelsT:
        """Loads models.

        Args:
          target: model folder (see `poss convert`), or smollm2, the default one.
          draft: folder of a draft made for it, or the name of a bundled one such as PosS-1; None
            decodes autoregressively.
          settings: how to load them and to decode, such as EngineConfig(lookup=8).
          dtype: dtype of weights and caches; None: float32 on CPU, bfloat16 elsewhere.
          mesh: grid of devices, which load their own parts (see `MeshConfig`); None: one device.

        Raises:
          UserError: a folder is missing or broken, the target is quantised already, or something
            does not fit: draft, vocabulary, mesh, or weights into memory.
        """
        mesh, dtype = decoding_mesh(mesh), dtype or default_dtype()
        target = find_bundled(target)
        quantise, sharding = settings.quantise, mesh and place_weights(mesh)
        check_weights(read_record(target, "target"), dtype, quantise=quantise, mesh=mesh)
        record, params = load_target(target, dtype, quantise=quantise, sharding=sharding)
        params = fuse_target(params, record.llama, partial(_place_on, mesh))
        tokenizer = load_tokenizer(as_path(target)) if record.tokenizer_sha256 is not None else None
        engine = cls(record, params, settings, tokenizer=tokenizer, mesh=mesh)
        engine.recommended = recommended_sampling(target)
        return engine if draft is None else engine.load_draft(draft)

    def load_draft(self: ModelsT, draft: str | AnyPath) -> ModelsT:
        """Returns one of the same target with the draft of a model folder (see `load`)."""
        draft, settings = find_bundled(draft), self.settings
        record, params = load_draft(
            draft,
            compute_dtype(self.weights.target),
            target=self.record,
            allow_target_mismatch=settings.allow_target_mismatch,
            sharding=self.mesh and place_weights(self.mesh),
        )
        tuned = None if settings.tree else find_tuned(draft, record, self.mesh)
        trees, tuned_vocabulary = tuned or (None, None)
        vocabulary = settings.draft_vocabulary or tuned_vocabulary
        if vocabulary is not None:
            tokens = read_draft_vocabulary(vocabulary, self.target_config.vocab_size)
            record = with_vocabulary(record, tokens.tolist(), origin=str(draft))
        if settings.draft_window is not None:
            record = replace(record, config=replace(record.draft, window=settings.draft_window))
        return self.with_draft(record, params, tuned=trees)

    def with_draft(
        self: ModelsT, record: ModelRecord, params: Params, *, tuned: Trees | None = None
    ) -> ModelsT:
        """Returns one of the same target, whose weights it shares, with a draft.

        Trees `tuned` for the draft are used unless this engine was given others.
        """
        engine = copy(self)
        engine.draft_config = record.draft
        vocabulary, kind = record.draft_vocabulary, self.record.quantised
        ids = None if vocabulary is None else jnp.asarray(vocabulary, jnp.int32)
        params = quantise_specialists(params, kind) if kind else params
        fused = fuse_draft(params, record.draft) | {"vocabulary": ids}
        engine._own_draft = _place_on(self.mesh, fused)
        engine.weights = join_weights(self.weights.target, engine._own_draft, self.mesh)
        engine.trees = choose_trees(self.settings.tree or tuned, engine.weights.draft)
        return engine

    def with_tree(
        self: ModelsT,
        tree: TreeConfig | Trees,
        *,
        drafting: Drafting | None = None,
        lookup: int | None = None,
    ) -> ModelsT:
        """Returns one of the same models with another tree; None keeps what is set.

        Raises:
          UserError: lookup below 0 or with sampled drafts.
        """
        changes = {"tree": tree, "drafting": drafting, "lookup": lookup}
        changes = {name: value for name, value in changes.items() if value is not None}
        return self.with_settings(change_config(self.settings, origin="with_tree", **changes))

    def with_settings(self: ModelsT, settings: EngineConfig) -> ModelsT:
        """Returns one of the same models with other settings; max_length and quantise stay."""
        engine = copy(self)
        engine.settings = settings
        engine.trees = choose_trees(settings.tree, self.weights.draft)
        return engine

    def update_weights(self, params: Params) -> None:
        """Replaces the target's parameters; nothing is compiled again.

        The draft keeps its parameters and uses the new embedding and head. A request that is being
        streamed ends with the old target, and engines that share it (`with_draft`, `with_tree`)
        keep it. Old and new parameters are both held until this returns, and no array of `params`
        is kept, so a trainer may donate them.

        Args:
          params: parameters of a target of the same shape and dtype, as `__init__` takes them.

        Raises:
          UserError: other names, shapes or dtypes, or the engine's target is quantised.
        """
        old, config = self.weights.target, self.target_config
        leaves = jax.tree.leaves(old, is_leaf=lambda leaf: isinstance(leaf, Quantised))
        if any(isinstance(leaf, Quantised) for leaf in leaves):
            raise UserError(
                "update_weights: want a target that is not quantised; load it without `quantise`"
            )
        check_params(config, params, compute_dtype(old))
        if config.tie_embeddings:
            params = params | {"head": params["embed"]}
        ids = {id(leaf) for leaf in jax.tree.leaves(params)}
        copies: dict[int, jax.Array] = {}  # a tied head stays one array

        def copy_array(leaf: Any) -> Any:
            if id(leaf) in ids and id(leaf) not in copies:
                sharding = getattr(leaf, "sharding", None)
                copies[id(leaf)] = jax.device_put(leaf, sharding, may_alias=False)
            return copies.get(id(leaf), leaf)

        fused = fuse(params, config, self.mesh, partial(jax.tree.map, copy_array))
        copies.clear()  # frees what was fused
        # Compiled programs are bound to the arrays' placement.
        target = jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), fused, old)
        self.weights = join_weights(target, self._own_draft, self.mesh)
        self.fingerprint = secrets.token_hex(8)  # hashing the weights would be slower

    def decode_config(self, length: int, batch_size: int = 1) -> StaticShape:
        """Static settings of a call; `length` holds prompt and answer, see `with_rows`."""
        return self.config_with(tree_for(self.trees, batch_size), length, self.max_length)

    def config_with(self, tree: TreeConfig | None, length: int, max_length: int) -> StaticShape:
        """Static settings of decoding with a tree, or (None) without a draft."""
        draft = self.draft_config if tree else None
        config = StaticShape(
            self.target_config,
            draft and replace(draft, trained_depth=1),  # EAGLE-2 and HASS have the same programs
            tree or TreeConfig(),
            rows=0,
            chunk=prefill_chunks()[0],
            drafting=self.settings.drafting,
            mesh=self.mesh,
            lookup=self.settings.lookup if tree else 0,
        )
        return with_rows(config, length, max_length=max_length)


def fuse(
    params: Params,
    config: LlamaConfig,
    mesh: Mesh | None,
    convert: Callable[[Params], Params] = lambda item: item,
) -> Params:
    """Fuses a target and places it, each part as `convert` returns it; the caller's list stays."""

    def commit(leaf: Any) -> jax.Array:  # to its device, so that equal calls share a program
        leaf = jnp.asarray(leaf)
        return leaf if leaf.committed else jax.device_put(leaf, leaf.sharding)

    params = params | {"layers": list(params["layers"])}
    fused = fuse_target(params, config, lambda item: _place_on(mesh, convert(item)))
    return jax.tree.map(commit, fused)


def join_weights(target: Params, params: Params, mesh: Mesh | None) -> Weights:
    """Joins a target and a draft, which uses its embedding and head; {}: without a draft."""
    if not params:
        return Weights(target, {})
    draft = round_rows(borrow_from_target(params, target, params["vocabulary"]))
    return Weights(target, _place_on(mesh, draft))


def _place_on(mesh: Mesh | None, params: Params) -> Params:
    params = params if mesh is None else place_params(params, mesh)
    params = sum_values(params) if wants_sums() else params
    return tile_values(params) if mesh is None and has_kernel() else params
