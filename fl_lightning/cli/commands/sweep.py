"""`fl-lightning sweep`: run the trials of a W&B sweep file on this machine, without a server."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import optuna
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.study.executor import run_jobs
from fl_lightning.analysis.study.search import TRIALS, Budget, run_sweep
from fl_lightning.analysis.study.sweep_file import parse_sweep, sweep_path
from fl_lightning.analysis.study.sweep_results import TrialResult, sweep_table, write_best
from fl_lightning.cli.jobs import FIT, Words, in_job_processes, resolve_config
from fl_lightning.cli.sweep_metric import check_metric
from fl_lightning.core.config import read_config
from fl_lightning.core.console import SafeConsole
from fl_lightning.core.errors import check_number, check_positive
from fl_lightning.core.terminal import echo


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Start or resume a sweep, and print a table of its trials."""
    path = sweep_path(given.sweep or "")
    sweep = parse_sweep(read_config(path), path, given.set or [])
    check_positive("--", count=given.count, workers=given.workers, threads=given.threads)
    check_number("--seed", given.seed, "[0, inf)")
    folder = Path(given.out or Path("runs") / "sweeps" / sweep.name)
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def show(result: TrialResult, count: int) -> None:
        echo(f"trial {result.number + 1} of {count}, {result.describe_settings()}: {result.describe()}")

    if not (folder / TRIALS).exists():
        check_metric(sweep)
    run = partial(run_jobs, program=FIT, workers=given.workers, threads=given.threads)
    results = run_sweep(sweep, folder, run, given.seed, Budget(given.count), show)
    SafeConsole().print(sweep_table(sweep, results).rich(f"{sweep.name}: {len(results)} trials"))
    echo(f"sweep: {folder}")
    if not write_best(folder / "best.yaml", sweep, results, config_of):
        return 1
    echo(f"best: fl-lightning fit --config {folder / 'best.yaml'}")
    return 0


def config_of(words: Words) -> dict[str, Any]:
    """Return the resolved config of a trial's command line. It is resolved in a job process, which imports torch."""
    (config,) = in_job_processes(resolve_config, [words])
    return config
