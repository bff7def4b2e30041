"""`fl-lightning sweep`: carry a W&B sweep file out here, without a server."""

from __future__ import annotations

from pathlib import Path

import optuna
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from fl_lightning.analysis.study.sweep import (
    POINTS,
    Result,
    carry_out_sweep,
    hold_to,
    sweep_table,
    told,
    write_best,
    write_trials,
)
from fl_lightning.analysis.study.sweep_file import parse_sweep, read_sweep, sweep_path
from fl_lightning.analysis.study.sweep_metric import check_metric
from fl_lightning.core.errors import check_number, check_positive
from fl_lightning.runs.folder import alone


def parser() -> ArgumentParser:
    """A sweep file, and how to carry it out."""
    parser = ArgumentParser(exit_on_error=False, allow_abbrev=False)
    parser.add_argument("sweep", type=str, nargs="?", help="A W&B sweep file, or the name of a shipped one.")
    parser.add_argument("--workers", type=int, default=1, help="How many points run at a time.")
    threads = "Torch's threads in each; by default the cores there are, shared out among the workers."
    parser.add_argument("--threads", type=int | None, help=threads)
    parser.add_argument("--count", type=int | None, help="How many points in all; random and bayes need it.")
    parser.add_argument("--out", type=str | None, help="The sweep's folder; runs/sweeps/NAME by default.")
    parser.add_argument("--seed", type=int, default=0, help="What random and bayes derive their points from.")
    parser.add_argument("--set", type=str, action="append", metavar="KEY=VALUE", help="Set a key in every point.")
    return parser


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Carry a sweep out, or go on with it, and print the table it ends with."""
    path = sweep_path(given.sweep or "")
    content = read_sweep(path)
    sweep = parse_sweep(content, path, given.set or [])
    check_positive("--", count=given.count, workers=given.workers, threads=given.threads)
    check_number("--seed", given.seed, "[0, inf)")
    folder = Path(given.out or Path("runs") / "sweeps" / sweep.name)
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def show(result: Result, most: int) -> None:
        settings = " ".join(f"{key}={value}" for key, value in result.settings.items())
        print(f"point {result.number + 1} of {most}, {settings}: {told(result)}", flush=True)

    if not (folder / POINTS).exists():
        check_metric(sweep)
    with alone(folder):
        hold_to(folder, sweep, content, given.seed)
        results = carry_out_sweep(sweep, folder, given.seed, given.count, given.workers, given.threads, show)
        write_trials(folder / "trials.csv", sweep, results)
        best = write_best(folder / "best.yaml", sweep, results)
    Console().print(sweep_table(sweep, results))
    print(f"sweep: {folder}")
    if not best:
        return 1
    print(f"best: fl-lightning fit --config {folder / 'best.yaml'}")
    return 0
