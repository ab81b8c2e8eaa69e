"""One benchmark from its settings to its report."""

from contextlib import nullcontext

from poss_jax.checkpoint.locks import sole_writer
from poss_jax.config.decoding import BenchConfig
from poss_jax.config.paths import local_path
from poss_jax.program.options import with_default_models
from poss_jax.program.output import print_summary, wants_json

from ..drift.report import format_report as format_drift
from .answer_files import write_answer_files
from .brief import format_brief
from .compare import bench
from .journal import SETTINGS
from .page import write_page
from .report import check_output, format_report, write_report


def run(config: BenchConfig, *, from_scratch: bool) -> None:
    """Measures, prints, and writes the report.

    Args:
      config: what is compared.
      from_scratch: drop what the output folder holds.

    Raises:
      UserError: bad input.
    """
    config = with_default_models(config)
    folder = None if config.output is None else local_path(config.output, "output")
    if folder is not None:
        check_output(folder, overwrite=from_scratch or (folder / SETTINGS).is_file())
    with nullcontext() if folder is None else sole_writer(folder):
        report, answers = bench(config, from_scratch=from_scratch)
        table = format_report(report)
        if "drift" in report:
            table += f"\n\n## By position\n\n{format_drift(report['drift'])}"
        print(table if wants_json() else format_brief(report))
        if folder is not None:
            write_report(report, table, folder)
            write_page(report, folder / "report.html")
            write_answer_files(answers, folder)
            print(f"report: {folder}")
        print_summary(report, "")
