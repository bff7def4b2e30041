"""Tune each method of a benchmark with the same number of trials, run it with fresh seeds, and read its results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from scipy.stats import rankdata

from fl_lightning.analysis.run_groups import transferred_bytes
from fl_lightning.analysis.statistics import Difference, Spread, paired_difference
from fl_lightning.analysis.study.benchmark_file import Benchmark, Entry, Settings, Tuning
from fl_lightning.analysis.study.executor import Job, RunJobs
from fl_lightning.analysis.study.folder import run_folder
from fl_lightning.analysis.study.results import SeedRuns, read_runs
from fl_lightning.analysis.study.search import Budget, run_sweep
from fl_lightning.analysis.study.sweep_file import Parameter, Sweep, parse_sweep
from fl_lightning.analysis.study.sweep_results import TrialResult, best_trial, used_seconds
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.summary import best_and_last, sum_of
from fl_lightning.runs.folder import subfolder
from fl_lightning.runs.reader import Run

TUNING, RUNS, UNTUNED = "tuning", "runs", "untuned"
"""Folders of a benchmark: the trials, the runs with tuned values, and those with the values of the configs."""
MOVED = "moved"
"""Folder of the second half of an entry's trials, if ranges were moved."""
EDGE = 0.1
"""Share of a range at each end that counts as its edge; of the logarithm of a logarithmic range."""


class Defaults(NamedTuple):
    """The search ranges and the default values of a method's options.

    Args:
        search_space: The ranges of the class, by option.
        settings: The values that the configs give, by key.
    """

    search_space: Settings
    settings: Settings


@dataclass(frozen=True)
class TunedEntry:
    """A benchmark entry (a method in a scenario) with the results of its tuning trials.

    Args:
        entry: The entry.
        trials: The results of all trials.
        edges: The tuned keys whose best value is at the edge of its range.
    """

    entry: Entry
    trials: Sequence[TrialResult]
    edges: Sequence[str] = ()

    @cached_property
    def best(self) -> TrialResult | None:
        """The best complete trial; None if no trial is complete."""
        return best_trial(self.trials, self.entry.table.maximize)

    def jobs(self, out: Path) -> dict[int, Job]:
        """Return the jobs that train with the best trial's values, by seed; empty if no trial is complete.

        Args:
            out: The folder of the benchmark.
        """
        if self.best is None:
            return {}
        return entry_jobs(self.entry, out, RUNS, [f"--{key}={value}" for key, value in self.best.settings.items()])


def entry_jobs(entry: Entry, out: Path, kind: str, values: Sequence[str] = ()) -> dict[int, Job]:
    """Return the jobs that run a benchmark entry (a method in a scenario), by seed.

    Args:
        entry: The entry.
        out: The folder of the benchmark.
        kind: The folder in it of the runs of all entries: `RUNS` or `UNTUNED`.
        values: Words of the command line with tuned values.
    """
    words = (*entry.words(), *values)
    return {
        seed: Job(run_folder(out, Path(kind, entry.folder), seed, words), (*words, f"--seed={seed}"))
        for seed in entry.benchmark.seeds
    }


# --- Tuning ----------------------------------------------------------------------------------------------------------


def entry_sweep(entry: Entry, ranges: Settings, defaults: Defaults | None = None) -> Sweep:
    """Return the sweep that tunes a benchmark entry (a method in a scenario) over ranges of its options.

    Args:
        entry: The entry.
        ranges: The ranges by key.
        defaults: If given, the first trial has these values.

    Raises:
        ConfigError: A range is invalid; the message names the method and the key.
    """
    tuning, table = entry.benchmark.tuning, entry.table
    content: dict[str, Any] = {
        "program": "fl-lightning",
        "command": ["${program}", "fit", *entry.tuning_words(), "${args}"],
        "method": "bayes",
        "metric": {"name": table.metric, "goal": "maximize" if table.maximize else "minimize"},
        "parameters": dict(ranges),
        "seeds": list(tuning.seeds),
    }
    if tuning.early_terminate:
        content["early_terminate"] = dict(tuning.early_terminate)
    sweep = parse_sweep(content, Path(entry.name))
    if defaults is None:
        return sweep
    values = {key: start_value(each, defaults.settings.get(key)) for key, each in sweep.parameters.items()}
    return replace(sweep, start=values)


def start_value(parameter: Parameter, default: Any) -> Any:
    """Return an option's value in the first trial: its default, clipped to the search range.

    Without a usable default it is the middle of the range or, if the option has a list of values, the first value.

    Args:
        parameter: The range.
        default: The default; None, or a value of another type, if the configs set none.
    """
    search = parameter.distribution
    if isinstance(search, CategoricalDistribution):
        equal = (choice for choice in search.choices if choice == default or parameter.words[choice] == str(default))
        return next(equal, search.choices[0])
    assert isinstance(search, FloatDistribution | IntDistribution)
    low, high = search.low, search.high
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    middle = math.sqrt(low * high) if search.log else (low + high) / 2
    value = min(max(default if is_number else middle, low), high)
    return round(value) if isinstance(search, IntDistribution) else parameter.rounded(float(value))


