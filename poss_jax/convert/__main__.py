r"""Converts PyTorch checkpoints into model folders and back, and says what a checkpoint holds.

Needs a folder or Hub id with safetensors (or .bin, with the `torch` extra). Prints what had to be
assumed, a table (source key -> our path, shape and type), and as its last line one JSON object.

    python -m poss_jax.convert inspect HINT-lab/PosS3-Llama3-8B-Instruct
    python -m poss_jax.convert target --source meta-llama/Meta-Llama-3-8B-Instruct \
        --output models/llama3
    python -m poss_jax.convert draft --source HINT-lab/PosS3-Llama3-8B-Instruct \
        --target models/llama3 --output models/poss3
    python -m poss_jax.convert export --model models/poss3 --target models/llama3 \
        --output exported/poss3
"""

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from tqdm import tqdm

from poss_jax.checkpoint import refuse_non_empty, write_model
from poss_jax.convert.draft import plan_draft
from poss_jax.convert.export import plan_export, write_export
from poss_jax.convert.inspection import inspect
from poss_jax.convert.plan import Conversion
from poss_jax.convert.specialists import plan_specialists
from poss_jax.convert.table import format_rows
from poss_jax.convert.target import plan_target
from poss_jax.model.parameters import count_parameters
from poss_jax.program import Parser, run_program
from poss_jax.shapes import Params

