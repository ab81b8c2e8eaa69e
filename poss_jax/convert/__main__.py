r"""Converts checkpoints of other programs into model folders, and back.

Needs a folder or Hub id with safetensors (or .bin, with the `torch` extra), or a GGUF file. Prints
what had to be assumed, a table (source key -> our path, shape and type), and as its last line one
JSON object.

    poss inspect HINT-lab/PosS3-Llama3-8B-Instruct
    poss convert target --output models/llama3-8b \
        --source meta-llama/Meta-Llama-3-8B-Instruct
    poss convert draft --output models/poss3 \
        --source HINT-lab/PosS3-Llama3-8B-Instruct --target models/llama3-8b
    poss convert export --model models/poss3 \
        --target models/llama3-8b --output exported/poss3
    poss convert target --source FILE.gguf --output DIR
"""

import argparse
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Any, get_args

from poss_jax.checkpoint.whole import refuse_irreplaceable
from poss_jax.config.models import Quantisation
from poss_jax.config.paths import AnyPath, as_path
from poss_jax.config.reading import printable
from poss_jax.data.progress import progress_bar
from poss_jax.program.arguments import describe
from poss_jax.program.output import add_json, print_summary, waiting, wants_json
from poss_jax.program.running import Parser, add_version, run_program

_NUMBER = re.compile(r"(?<=[./])\d+(?=[./])|^\d+(?=[./])")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses arguments, and runs one command."""
    options = vars(_parser().parse_args(arguments))
    command, _ = options.pop("command"), options.pop("json")  # see `wants_json`
    named = ("model", "target", *(["source"] if command == "inspect" else []))
    if names := [name for name in named if options.get(name) is not None]:
        with waiting("importing JAX ..."):
            from poss_jax.bundled.default import find_bundled
        options |= {name: find_bundled(options[name]) for name in names}
    if "output" in options:  # before anything large is read
        refuse_irreplaceable(options["output"])
    run = {"inspect": _inspect, "export": _export}.get(command, partial(_convert, command))
    run(**options)


# --------------------------------------------------------------------------------------------------
# Commands


def _inspect(**options: Any) -> None:
    with waiting("importing JAX ..."):
        from poss_jax.convert.plan import inspect
    inspection = inspect(**options)
    lines = [f"{name:24}{text}" for name, text in inspection.facts.items()]
    lines += ["", *_format_rows(inspection.rows), ""] if inspection.rows else []
    lines += [f"assumed: {line}" for line in inspection.assumed]
    lines += [f"needs: {inspection.needs}"] if inspection.needs else []
    lines += [f"refused: {inspection.refused}"] if inspection.refused else []
    print("\n".join(map(printable, lines)).rstrip())
    print_summary(inspection.summary, "")
    if inspection.refused:
        raise SystemExit(1)


def _export(output: AnyPath, *, as_bin: bool, **options: Any) -> None:
    with waiting("importing JAX ..."):
        from poss_jax.convert.export import plan_export, write_export
    export = plan_export(**options)
    print("\n".join(map(printable, _format_rows(export.rows))))
    arrays = progress_bar(export.arrays(), total=len(export.rows), unit="tensor")
    write_export(output, export, iter(arrays), as_bin=as_bin)
    summary = {"output": str(output), "tensors": len(export.rows), "dtype": export.dtype}
    print_summary(summary, f"wrote {output}: {len(export.rows)} tensors, {export.dtype}")


def _convert(command: str, output: AnyPath, **options: Any) -> None:
    """Writes a model folder: a target or a draft."""
    with waiting("importing JAX ..."):
        from poss_jax.checkpoint.writing import write_model
        from poss_jax.convert.plan import plan_draft, plan_target
        from poss_jax.model.parameters import count_parameters
    conversion = (plan_target if command == "target" else plan_draft)(**options)
    lines = [*(f"assumed: {line}" for line in conversion.assumed), *_format_rows(conversion.rows)]
    print("\n".join(map(printable, lines)))
    record = conversion.record
    with progress_bar(total=len(record.items), unit="item") as progress:

        def advance(item: tuple[str, Any]) -> tuple[str, Any]:
            progress.update()
            return item

        # Iterating over tqdm itself would keep each item until the next one has been made.
        items = map(advance, conversion.items)
        write_model(output, record, items, tokenizer_from=conversion.tokenizer_from)
    summary = {
        "output": str(output),
        "family": record.family,
        "method": record.method,
        "parameters": count_parameters(record.config),
        "dtype": conversion.dtype,
        "quantised": record.quantised,
        "assumed": list(conversion.assumed),
    }
    name, count = record.method or record.family, summary["parameters"]
    print_summary(summary, f"wrote {output}: {name}, {count:,} parameters, {conversion.dtype}")


# --------------------------------------------------------------------------------------------------
# The table of what goes where, short enough to read: alike layers share a line


def _format_rows(rows: Sequence[Any]) -> list[str]:
    """Lays rows of `poss_jax.convert.reading` out in columns: key -> path, shape, type.

    Consecutive layers whose rows differ only in the layer's number share a line: `{0..31}`. On a
    terminal every path has its own line.
    """
    folded = _fold_rows(rows)
    key_width = max((len(row.key) for row in folded), default=0)
    path_width = max((len(row.path) for row in folded), default=0)
    lines = []
    for row in folded:
        weight = f"{'x'.join(map(str, row.shape)) or 'scalar'}  {row.dtype}"
        if not path_width:  # a refused source
            lines.append(f"{row.key:{key_width}}  {weight}")
        elif wants_json():
            lines.append(f"{row.key:{key_width}}  ->  {row.path:{path_width}}  {weight}")
        else:
            lines += [f"{row.key:{key_width}}  {weight}", f"  -> {row.path}"]
    return lines


def _fold_rows(rows: Iterable[Any]) -> list[Any]:
    """Joins rows that differ only in their layer's number, ordered by the first of each group."""
    groups: dict[Any, list[list[int]]] = {}
    for row in rows:
        matches = [_NUMBER.search(name) for name in (row.key, row.path)]
        key, path = (_NUMBER.sub("\0", name, count=1) for name in (row.key, row.path))
        numbers = [int(match[0]) if match else -1 for match in matches]
        groups.setdefault(row._replace(key=key, path=path), []).append(numbers)
    folded = []
    for row, numbers in groups.items():
        consecutive = groupby(enumerate(sorted(numbers)), key=lambda item: item[1][0] - item[0])
        for _, run in consecutive:
            pairs = [pair for _, pair in run]
            key, path = (
                str(first) if first == last else f"{{{first}..{last}}}"
                for first, last in zip(pairs[0], pairs[-1], strict=True)
            )
            key, path = row.key.replace("\0", key), row.path.replace("\0", path)
            folded.append(row._replace(key=key, path=path))
    return folded


