"""Groups of runs that differ only in the seed: their statistics, names, and differences from a reference group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fl_lightning.analysis.run_settings import (
    compared_values,
    format_setting,
    parent_values,
    sort_key,
    varied_settings,
)
from fl_lightning.analysis.statistics import Difference, Spread, paired_difference, percent, spread
from fl_lightning.core.config import is_below
from fl_lightning.core.names import join_names
from fl_lightning.evaluation.summary import EPSILON, Row, best_and_last, rounds_to
from fl_lightning.runs.reader import Run
from fl_lightning.runs.styles import Style, method_styles


class Reach(NamedTuple):
    """Mean number of rounds, bytes and seconds until the runs of a group reached a target value of the metric.

    Runs that did not reach the target are left out.

    Args:
        rounds: The first evaluated round with the target value.
        bytes: Communication cost until that round, up and down.
        seconds: Time until the end of that round.
        reached: Number of runs that reached the target.
        of: Number of runs that have the metric.
    """

    rounds: Spread | None
    bytes: Spread | None
    seconds: Spread | None
    reached: int
    of: int


@dataclass(frozen=True)
class Group:
    """A group of runs with equal values of the compared settings, and statistics of the runs' results.

    Args:
        values: The values of the keys that the runs have.
        names: The values as text, by column; a class is followed by the arguments that vary.
        runs: The runs.
        last: The metric in the last evaluated round; None if no run has the metric.
        best: The metric in its best round.
        bytes: Communication cost, up and down; None if it was not recorded.
        reach: When each target was reached, by target.
        epsilons: The largest of each epsilon that the rounds of a run have cost, by column of `metrics.csv`.
        reference: Whether other groups are compared with this one.
        difference: The difference from the group's reference; None without a reference or without a common seed.
    """

    values: dict[str, Any]
    names: dict[str, str]
    runs: list[Run]
    last: Spread | None
    best: Spread | None
    bytes: Spread | None
    reach: dict[float, Reach]
    epsilons: dict[str, float]
    reference: bool = False
    difference: Difference | None = None

    @property
    def seeds(self) -> list[Any]:
        """The distinct seeds of the group's runs."""
        return seeds_of(self.runs)

    def name_among(self, groups: Sequence[Group]) -> str:
        """Return the group's name: the value of its first setting or, if not unique among `groups`, of all settings."""
        first, *_ = names = list(self.names.values()) or ["all runs"]
        unique = sum(list(group.names.values())[:1] == [first] for group in groups) <= 1
        return first if unique else " ".join(filter(None, names))

    def in_percent(self) -> Group:
        """Return a copy of the group in which metric values are in percent, and differences in percentage points."""
        last, best, difference = percent(self.last), percent(self.best), percent(self.difference)
        return replace(self, last=last, best=best, difference=difference)


class Grouping(NamedTuple):
    """How runs are grouped and compared: the settings to group by, and the metric with its direction and targets.

    Args:
        keys: The settings by which runs are grouped.
        varied: The settings in which runs differ, see `varied_settings`.
        texts: The compared settings of each run, as text.
        metric: The metric.
        lower: Whether lower values of it are better.
        targets: Values of it for which to report when they were reached.
        across: The setting whose values become columns or panels; empty if there is none.
    """

    keys: list[str]
    varied: dict[str, set[Any]]
    texts: dict[Run, dict[str, str]]
    metric: str
    lower: bool
    targets: Sequence[float]
    across: str = ""

    def varied_within(self, runs: Iterable[Run]) -> list[str]:
        """Return the keys of the settings in which the given runs differ."""
        return [*varied_settings({run: self.texts[run] for run in runs})]


def build_group(runs: list[Run], grouping: Grouping) -> Group:
    """Return a group of runs with its statistics. All runs have the same values of the compared settings."""
    keys, settings = grouping.keys, compared_values(runs[0])
    figures = list(filter(None, (best_and_last(run.rounds, grouping.metric, grouping.lower) for run in runs)))
    return Group(
        {key: settings[key] for key in keys if key in settings},
        {key: _name(key, runs[0], grouping) for key in column_keys(keys, grouping.across)},
        runs,
        spread(figure["last"] for figure in figures),
        spread(figure["best"] for figure in figures),
        spread(count for count in (transferred_bytes(run.rounds) for run in runs) if count is not None),
        {target: _reach(runs, target, grouping, len(figures)) for target in grouping.targets},
        largest_epsilons(run.rounds for run in runs),
    )


def _reach(runs: list[Run], target: float, grouping: Grouping, of: int) -> Reach:
    rounds = [(run.rounds, rounds_to(run.rounds, target, grouping.metric, grouping.lower)) for run in runs]
    until = [rows[:number] for rows, number in rounds if number is not None]
    times = [[row["time/round_s"] for row in rows] for rows in until if all("time/round_s" in row for row in rows)]
    transferred = spread(count for count in map(transferred_bytes, until) if count is not None)
    return Reach(spread(map(len, until)), transferred, spread(map(sum, times)), len(until), of)


