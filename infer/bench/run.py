"""One benchmark from its settings to its report."""

from pathlib import Path

from poss_jax.config.decoding import BenchConfig
from poss_jax.config.paths import local_path
from poss_jax.program.options import with_default_models

from ..drift.report import format_report as format_drift
from .answer_files import write_answer_files
from .brief import format_brief
from .compare import bench
from .journal import SETTINGS
from .page import write_page
from .report import format_report, open_output, show_report


def run(config: BenchConfig, *, from_scratch: bool) -> None:
    """Measures, prints, and writes the report; `from_scratch` drops an earlier one."""
    config = with_default_models(config)
    output = config.output
    is_resumed = output is not None and (local_path(output, "output") / SETTINGS).is_file()
    with open_output(output, overwrite=from_scratch or is_resumed) as folder:
        report, answers = bench(config, from_scratch=from_scratch)
        table = format_report(report)
        if "drift" in report:
            table += f"\n\n## By position\n\n{format_drift(report['drift'])}"

        def write(folder: Path) -> None:
            write_page(report, folder / "report.html")
            write_answer_files(answers, folder)

        show_report(report, table, folder, brief=format_brief(report), write=write)
