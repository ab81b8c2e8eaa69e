"""Models that come with the package: a small target that writes Python, and drafts for it.

`make bundle` trains them, from configs/bundled, and puts them here.
"""

from pathlib import Path

from poss_jax.config.reading import UserError

_FOLDER = Path(__file__).parent


def bundled_model(name: str) -> Path:
    """Returns the model folder of a bundled model.

    Args:
      name: `target`, or a draft for it, such as `poss3`.

    Raises:
      UserError: no bundled model has this name.
    """
    folder = _FOLDER / name
    if not (folder / "model.json").is_file():
        names = sorted(path.parent.name for path in _FOLDER.glob("*/model.json"))
        raise UserError(f"bundled models: want one of {', '.join(names)}, got {name}")
    return folder
