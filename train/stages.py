"""The two things a run can train. Each says what its rows, parameters, step and model are."""

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
      rows: what is trained on.
      validation_rows: held-out rows.
      report: what both were made of.
      tokenizer: cuts text into the tokens of both.
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
        """Reads the weights that are at hand from the first step on, once the step fits."""
        ...

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
        """Scores a validation; the best state has the highest score."""
        ...

    def save_model(self, params: Params, folder: AnyPath) -> None:
        """Writes a model folder."""
        ...


def open_stage(config: TrainConfig, folder: AnyPath, *, plan_for: str | None = None) -> Stage:
    """Reads what the run needs but weights: text, tokenizer, and what the models are.

    Args:
      config: the run.
      folder: where it keeps what it prepares.
      plan_for: devices (see `mesh_for`) to plan a run on, which does not take place.

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