# --------------------------------------------------------------------------------------------------
# Options and commands


def _parse_count(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"want counts of at least 1, got {text!r}")
    return int(text)


def _folder(text: str) -> dict[str, Any]:
    return {"type": as_path, "metavar": "DIR", "help": text}


_OPTIONS: dict[str, dict[str, Any]] = {
    "source": {
        "metavar": "SOURCE",
        "help": "A folder of a PyTorch checkpoint, its Hub id (owner/name), a GGUF file, or a "
        "model folder.",
    },
    "--source": {
        "metavar": "SOURCE",
        "help": "Convert this checkpoint: a folder, or an id on the Hugging Face Hub (owner/name); "
        "a target also from a GGUF file, or a folder or wheel (.whl, .zip) that holds one.",
    },
    "--output": _folder("Write to this folder. It is created; if it exists, it must be empty."),
    "--model": _folder("Export this model folder."),
    "--target": _folder("Model folder of the target that the draft was trained for."),
    "--revision": {
        "metavar": "REV",
        "help": "Take this branch, tag or commit on the Hub. The default is its main branch.",
    },
    "--verify": {
        "action": "store_true",
        "help": "Compare the files and weights of a model folder with their checksums.",
    },
    "--positions-per-specialist": {
        "type": lambda text: tuple(map(_parse_count, text.split(","))),
        "metavar": "N,N,...",
        "help": "Number of draft positions that each specialist serves, such as 3,3. The draft "
        "command knows it for published checkpoints, our own exports and drafts of one layer.",
    },
    "--trained-depth": {
        "type": _parse_count,
        "metavar": "N",
        "help": "Number of positions the draft was trained on, such as 3 for HASS. It is recorded "
        "and changes no output. The default is the published depth, or the sum of the positions "
        "per specialist.",
    },
    "--draft-vocabulary": {
        "type": as_path,
        "metavar": "FILE",
        "help": "Let the draft propose only the tokens of this file (poss draft-vocab), which "
        "reads less of the head. A draft with its own head keeps its tokens.",
    },
    "--format": {
        "dest": "form",
        "metavar": "NAME",
        "help": "Layout to write: hf for a target; for EAGLE-2, HASS and PosS eagle (one layer) or "
        "poss; for EAGLE-3 eagle3, specforge, sglang or speculators (one layer), poss or "
        "poss-midlayers (PosS on EAGLE-3). The default is hf for a target, eagle or eagle3 for a "
        "draft of one layer, and poss for others.",
    },
    "--specialist": {
        "type": int,
        "metavar": "S",
        "help": "Write specialist S of a PosS draft alone, as a draft of one layer. The first one "
        "is 0.",
    },
    "--verifier": {
        "metavar": "DIR_OR_HUB_ID",
        "help": "Where --format speculators says that the target's PyTorch checkpoint is. The "
        "default is the Hub id that the target was converted from.",
    },
    "--bin": {
        "action": "store_true",
        "dest": "as_bin",
        "help": "Write pytorch_model.bin instead of model.safetensors. This needs the `torch` "
        "extra.",
    },
    "--dtype": {
        "choices": ("keep", "float32", "bfloat16", "float16"),
        "default": "keep",
        "help": "Convert the weights to this type. By default they keep the type they have.",
    },
    "--quantise": {
        "choices": get_args(Quantisation),
        "help": "Keep the matrices of attention and MLP and the head in 8 bits (int8, or fp8 as "
        "float8_e4m3fn), with a scale per output. Drafts made for the source fit the target.",
    },
}


