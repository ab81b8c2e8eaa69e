"""The two things a run can train: each defines its rows, parameters, step and model."""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import optax
from jax.sharding import Mesh

from poss_jax.config.models import DraftConfig, LlamaConfig
from poss_jax.config.paths import AnyPath
from poss_jax.config.training import TrainConfig
from poss_jax.data.rows import Rows
from poss_jax.learn.state import TrainState
from poss_jax.learn.validation import (
    Predictions,
)
from poss_jax.model.documents import TrainBatch
from poss_jax.model.sharding import check_batch_size, check_processes
from poss_jax.shapes import Array, Params

from .draft_stage import DraftStage
from .memory import PlannedStep, mesh_for
from .target_stage import TargetStage


class Stage(Protocol):
    """Interface between the training loop and a stage.

    Attributes:
      config: shape of the model that is trained.
      mesh: the devices it is trained on.
      rows: rows to train on.
      validation_rows: held-out rows.
      report: what both were made from.
      tokenizer: tokenizer of both.
      lookahead: how many tokens after its own a row predicts first.
    """

    lookahead: int
    mesh: Mesh
    rows: Rows
    validation_rows: Rows
    report: dict[str, Any]
    tokenizer: Any

    @property
    def config(self) -> LlamaConfig | DraftConfig: ...

    def load_weights(self) -> None:
        """Reads the weights needed from the first step on, once the step is known to fit."""
        ...

    def write_features(self) -> None:
        """Writes features to disk, so that steps need not compute them."""
        ...

    def plan_step(self) -> PlannedStep:
        """The step, from shapes alone."""
        ...

    def init_params(self) -> Params:
        """Initial parameters on the mesh, layers or specialists stacked."""
        ...

    def make_step(
        self, optimizer: optax.GradientTransformation, state: TrainState
    ) -> Callable[[TrainState, TrainBatch], tuple[TrainState, dict[str, Array]]]:
        """Returns the step for states like this: (state, batch) -> (state, metrics)."""
        ...

    def validate(
        self, params: Params, batches: Iterable[TrainBatch]
    ) -> tuple[dict[str, Any], Predictions]:
        """Measures the parameters on held-out batches, and returns predictions for the first."""
        ...

    def score(self, results: dict[str, Any]) -> float:
        """Scores a validation; the best state has the highest score."""
        ...

    def save_model(self, params: Params, folder: AnyPath) -> None:
        """Writes a model folder."""
        ...


def open_stage(config: TrainConfig, folder: AnyPath, *, plan_for: str | None = None) -> Stage:
    """Reads all that the run needs except weights: text, tokenizer, model configs.

    Args:
      config: the run.
      folder: folder for prepared data.
      plan_for: devices (see `mesh_for`) to plan a run for, without running it.

    Raises:
      UserError: something is missing or does not fit.
    """
    mesh = mesh_for(config, plan_for or "here")
    if plan_for is None:
        check_processes(mesh)
    check_batch_size(config.batch_size // config.step.accumulation_steps, mesh)
    if config.stage == "draft":
        return DraftStage(config, folder, mesh)
    return TargetStage(config, folder, mesh, is_shared=plan_for is None)
