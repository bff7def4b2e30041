"""`fl-lightning benchmark`: tune each method with the same number of trials, and compare them with fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.study.benchmark import (
    RUNS,
    TUNING,
    UNTUNED,
    BenchmarkResult,
    Defaults,
    TunedEntry,
    entry_jobs,
    entry_sweep,
    read_results,
    tune,
)
from fl_lightning.analysis.study.benchmark_file import Benchmark, Entry, benchmark_path, parse_overrides, read_benchmark
from fl_lightning.analysis.study.benchmark_tables import as_csv, as_markdown, tables
from fl_lightning.analysis.study.checks import errors_at
from fl_lightning.analysis.study.executor import run_jobs
from fl_lightning.analysis.study.folder import folder_name, open_study
from fl_lightning.analysis.study.sweep_results import TrialResult
from fl_lightning.cli.jobs import FIT, Environment, Words, in_each, in_job_processes, open_experiment, run_missing
from fl_lightning.cli.sweep_metric import check_metric
from fl_lightning.core.errors import ConfigError, check_positive
from fl_lightning.core.files import write_atomically
from fl_lightning.core.terminal import echo
from fl_lightning.runs.reader import Run

RESULTS = ("results.md", "results.csv", "report.html")


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Run or continue a benchmark, and print its tables. Return 1 if a run failed.

    Finished trials and runs are not repeated. The result is also 1 if a method has no complete trial in a scenario.
    """
    check_positive("--", workers=given.workers, threads=given.threads)
    benchmark = read_benchmark(benchmark_path(given.benchmark))
    benchmark = replace(benchmark, overrides=parse_overrides(given.set or []))
    out = Path(given.out or Path("runs", "benchmarks", benchmark.name))
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    entries = list(benchmark.entries())
    defaults = read_defaults(entries, given.workers)
    check_entries([entry for entry in entries if not (out / TUNING / entry.folder).exists()], defaults)
    with open_study(out, {"study": "benchmark"}, files_of(benchmark)):
        tuned = [tune_entry(entry, defaults[entry.table.name, entry.method], out, given) for entry in entries]
        failed = run_all(tuned, out, given)
        result = read_results(benchmark, tuned, out)
        write_results(result, out, given.percent)
    print_results(result, given.format, given.percent)
    echo(f"benchmark: {out}", to_stderr=True)
    return 1 if failed or any(one.best is None for one in tuned) else 0


def files_of(benchmark: Benchmark) -> list[str]:
    """Return the names of the files and folders in the folder of a benchmark."""
    figures = [f"ranks-{folder_name(table.name)}.{kind}" for table in benchmark.tables for kind in ("pdf", "svg")]
    return [TUNING, RUNS, UNTUNED, *RESULTS, *figures]


# --- Before the first trial ---


def read_defaults(entries: Sequence[Entry], workers: int) -> dict[tuple[str, str], Defaults]:
    """Return each method's default search space and config values, by `(table name, method)`.

    Raises:
        ConfigError: A setting is wrong; the message names the table, the scenario and the method.
    """
    first: dict[tuple[str, str], Entry] = {}
    for entry in entries:
        first.setdefault((entry.table.name, entry.method), entry)
    found = in_each(defaults_of, [(entry.name, entry.tuning_words()) for entry in first.values()], workers)
    return {key: Defaults(*each) for key, each in zip(first, found, strict=True)}


def defaults_of(words: Words, environment: Environment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the defaults of a method: its search space, and all config values of its `fit` command line.

    Runs in a job process.
    """
    with open_experiment(words, environment) as (run, config):
        return run.algorithm.search_space, Run(Path(), config, []).settings


def check_entries(entries: Sequence[Entry], defaults: Mapping[tuple[str, str], Defaults]) -> None:
    """Check the search ranges and the metric of a benchmark, before any trial runs.

    Only as many entries are checked as are needed to include each scenario, and each method of each table.

    Raises:
        ConfigError: A trial could not run or would not have the metric.
    """
    checked: set[tuple[str, str]] = set()
    for entry in entries:
        places = {(entry.table.name, entry.method), ("scenario", entry.scenario)}
        if not places <= checked:
            checked |= places
            ranges = entry.ranges(defaults[entry.table.name, entry.method].search_space)
            with errors_at(entry.name):
                check_metric(entry_sweep(entry, ranges))


# --- Tuning and runs ---


def tune_entry(entry: Entry, defaults: Defaults, out: Path, given: Namespace) -> TunedEntry:
    """Tune one benchmark entry, which is a method in a scenario (a set of options).

    The trials that are missing are run, and each is reported on stderr as it ends.
    """
    of = "of at most" if entry.benchmark.tuning.processor_seconds < math.inf else "of"

    def show(result: TrialResult, most: int) -> None:
        trial = f"trial {result.number + 1} {of} {most}, {result.describe_settings()}"
        echo(f"{entry.name}: {trial}: {result.describe()}", to_stderr=True)

    run = partial(run_jobs, program=FIT, workers=given.workers, threads=given.threads)
    return tune(entry, defaults, out, run, is_allowed, show)


def is_allowed(words: Words) -> bool:
    """Return whether the experiment of a command line can be built without an error. Builds it in a job process."""
    try:
        list(in_job_processes(defaults_of, [words]))
    except (ConfigError, BrokenProcessPool):
        return False
    return True


def run_all(tuned: Sequence[TunedEntry], out: Path, given: Namespace) -> bool:
    """Execute all unfinished runs of a benchmark. Return True if a run failed.

    The runs use the tuned values. If the benchmark sets `untuned`, further runs use the values of the configs.
    """
    jobs = [job for one in tuned for job in one.jobs(out).values()]
    if tuned[0].entry.benchmark.untuned:
        jobs += [job for one in tuned for job in entry_jobs(one.entry, out, UNTUNED).values()]
    return bool(run_missing(jobs, out, given.workers, given.threads))


# --- Results ---


def write_results(result: BenchmarkResult, out: Path, percent: bool) -> None:
    """Write the tables as Markdown and CSV, figures of the ranks, and an HTML report to the benchmark's folder."""
    from fl_lightning.analysis.html_report.report import Section, write_report
    from fl_lightning.analysis.rank_figure import rank_figure  # imports matplotlib

    markdown, csv, report = (out / name for name in RESULTS)
    write_atomically(markdown, as_markdown(result, percent))
    write_atomically(csv, as_csv(result))
    sections = []
    for (title, parts), table in zip(tables(result, percent), result.benchmark.tables, strict=True):
        before = result.ranks(table.name, untuned=True) if result.benchmark.untuned else None
        figure, path = rank_figure(result.ranks(table.name), before), out / f"ranks-{folder_name(table.name)}.pdf"
        figure.savefig(path)
        figure.savefig(path.with_suffix(".svg"))
        sections.append(Section(title, parts, [path.with_suffix(".svg").read_bytes()]))
    if runs := result.runs:
        write_report(runs, report, sections)


def print_results(result: BenchmarkResult, form: str, percent: bool) -> None:
    """Print the tables of a benchmark in a format: `table`, `csv`, `latex` or `markdown`."""
    if form == "csv":
        echo(as_csv(result), end="")
        return
    for title, parts in tables(result, percent):
        echo(f"% {title}" if form == "latex" else title, end="\n\n")
        for part in parts:
            writers = {"table": part.plain, "latex": part.latex, "markdown": part.markdown}
            echo(writers[form](), end="\n\n")
