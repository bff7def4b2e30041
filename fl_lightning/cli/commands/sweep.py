"""`fl-lightning sweep`: run the trials of a W&B sweep file on this machine, without a server."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import optuna
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from fl_lightning.analysis.executor import run_jobs
from fl_lightning.analysis.sweep import Budget, run_sweep
from fl_lightning.analysis.sweep_file import parse_sweep, sweep_path
from fl_lightning.analysis.sweep_folder import TRIALS, describe_sweep
from fl_lightning.analysis.sweep_results import TrialResult, sweep_table, write_best, write_trials
from fl_lightning.cli.jobs import FIT
from fl_lightning.cli.sweep_metric import check_metric
from fl_lightning.core.config import read_config
from fl_lightning.core.errors import check_number, check_positive
from fl_lightning.runs.folder import lock_run_dir


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Start or resume a sweep, and print a table of its trials."""
    path = sweep_path(given.sweep or "")
    sweep = parse_sweep(read_config(path), path, given.set or [])
    check_positive("--", count=given.count, workers=given.workers, threads=given.threads)
    check_number("--seed", given.seed, "[0, inf)")
    folder = Path(given.out or Path("runs") / "sweeps" / sweep.name)
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def show(result: TrialResult, count: int) -> None:
        settings = " ".join(f"{key}={value}" for key, value in result.settings.items())
        print(f"trial {result.number + 1} of {count}, {settings}: {result.describe()}", flush=True)

    if not (folder / TRIALS).exists():
        check_metric(sweep)
    with lock_run_dir(folder):
        describe_sweep(folder, sweep, given.seed)
        run = partial(run_jobs, program=FIT, workers=given.workers, threads=given.threads)
        results = run_sweep(sweep, folder, run, given.seed, Budget(given.count), show)
        write_trials(folder / "trials.csv", sweep, results)
        best = write_best(folder / "best.yaml", sweep, results)
    Console().print(sweep_table(sweep, results))
    print(f"sweep: {folder}")
    if not best:
        return 1
    print(f"best: fl-lightning fit --config {folder / 'best.yaml'}")
    return 0
