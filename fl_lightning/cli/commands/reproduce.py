"""`fl-lightning reproduce`: run a paper's table, and show it beside the paper's."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from fl_lightning.analysis.executor import Job, JobResult, earlier_result, is_finished, run_jobs
from fl_lightning.analysis.paper_table import read_table, table_jobs
from fl_lightning.analysis.reproduction import Reproduction
from fl_lightning.analysis.reproduction_table import as_csv, as_markdown, as_text
from fl_lightning.cli.errors import plainly
from fl_lightning.cli.jobs import FIT
from fl_lightning.core.errors import ConfigError, check_positive
from fl_lightning.core.lazy import load
from fl_lightning.runs.folder import alone


def parser() -> ArgumentParser:
    """A table, what of it, how much smaller, and where its runs lie."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("table", type=str, help="A table's file, or the name of a shipped one: `list papers`.")
    parser.add_argument("--rows", type=str, nargs="+", help="Rows, by name or by a fragment of it; all by default.")
    parser.add_argument("--columns", type=str, nargs="+", help="Columns, likewise.")
    parser.add_argument("--seeds", type=int, nargs="+", help="Seeds; the table's own by default.")
    scale = "Make each experiment smaller: rounds, local epochs and training samples times this, rounded up."
    parser.add_argument("--scale", type=float, default=1.0, help=scale)
    last = "KEY=VALUE, settings of every experiment that have the last say, about what --scale changes too."
    parser.add_argument("--set", type=str, nargs="+", help=last, metavar="KEY=VALUE")
    parser.add_argument("--workers", type=int, default=1, help="How many experiments run at a time.")
    parser.add_argument("--threads", type=int | None, help="Threads of each; the cores, shared out, by default.")
    parser.add_argument("--out", type=str | None, help="Folder of the runs; runs/reproduce/<table> by default.")
    parser.add_argument("--show", action="store_true", help="Show what has been run, and run nothing.")
    parser.add_argument("--format", type=Literal["table", "markdown", "csv"], default="table", help="Of what is shown.")
    return parser


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Run what is missing of a table, and print it beside the paper's; 1 if a run failed."""
    check_positive("--", workers=given.workers, threads=given.threads)
    table = read_table(given.table).part(given.rows or (), given.columns or (), given.seeds or ())
    out, overrides = Path(given.out or Path("runs", "reproduce", table.name)), given.set or []
    jobs = table_jobs(table, out, given.scale, overrides)
    wanted = list(dict.fromkeys(jobs.values()))
    if not given.show:
        check(jobs)
    known = map(earlier_result, wanted) if given.show else run_missing(wanted, out, given.workers, given.threads)
    failures = {ended.job.folder: ended.reason for ended in known if ended and ended.code}
    reproduction = Reproduction(table, jobs, failures)
    if given.format == "table":
        console = Console(width=None if sys.stdout.isatty() else 1000)  # in a file nothing is broken
        console.print(as_text(reproduction, given.scale, overrides))
    else:
        print(as_csv(reproduction) if given.format == "csv" else as_markdown(reproduction, given.scale, overrides))
    return 1 if failures and not given.show else 0


def check(jobs: Mapping[tuple[str, str, int], Job]) -> None:
    """Refuse settings that no experiment has before the first is run: each row and each column is looked at once.

    Raises:
        ConfigError: The message names row, column and what is wrong there.
    """
    looked_at: set[tuple[str, str]] = set()
    for (column, row, _), job in jobs.items():
        places = {("column", column), ("row", row)}
        if places <= looked_at or is_finished(job.folder):
            continue
        looked_at |= places
        fit = load("fl_lightning.cli.commands.fit")
        parser = fit.parser()
        try:
            with plainly(parser):
                parser.parse_args(fit.expand(job.words))
        except ConfigError as error:
            raise ConfigError(f"{row} / {column}: {error}") from error


def run_missing(wanted: Sequence[Job], out: Path, workers: int, threads: int | None) -> Iterator[JobResult]:
    """Carry out what has not come to its end, and tell of each as it does; what came of all of them."""
    missing = [job for job in wanted if not is_finished(job.folder)]
    _tell(f"{len(missing)} of {len(wanted)} runs are missing; they lie in {out}")
    with alone(out):
        for number, ended in enumerate(run_jobs(missing, FIT, workers, threads), start=1):
            how = f"failed: {ended.reason}" if ended.code else "done"
            _tell(f"{number} of {len(missing)}, {ended.job.folder.relative_to(out)}: {how}")
            yield ended


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