def transferred_bytes(rows: Sequence[Row]) -> float | None:
    """Return the communication cost of some rounds in bytes, uploads plus downloads; None if it was not recorded."""
    counted = [row[name] for row in rows for name in ("comm/up_bytes", "comm/down_bytes") if name in row]
    return sum(counted) if counted else None


def largest_epsilons(runs: Iterable[Sequence[Row]]) -> dict[str, float]:
    """Return the largest of each epsilon in the last rounds of some runs, by column; empty without private runs."""
    found: dict[str, float] = {}
    for name, value in (item for rows in runs for row in rows[-1:] for item in row.items()):
        if EPSILON.fullmatch(name):
            found[name] = max(value, found.get(name, 0.0))
    return found


def reference_difference(group: Group, base: Group | None, grouping: Grouping) -> Difference | None:
    """Return statistics of the difference in the metric's last value between a group and its reference group `base`.

    Runs are paired by their seed, and by the settings that vary inside one of the two groups.
    """
    if base is None or base is group:
        return None
    keys, texts = grouping.keys, grouping.texts
    varied = dict.fromkeys([*grouping.varied_within(group.runs), *grouping.varied_within(base.runs)])
    inner = [key for key in varied if key not in keys and not is_below(key, keys)]

    def last_values(runs: list[Run]) -> dict[Any, float]:
        """Return a dict with the metric's last value for each seed and combination of the settings that vary.

        Runs with the same seed and settings are averaged.
        """
        values: dict[Any, list[float]] = defaultdict(list)
        for run in runs:
            if figures := best_and_last(run.rounds, grouping.metric):
                pair = repr(run.settings.get("seed")), *(texts[run].get(key) for key in inner)
                values[pair].append(figures["last"])
        return {pair: float(np.mean(each)) for pair, each in values.items()}

    ours, theirs = last_values(group.runs), last_values(base.runs)
    pairs = [pair for pair in ours if pair in theirs]
    return paired_difference([ours[pair] for pair in pairs], [theirs[pair] for pair in pairs])


# --- Names ---


def column_keys(keys: Sequence[str], across: str) -> list[str]:
    """Return the keys that get their own table column. The column of `algorithm` also shows values of `algorithm.mu`.

    `across` always has a column.
    """
    return [key for key in keys if key == across or not is_below(key, keys)]


def _name(key: str, run: Run, grouping: Grouping) -> str:
    """Return a setting's value as a name, followed by its nested settings that vary: `FedSKC tau=0.1`."""
    settings, texts, varied = compared_values(run), grouping.texts[run], grouping.varied
    inner = [
        f"{each.removeprefix(f'{key}.')}={format_setting(settings[each])}"
        for each in grouping.keys
        if is_below(each, [key]) and each in settings and parent_values(each, texts) in varied.get(each, ())
        if each != grouping.across
    ]
    value = format_setting(settings[key]) if key in settings else ""
    return " ".join([_method_name(value, grouping) if key == "algorithm" else value, *inner]).strip()


def _method_name(path: str, grouping: Grouping) -> str:
    """Return the class name of a federated method from its import path; the path if two have the same name."""
    name = path.rpartition(".")[2]
    paths = {str(run.settings.get("algorithm")) for run in grouping.texts}
    return name if [each.rpartition(".")[2] for each in paths].count(name) == 1 else path


def setting_label(key: str, value: str) -> str:
    """Return the label of a setting in figures: `mu=0.1`, or `no mu` for runs without this setting (empty value)."""
    end = key.rpartition(".")[2]
    return f"{end}={value}" if value else f"no {end}"


def group_labels(groups: Sequence[Group]) -> list[str]:
    """Return the label of each group: its method, and the settings that vary among the groups of this method."""

    def label(group: Group) -> str:
        same_method = [other for other in groups if other.names.get("algorithm") == group.names.get("algorithm")]
        names = [
            value if key == "algorithm" else setting_label(key, value)
            for key, value in group.names.items()
            if key == "algorithm" or len({other.names.get(key) for other in same_method}) > 1
        ]
        return " ".join(names) or str(group.runs[0].settings.get("algorithm", "all runs"))

    return [label(group) for group in groups]


def group_styles(groups: Iterable[tuple[str, Sequence[Run]]]) -> list[Style]:
    """Return the style of each group of runs in figures, given their labels and runs. A method has one colour."""
    names = []
    for label, runs in groups:
        methods = {str(run.settings.get("algorithm", label)).rpartition(".")[2] for run in runs}
        method = methods.pop() if len(methods) == 1 else ""
        names.append((method, label.removeprefix(method)))
    return method_styles(names)


def names_of(named: Iterable[Group], groups: Sequence[Group]) -> str:
    """Return the names of some groups, separated by commas. Each name is unique among all `groups`.

    A name is the value of the first setting or, if that is not unique among `groups`, of all settings.
    """
    return join_names(group.name_among(groups) for group in named)


def seeds_of(runs: Iterable[Run]) -> list[Any]:
    """Return the distinct seeds of some runs, sorted."""
    seeds = {repr(seed): seed for seed in (run.settings.get("seed") for run in runs)}
    return sorted(seeds.values(), key=sort_key)