_OUTPUT = "folder to write; must not exist or be empty"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command.

    Args:
      arguments: the command line without the program's name; None takes the process's own.

    Raises:
      UserError: wrong arguments, or anything in the source that cannot be converted.
    """
    args = _parser().parse_args(arguments)
    if "output" in args:  # before anything large is read
        refuse_non_empty(args.output)
    args.run(args)


def cli() -> None:
    """Entry point of `poss-convert`."""
    run_program(main)


# --------------------------------------------------------------------------------------------------
# Commands


def _inspect(args: argparse.Namespace) -> None:
    found = inspect(args.source, args.revision, verify=args.verify)
    lines = [f"{name:24}{text}" for name, text in found.facts]
    lines += ["", *format_rows(found.rows), ""] if found.rows else []
    lines += [f"assumed: {line}" for line in found.assumed]
    lines += [f"needs: {found.needs}"] if found.needs else []
    lines += [f"refused: {found.refused}"] if found.refused else []
    print("\n".join(lines))
    print(json.dumps(found.summary))


def _target(args: argparse.Namespace) -> None:
    _write(args.output, plan_target(args.source, revision=args.revision, dtype=args.dtype))


def _draft(args: argparse.Namespace) -> None:
    conversion = plan_draft(
        args.source,
        args.target,
        positions_per_specialist=args.positions_per_specialist,
        trained_depth=args.trained_depth,
        revision=args.revision,
        dtype=args.dtype,
    )
    _write(args.output, conversion)


def _specialists(args: argparse.Namespace) -> None:
    spans, depth = args.positions_per_specialist, args.trained_depth
    _write(args.output, plan_specialists(args.draft, spans, trained_depth=depth))


def _export(args: argparse.Namespace) -> None:
    export = plan_export(
        args.model,
        form=args.format,
        target=args.target,
        specialist=args.specialist,
        dtype=args.dtype,
    )
    print("\n".join(format_rows(export.rows)))
    arrays = tqdm(export.arrays(), total=len(export.rows), unit="tensor", disable=None)
    write_export(args.output, export, iter(arrays), as_bin=args.bin)
    summary = {"output": str(args.output), "tensors": len(export.rows), "dtype": export.dtype}
    print(json.dumps(summary))


def _write(output: Path, conversion: Conversion) -> None:
    for line in conversion.assumed:
        print(f"assumed: {line}")
    print("\n".join(format_rows(conversion.rows)))
    record = conversion.record
    with tqdm(total=conversion.num_items, unit="item", disable=None) as progress:
        # Iterating over tqdm itself would keep each item until the next one has been made.
        items = map(partial(_advance, progress), conversion.items)
        write_model(output, record, items, tokenizer_from=conversion.tokenizer_from)
    summary = {
        "output": str(output),
        "family": record.family,
        "method": record.method,
        "parameters": count_parameters(record.config),
        "dtype": conversion.dtype,
        "assumed": list(conversion.assumed),
    }
    print(json.dumps(summary))


def _advance(progress: tqdm, item: tuple[str, Params]) -> tuple[str, Params]:
    progress.update()
    return item


# --------------------------------------------------------------------------------------------------
# Flags


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="poss-convert",
        description=(
            "Convert PyTorch checkpoints into poss_jax model folders. Every key of the source is "
            "checked; anything unknown, missing or of another shape stops the conversion, and "
            "nothing is written."
        ),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_inspect(commands)
    _add_target(commands)
    _add_draft(commands)
    _add_specialists(commands)
    _add_export(commands)
    return parser


def _add_inspect(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "inspect",
        help="say what a checkpoint or a model folder holds, without converting it",
        description=(
            "Say what a folder or Hub id holds: its family, shapes, types, rope and vocabulary, "
            "what converting it would assume or need, and why it would be refused. Of safetensors "
            "on the Hub only the headers are fetched; .bin files have none and are downloaded."
        ),
    )
    command.set_defaults(run=_inspect)
    command.add_argument(
        "source",
        metavar="SOURCE",
        help="folder of a PyTorch checkpoint, its Hub id (owner/name), or a model folder",
    )
    _add_revision(command)
    command.add_argument(
        "--verify", action="store_true", help="compare a model folder with its checksums"
    )


def _add_target(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "target",
        help="a Llama-family target in Hugging Face's layout",
        description=(
            "Convert a Llama-family target: config.json, tokenizer files and weights "
            "(safetensors, or .bin with the `torch` extra; a single file or shards)."
        ),
    )
    command.set_defaults(run=_target)
    _add_source(command)
    _add_folder(command, "--output", _OUTPUT)


def _add_draft(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "draft",
        help="an EAGLE, EAGLE-2, HASS or PosS draft",
        description=(
            "Convert a draft of the EAGLE-2 layout (fc and one decoder layer per specialist, "
            "without input norm). Head and embedding are the target's and are not stored."
        ),
    )
    command.set_defaults(run=_draft)
    _add_source(command)
    _add_folder(
        command, "--target", "model folder of the target it was trained for, made by this program"
    )
    _add_folder(command, "--output", _OUTPUT)
    _add_spans(command, required=False)


def _add_specialists(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "init-specialists",
        help="a PosS start from a trained draft",
        description=(
            "Make a draft with more specialists: every missing one is a copy of the last one the "
            "draft has. Train it to tell them apart."
        ),
    )
    command.set_defaults(run=_specialists)
    _add_folder(
        command, "--draft", "model folder of the draft to start from, usually an EAGLE draft"
    )
    _add_folder(command, "--output", _OUTPUT)
    _add_spans(command, required=True)


def _add_export(commands: argparse._SubParsersAction) -> None:
    command = commands.add_parser(
        "export",
        help="a model folder as a PyTorch checkpoint",
        description=(
            "Write a model folder as a PyTorch checkpoint: a target as `transformers` reads it, a "
            "draft as the original EAGLE and PosS code does (the embedding of its target is part "
            "of that layout). SHA256SUMS beside the files is checked when they are converted again."
        ),
    )
    command.set_defaults(run=_export)
    _add_folder(command, "--model", "model folder to export")
    _add_folder(command, "--output", _OUTPUT)
    command.add_argument(
        "--format",
        choices=("hf", "eagle", "poss"),
        help="hf: a target; eagle: a draft of one layer; poss: any draft (default: hf or poss)",
    )
    _add_folder(command, "--target", "model folder of a draft's target", required=False)
    command.add_argument(
        "--specialist",
        type=int,
        metavar="S",
        help="write this one of a draft's specialists (0 is the first) as an eagle draft",
    )
    command.add_argument(
        "--bin",
        action="store_true",
        help="write pytorch_model.bin, not model.safetensors; needs the `torch` extra",
    )
    _add_dtype(command, "float16")


def _add_source(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--source",
        required=True,
        metavar="DIR_OR_HUB_ID",
        help="folder of the PyTorch checkpoint, or its id on the Hugging Face Hub (owner/name)",
    )
    _add_revision(command)
    _add_dtype(command)


def _add_revision(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit on the Hub (default: its main branch)",
    )


def _add_dtype(command: argparse.ArgumentParser, *more: str) -> None:
    command.add_argument(
        "--dtype",
        choices=("keep", "float32", "bfloat16", *more),
        default="keep",
        help="type to store the weights in (default: keep the one they have)",
    )


def _add_folder(
    command: argparse.ArgumentParser, flag: str, text: str, *, required: bool = True
) -> None:
    command.add_argument(flag, required=required, type=Path, metavar="DIR", help=text)


def _add_spans(command: argparse.ArgumentParser, *, required: bool) -> None:
    default, depth = "", "that of the draft"
    if not required:
        default = (
            " (default: known for the published checkpoints on the Hub, 1 for a single layer; "
            "otherwise it must be given)"
        )
        depth = "known for the published ones, 1 for a single layer, otherwise the sum of the above"
    command.add_argument(
        "--positions-per-specialist",
        required=required,
        type=_parse_spans,
        metavar="N,N,...",
        help=f"how many draft positions each specialist serves, such as 3,3{default}",
    )
    command.add_argument(
        "--trained-depth",
        type=_parse_count,
        metavar="N",
        help=f"positions the draft was trained on, such as 3 for HASS (default: {depth})",
    )


def _parse_spans(text: str) -> tuple[int, ...]:
    return tuple(_parse_count(part) for part in text.split(","))


def _parse_count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"want counts of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    cli()
