"""The results of a sweep's trials: rank the settings, and write them as a table, a CSV file and a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import yaml

from fl_lightning.analysis.result_table import ResultTable, mean_and_std, to_csv
from fl_lightning.analysis.statistics import spread
from fl_lightning.analysis.study.sweep_file import Sweep
from fl_lightning.core.errors import one_line
from fl_lightning.core.files import write_atomically


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial of a sweep: its parameters, state and metric.

    Args:
        number: The trial's number, in the order in which trials were proposed.
        folder: The folder of its run, or of its runs if the sweep has seeds.
        settings: The values of its parameters, as written on the command line.
        state: One of `complete`, `ended early`, `failed`, `unfinished`.
        value: The metric, a mean over the sweep's seeds if it has some; for a trial that ended early, its last value.
            None for other states.
        rounds: Number of rounds that were run; for a trial that ended early, the round whose value decided.
        reason: Why the trial failed or is unfinished.
        values: The metric with each of the sweep's seeds, or that of the only run; empty unless the trial is complete.
        processor_seconds: Processor time of its rounds, over all of its runs.
    """

    number: int
    folder: Path
    settings: Mapping[str, str]
    state: str
    value: float | None
    rounds: int
    reason: str
    values: Sequence[float] = ()
    processor_seconds: float = 0.0

    def describe_settings(self) -> str:
        """Return the trial's parameters as text: `KEY=VALUE KEY=VALUE`."""
        return " ".join(f"{key}={value}" for key, value in self.settings.items())

    def describe(self) -> str:
        """Return the trial's result as text: its value if it is complete, else its state with the reason."""
        if self.state == "complete":
            return f"{self.value:.4f}"
        if self.state == "ended early":
            return f"ended early after round {self.rounds}" + ("" if self.value is None else f", at {self.value:.4f}")
        return f"{self.state}: {self.reason}" if self.reason else self.state


def used_seconds(results: Sequence[TrialResult]) -> float:
    """Return the processor time of some trials in seconds."""
    return sum(result.processor_seconds for result in results)


class Setting(NamedTuple):
    """One combination of parameter values in a sweep, with its trials, which differ only in the seed.

    Args:
        settings: The settings without the seed.
        results: The results of the trials.
    """

    settings: Mapping[str, str]
    results: Sequence[TrialResult]

    @property
    def values(self) -> list[float]:
        """The values of the sweep's metric in the setting's complete trials, one per seed."""
        return [value for result in self.results if result.state == "complete" for value in result.values]


def rank_settings(results: Sequence[TrialResult], maximize: bool) -> list[Setting]:
    """Group trials that differ only in the seed, and sort the groups by mean metric: best first, incomplete last."""
    groups: dict[tuple[tuple[str, str], ...], list[TrialResult]] = {}
    for result in results:
        groups.setdefault(tuple((k, v) for k, v in result.settings.items() if k != "seed"), []).append(result)

    def key(setting: Setting) -> tuple[float, float]:
        if not setting.values:
            return 2, 0
        incomplete = any(result.state != "complete" for result in setting.results)
        return incomplete, mean(setting.values) * (-1 if maximize else 1)

    return sorted((Setting(dict(settings), group) for settings, group in groups.items()), key=key)


def sweep_table(sweep: Sweep, results: Sequence[TrialResult]) -> ResultTable:
    """Return the results of a sweep as a table: a row for each combination of parameter values, best mean metric first.

    If trials are incomplete, a column describes them.
    """
    keys = [key for key in sweep.parameters if key != "seed"]
    by_seed, incomplete = "seed" in sweep.parameters, any(result.state != "complete" for result in results)
    has_seeds = by_seed or bool(sweep.seeds)
    header = [*keys, sweep.metric, *(["seeds"] if has_seeds else []), *(["incomplete"] if incomplete else [])]
    rows = []
    for setting in rank_settings(results, sweep.maximize):
        metric = spread(setting.values)
        cells = [setting.settings[key] for key in keys]
        cells.append(mean_and_std(metric.mean, metric.std, ".4f") if metric else "")
        if has_seeds:
            cells.append(f"{len(setting.values)} of {len(setting.results) * max(1, len(sweep.seeds))}")
        if incomplete:
            cells.append(_describe_incomplete(setting.results, by_seed))
        rows.append(cells)
    return ResultTable(header, rows)


def _describe_incomplete(results: Sequence[TrialResult], by_seed: bool) -> str:
    """Return a text about the trials of a setting that are not complete, with their seeds if trials differ in these."""
    incomplete = (result for result in results if result.state != "complete")
    return "; ".join((f"seed {one.settings['seed']} " if by_seed else "") + one.describe() for one in incomplete)


def best_trial(results: Sequence[TrialResult], maximize: bool) -> TrialResult | None:
    """Return the first complete trial of the best setting; None if that setting has none."""
    ranked = rank_settings(results, maximize)
    return next((result for result in ranked[0].results if result.state == "complete"), None) if ranked else None


def write_best(
    path: Path, sweep: Sweep, results: Sequence[TrialResult], resolve: Callable[[Sequence[str]], Mapping[str, Any]]
) -> TrialResult | None:
    """Write the config of a sweep's best trial to a file. Return this trial; None if no trial is complete.

    The config is that of the trial's command line, because anyone could have written the trial's folder.

    Args:
        path: The file.
        sweep: The sweep.
        results: The results of all trials.
        resolve: Returns the config of a command line of `fit`.
    """
    if not (best := best_trial(results, sweep.maximize)):
        return None
    seeds = f", mean over the seeds {', '.join(map(str, sweep.seeds))}" if sweep.seeds else ""
    config = resolve(sweep.command_with(best.settings, next(iter(sweep.seeds), None)))
    title = one_line(f"The best of the sweep {sweep.name}: {best.describe_settings()}{seeds}.")
    write_atomically(path, f"# {title}\n{yaml.safe_dump(dict(config), sort_keys=False)}")
    return best


def write_trials(path: Path, sweep: Sweep, results: Sequence[TrialResult]) -> None:
    """Write the parameters and results of all trials to a CSV file, one line per trial."""
    by_seed = [f"{sweep.metric} seed {seed}" for seed in sweep.seeds]
    header = ["trial", *sweep.parameters, sweep.metric, *by_seed, "state", "rounds", "reason", "folder"]
    lines: list[list[Any]] = [header]
    for one in results:
        values = one.values if one.values and by_seed else [""] * len(by_seed)
        end = [one.state, one.rounds, one.reason, one.folder.relative_to(path.parent)]
        lines.append([one.number, *one.settings.values(), one.value, *values, *end])
    write_atomically(path, to_csv(lines))