# Command -> help, what else its own help says, options that must be given, other options.
_COMMANDS = {
    "inspect": (
        "Say what a checkpoint or a model folder holds, without converting it.",
        "It shows the family, shapes, types, rope and vocabulary, what converting it would assume "
        "or need, and why it would be refused. Of safetensors on the Hub only the headers are "
        "fetched; .bin files have none and are downloaded.",
        "source",
        "--revision --verify",
    ),
    "target": (
        "Convert a Llama-family target in Hugging Face's layout.",
        "Its config.json, tokenizer files and weights are read (safetensors, or .bin with the "
        "`torch` extra; a single file or shards), or a GGUF file, whose weights are dequantised.",
        "--source --output",
        "--revision --dtype --quantise",
    ),
    "draft": (
        "Convert an EAGLE, EAGLE-2, EAGLE-3, HASS or PosS draft.",
        "Such a draft has fc and one decoder layer per specialist. The embedding and the head are "
        "the target's and are not stored; only EAGLE-3 drafts have their own head.",
        "--source --target --output",
        "--revision --dtype --positions-per-specialist --trained-depth --draft-vocabulary",
    ),
    "export": (
        "Write a model folder as a PyTorch checkpoint.",
        "A target is written as `transformers` reads it, a draft in the layout of the original "
        "code or of another program. A draft gets a model card that describes its target, so it "
        "needs --target. Converting the files again checks them against SHA256SUMS.",
        "--model --output",
        "--format --target --specialist --verifier --bin --dtype",
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        module="poss_jax.convert",
        description=describe(__doc__, shows_all=False),
        usage="%(prog)s COMMAND ...",
    )
    parsers = parser.add_subparsers(
        required=True, metavar="COMMAND", dest="command", prog=parser.prog
    )
    for name, (summary, more, required_flags, optional_flags) in _COMMANDS.items():
        required = {flag: _OPTIONS[flag] for flag in required_flags.split()}
        usage = " ".join(f"{flag} {option['metavar']}" for flag, option in required.items())
        subparser = parsers.add_parser(
            name,
            help=summary,
            description=textwrap.fill(f"{summary} {more}", 79),
            usage=f"%(prog)s {usage.removeprefix('source ')} [options]",
        )
        for flag in [*required, *optional_flags.split()]:
            options = dict(_OPTIONS[flag])
            if flag.startswith("--"):
                options["required"] = flag in required
            subparser.add_argument(flag, **options)
        add_json(subparser)
        add_version(subparser)
    return parser


cli = partial(run_program, main)

if __name__ == "__main__":
    cli()
