"""`python -m train`, and in the wheel `python -m poss_jax.train`: the same as `poss train`."""

from .main import cli

if __name__ == "__main__":
    cli()
