"""`fl-lightning reproduce`: run the experiments of a paper's table, and compare with the paper's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.study.checks import errors_at
from fl_lightning.analysis.study.executor import Job, JobResult, is_finished
from fl_lightning.analysis.study.folder import open_study
from fl_lightning.analysis.study.paper_table import Scale, read_table, table_jobs
from fl_lightning.analysis.study.reproduction import Reproduction
from fl_lightning.analysis.study.reproduction_table import as_csv, as_markdown, as_text
from fl_lightning.cli.command_line import read_command_line
from fl_lightning.cli.jobs import Words, in_each, resolve_config, run_missing
from fl_lightning.core.console import table_console
from fl_lightning.core.errors import ConfigError, check_positive
from fl_lightning.core.lazy_import import load
from fl_lightning.core.terminal import echo


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Run a paper table's unfinished runs, and print our results beside the paper's. Return 1 if one failed."""
    check_positive("--", workers=given.workers, threads=given.threads)
    table = read_table(given.table).part(given.rows or (), given.columns or (), given.seeds or ())
    out, overrides = Path(given.out or Path("runs", "reproduce", table.name)), given.set or []
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is not a folder. Give another --out")
    scale = Scale(given.scale, given.scale_epochs)
    jobs = table_jobs(table, out, scale, overrides)
    failed: list[JobResult] = []
    if not given.show:
        check_jobs(jobs, given.workers)
        with open_study(out, {"study": "reproduce"}):
            failed = run_missing(list(dict.fromkeys(jobs.values())), out, given.workers, given.threads)
    reproduction = Reproduction(table, jobs, {ended.job.folder: ended.reason for ended in failed})
    if given.format == "table":
        table_console().print(as_text(reproduction, scale, overrides))
    else:
        echo(as_csv(reproduction) if given.format == "csv" else as_markdown(reproduction, scale, overrides))
    return 1 if failed else 0


def check_jobs(jobs: Mapping[tuple[str, str, int], Job], workers: int) -> None:
    """Check the settings of a paper table's runs (jobs) before any of them starts.

    Finished runs are not checked. Of the others, at least one of each row and each column is checked.

    Raises:
        ConfigError: Names the row, the column and the reason.
    """
    checked: set[tuple[str, str]] = set()
    command_lines: list[tuple[str, Words]] = []
    for (column, row, _), job in jobs.items():
        places = {("column", column), ("row", row)}
        if places <= checked or is_finished(job.folder):
            continue
        checked |= places
        with errors_at(f"{row} / {column}"):
            load("fl_lightning.cli.unknown_names").check_names("fit", read_command_line("fit", job.words))
        command_lines.append((f"{row} / {column}", job.words))
    in_each(resolve_config, command_lines, workers)
