"""The old name of `train.draft_vocab`, which the wheel installs as `poss_jax.train.draft_vocab`."""

from importlib import import_module

try:
    _program = import_module("poss_jax.train.draft_vocab")
except ModuleNotFoundError:  # a checkout that is not installed
    _program = import_module("train.draft_vocab")
main, cli = _program.main, _program.cli


if __name__ == "__main__":
    cli()