def tune(
    entry: Entry,
    defaults: Defaults,
    out: Path,
    run: RunJobs,
    allows: Callable[[Sequence[str]], bool] = lambda words: True,
    show: Callable[[TrialResult, int], None] = lambda result, most: None,
) -> TunedEntry:
    """Run the missing trials of a method in one scenario, and return the results of all its trials.

    The first trial has the values of the configs, the others those that Optuna proposes. If after half of the budget
    the best value of a logarithmic range is at its edge, the range is moved by half its length for the other half, so
    that this edge is in the middle. The budget stays the same, so that no method gets more of it.

    Args:
        entry: The entry.
        defaults: The ranges and default values of its method.
        out: The folder of the benchmark.
        run: Runs the trials.
        allows: Whether a command line is valid. A range is not moved to values that the method refuses.
        show: Called when a trial ends, with its result and the number of all trials.

    Raises:
        ConfigError: A range or the first trial is wrong.
        Interrupted: SIGINT or SIGTERM was received.
    """
    tuning, folder = entry.benchmark.tuning, Path(TUNING, entry.folder)
    trials, seconds = tuning.trials, tuning.processor_seconds
    ranges = entry.ranges(defaults.search_space)
    if not ranges:
        raise ConfigError(f"{entry.name}: nothing to tune. Give search: a range, such as that of optimizer.lr")

    def search(
        place: Path, ranges: Settings, budget: Budget, start: Defaults | None = None, earlier: int = 0
    ) -> tuple[Sweep, list[TrialResult]]:
        def show_of_all(result: TrialResult, _: int) -> None:
            show(replace(result, number=earlier + result.number), trials)

        sweep = entry_sweep(entry, ranges, start)
        return sweep, run_sweep(sweep, subfolder(out, place), run, tuning.seeds[0], budget, show_of_all)

    sweep, results = search(folder, ranges, Budget(-(-trials // 2), seconds / 2), defaults)
    best = best_trial(first_half(results, tuning), entry.table.maximize)
    moved = moved_ranges(entry, ranges, edge_keys(sweep, best), best, allows) if best else {}
    if moved:
        left = Budget(trials - len(results), seconds - used_seconds(results))
        second, others = search(folder / MOVED, ranges | moved, left, earlier=len(results))
        results = [*results, *others]
        sweep = second if best_trial(results, entry.table.maximize) in others else sweep
    else:
        sweep, results = search(folder, ranges, Budget(trials, seconds), defaults)
    return TunedEntry(entry, results, list(edge_keys(sweep, best_trial(results, entry.table.maximize))))


def first_half(results: Sequence[TrialResult], tuning: Tuning) -> list[TrialResult]:
    """Return the trials that began before half of the allowed trials or half of the allowed processor time was used."""
    used = accumulate((result.processor_seconds for result in results), initial=0.0)
    return [
        result
        for result, before in zip(results, used, strict=False)
        if result.number < tuning.trials / 2 and before < tuning.processor_seconds / 2
    ]


def edge_keys(sweep: Sweep, best: TrialResult | None) -> dict[str, bool]:
    """Find the options whose best value is near an end of their search range.

    Returns:
        For each such option, whether the value is near the upper end.
    """
    if best is None:
        return {}
    found: dict[str, bool] = {}
    for key, parameter in sweep.parameters.items():
        numbers = parameter.distribution
        if isinstance(numbers, FloatDistribution | IntDistribution) and numbers.low < numbers.high:
            scale: Callable[[float], float] = math.log if numbers.log else float
            value, low, high = map(scale, (float(best.settings[key]), numbers.low, numbers.high))
            place = (value - low) / (high - low)
            if not EDGE < place < 1 - EDGE:
                found[key] = place > 0.5
    return found


def moved_ranges(
    entry: Entry,
    ranges: Settings,
    edges: Mapping[str, bool],
    best: TrialResult,
    allows: Callable[[Sequence[str]], bool],
) -> dict[str, Any]:
    """Return new search ranges for the options whose best value is near an end of a logarithmic range.

    A new range is centred on that end. Ranges of other types stay as they are, because they contain all possible
    values: a fraction, or a list of choices. A range also stays if `allows` refuses the new values.
    """
    found = {}
    for key, upwards in edges.items():
        if ranges[key].get("distribution") == "log_uniform_values":
            low, high = ranges[key]["min"], ranges[key]["max"]
            factor = math.sqrt(high / low) if upwards else math.sqrt(low / high)
            new = {"distribution": "log_uniform_values", "min": low * factor, "max": high * factor}
            values = {**best.settings, key: str(new["max" if upwards else "min"])}
            if allows((*entry.tuning_words(), *(f"--{name}={value}" for name, value in values.items()))):
                found[key] = new
    return found


# --- Results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EntryResult:
    """The results of a benchmark entry (a method in a scenario), run with seeds that the tuning did not use.

    Args:
        tuned: The entry with its trials.
        runs: The runs with the tuned values.
        untuned: The runs with the values of the configs.
    """

    tuned: TunedEntry
    runs: SeedRuns
    untuned: SeedRuns

    @property
    def entry(self) -> Entry:
        """The benchmark entry: a method in a scenario, with the metric that it is tuned for."""
        return self.tuned.entry

    @property
    def failures(self) -> list[str]:
        """The reasons of failed runs."""
        both = {"tuned": self.runs, "untuned": self.untuned}
        return [f"{kind}, seed {seed}: {why}" for kind, runs in both.items() for seed, why in runs.failures.items()]

    def _reader(self, what: str) -> Callable[[Run], float | None]:
        table = self.entry.table
        return lambda run: (best_and_last(run.rounds, table.metric, not table.maximize) or {}).get(what)

    def values(self, what: str = "last", untuned: bool = False) -> dict[int | None, float]:
        """Return the metric of each seed: the `last` or the `best` value, or the mean of the last ten (`last10`)."""
        return (self.untuned if untuned else self.runs).values(self._reader(what))

    def spread(self, what: str = "last", untuned: bool = False) -> Spread | None:
        """Return the metric's mean and standard deviation over the seeds; None without a finished run."""
        return (self.untuned if untuned else self.runs).spread(self._reader(what))

    def difference(self, reference: EntryResult) -> Difference | None:
        """Return statistics of the metric's difference from another result, paired by seed; None without pairs."""
        ours, theirs = self.values(), reference.values()
        seeds = [seed for seed in ours if seed in theirs]
        return paired_difference([ours[seed] for seed in seeds], [theirs[seed] for seed in seeds])

    @cached_property
    def bytes(self) -> float | None:
        """Mean communication cost of a run in bytes, uploads plus downloads; None without a finished run."""
        return self._mean(lambda run: transferred_bytes(run.rounds))

    @cached_property
    def seconds(self) -> float | None:
        """Mean duration of a run in seconds, summed over its rounds; None without a finished run."""
        return self._mean(lambda run: sum_of(run.rounds, "time/round_s"))

    @cached_property
    def processor_seconds(self) -> float | None:
        """Mean processor time of a run in seconds, summed over its rounds; None without a finished run."""
        return self._mean(lambda run: sum_of(run.rounds, "time/processor_s"))

    def _mean(self, read: Callable[[Run], float | None]) -> float | None:
        figures = self.runs.spread(read)
        return figures and figures.mean


class BenchmarkResult:
    """The results of a benchmark: one for each combination of table, scenario and method.

    Args:
        benchmark: The benchmark.
        results: The results of all entries.
    """

    def __init__(self, benchmark: Benchmark, results: Sequence[EntryResult]) -> None:
        self.benchmark = benchmark
        self._results = {(r.entry.table.name, r.entry.scenario, r.entry.method): r for r in results}

    def result(self, table: str, scenario: str, method: str) -> EntryResult:
        """Return the results for a combination of table, scenario and method."""
        return self._results[table, scenario, method]

    def of_table(self, table: str) -> list[EntryResult]:
        """Return a list of a table's results, one for each scenario and method."""
        return [result for (name, *_), result in self._results.items() if name == table]

    @property
    def runs(self) -> list[Run]:
        """The finished runs in which the methods use their tuned values. Tuning trials are not included."""
        return [run for result in self._results.values() for run in result.runs.runs.values()]

    def ranks(self, table: str, untuned: bool = False) -> dict[str, list[float]]:
        """Return each method's ranks in a table: one rank per scenario, by mean result, 1 for the best.

        Methods with equal results share the mean of their ranks. A method without a result has the last rank.

        Args:
            table: Name of the table.
            untuned: Rank the runs with the values of the configs instead of those with tuned values.
        """
        of_table = next(one for one in self.benchmark.tables if one.name == table)

        def loss(scenario: str, method: str) -> float:
            figures = self.result(table, scenario, method).spread(untuned=untuned)
            if figures is None or math.isnan(figures.mean):
                return math.inf
            return -figures.mean if of_table.maximize else figures.mean

        ranks = [
            rankdata([loss(scenario, method) for method in of_table.methods]).tolist()
            for scenario in self.benchmark.scenarios
        ]
        return dict(zip(of_table.methods, map(list, zip(*ranks, strict=True)), strict=True))


def read_results(benchmark: Benchmark, tuned: Sequence[TunedEntry], out: Path) -> BenchmarkResult:
    """Read the finished runs of a benchmark from its folder."""
    results = []
    for one in tuned:
        untuned = entry_jobs(one.entry, out, UNTUNED) if benchmark.untuned else {}
        results.append(EntryResult(one, read_runs(one.jobs(out)), read_runs(untuned)))
    return BenchmarkResult(benchmark, results)
