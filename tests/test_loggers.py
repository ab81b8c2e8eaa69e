"""TensorBoard and Weights & Biases: what they are handed, and what is said where they are missing.

Stand-ins take the packages' places: they are optional, and neither is needed to test this.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_run_folder import config_for

from poss_jax.config.reading import UserError
from train.run_log import check_loggers, open_loggers, scalars


def test_scalars_take_lists_apart() -> None:
    assert scalars({"loss": 2.0, "agreement": [0.75, 0.5]}) == {
        "loss": 2.0,
        "agreement/depth_0": 0.75,
        "agreement/depth_1": 0.5,
    }


@pytest.mark.parametrize(("name", "package"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_package_is_said_in_one_line(tmp_path, name, package, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, package, raising=False)
    with pytest.raises(UserError, match=rf"needs the package {package}, .*poss-jax\[{name}\]"):
        check_loggers(config_for(tmp_path, loggers=[name]))


def test_tensorboard_takes_up_after_the_checkpoint(tmp_path, monkeypatch) -> None:
    calls: list[Any] = []

    class SummaryWriter:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))

        def add_scalar(self, *args: Any) -> None:
            calls.append(args)

        def close(self) -> None:
            calls.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    config = config_for(tmp_path, loggers=["tensorboard"])
    (logger,) = open_loggers(config, tmp_path, first_step=10)
    logger.log(11, {"loss": 2.0})
    logger.close()
    opened = ((str(tmp_path / "tensorboard"),), {"purge_step": 11})
    assert calls == [opened, ("loss", 2.0, 11), "closed"]


def test_wandb_continues_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, Any]] = []
    logged: list[dict[str, float]] = []
    run = SimpleNamespace(log=logged.append, define_metric=lambda *_, **__: None)
    wandb = SimpleNamespace(init=lambda **kwargs: (opened.append(kwargs), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = config_for(tmp_path, loggers=["wandb"])
    for command in ("a", "a", "b"):
        (tmp_path / "provenance.json").write_text(json.dumps({"command": command}))
        (logger,) = open_loggers(config, tmp_path, first_step=10)
        logger.log(11, {"loss": 2.0})
    first, again, anew = (call["id"] for call in opened)
    assert first == again != anew
    assert opened[0]["name"] == tmp_path.name and opened[0]["resume"] == "allow"
    assert opened[0]["config"]["loggers"] == ["wandb"]
    assert logged == [{"step": 11, "loss": 2.0}] * 3
