"""The small models that write Python, a target and drafts for it: one safetensors file each.

Model folders are made of them below runs/python when they are first wanted.

    python -m benchmarks.python_models                       # all folders, which configs name
    python -m benchmarks.python_models --pack runs/bundled   # files of models trained again
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from filelock import FileLock
from flax.traverse_util import unflatten_dict
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from poss_jax.checkpoint.folder import load_item
from poss_jax.checkpoint.record import ModelRecord, read_record
from poss_jax.checkpoint.writing import copy_tokenizer, write_model
from poss_jax.config.reading import build_config
from poss_jax.model.parameters import flatten_item
from poss_jax.program.running import Parser, run_program
from poss_jax.shapes import Params

ROOT = Path(__file__).parent.parent
FILES = ROOT / "tests" / "fixtures" / "python"
FOLDERS = ROOT / "runs" / "python"
_RECORD = "model.json"  # its text is the file's metadata of this name


def python_model(name: str) -> Path:
    """Model folder of `target`, or of a draft for it, such as `poss3`."""
    folder, source = FOLDERS / name, FILES / f"{name}.safetensors"
    FOLDERS.mkdir(parents=True, exist_ok=True)
    with FileLock(FOLDERS / ".lock"):
        record = folder / _RECORD
        if not record.is_file() or record.stat().st_mtime < source.stat().st_mtime:
            shutil.rmtree(folder, ignore_errors=True)
            unpack(source, folder)
    return folder


def unpack(source: Path, folder: Path) -> None:
    """Makes a model folder of a file."""
    with safe_open(source, "numpy") as file:
        values = json.loads(file.metadata()[_RECORD])
    record, arrays = build_config(ModelRecord, values, origin=str(source)), load_file(source)

    def item(name: str) -> Params:
        paths = {key.removeprefix(f"{name}/"): key for key in arrays if key.startswith(f"{name}/")}
        return unflatten_dict({path: arrays[key] for path, key in paths.items()}, sep="/")

    items = ((name, item(name)) for name in record.items)
    write_model(folder, record, items, tokenizer_from=source.parent)


def pack(folder: Path, target: Path) -> None:
    """Makes a file of a model folder, next to the tokenizer that all of them share."""
    record = read_record(folder)
    arrays = {
        "/".join((name, *path)): np.asarray(array)
        for name in record.items
        for path, array in flatten_item(load_item(folder, record, name)).items()
    }
    save_file(arrays, target, {_RECORD: (folder / _RECORD).read_text()})
    copy_tokenizer(folder, target.parent)


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes all folders, or files of the models of other runs."""
    parser = Parser(description=__doc__)
    parser.add_argument("--pack", type=Path, metavar="RUNS", help="folder of runs named alike")
    args = parser.parse_args(arguments)
    for path in sorted(FILES.glob("*.safetensors")):
        if args.pack is None:
            print(python_model(path.stem))
        else:
            pack(args.pack / path.stem / "model", path)


if __name__ == "__main__":
    run_program(main)
