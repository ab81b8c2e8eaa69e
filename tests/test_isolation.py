"""Settings of whoever runs the tests reach no test."""

import os
from pathlib import Path

import pytest
from isolation import isolate


def test_settings_of_a_user_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("XDG_CACHE_HOME", "HF_HOME", "JAX_ENABLE_X64", "POSS_JAX_CACHE", "POSS_API_KEY")
    environment = {**dict.fromkeys(names, "/odd"), "HOME": "/odd", "JAX_PLATFORMS": "cpu"}
    environment["JAX_COMPILATION_CACHE_DIR"] = "/odd"
    monkeypatch.setattr(os, "environ", environment)
    isolate()
    assert environment["JAX_PLATFORMS"] == "cpu" and not set(names) & environment.keys()
    assert "/odd" not in environment.values() and os.path.isdir(environment["HOME"])


def test_runs_share_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rates that tests make up do not end up beside the user's programs."""
    environment = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    monkeypatch.setattr(os, "environ", environment)
    isolate()
    assert environment["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "tests")
