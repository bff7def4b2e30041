"""Compare runs: group them by settings, and test whether groups differ significantly from a reference group."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fl_lightning.analysis.statistics import Difference, Spread, add_holm, paired_difference, percent, spread
from fl_lightning.core.config import FREE_KEYS, is_below
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.names import join_names
from fl_lightning.evaluation.summary import Row, best_and_last, is_lower_better, rounds_to
from fl_lightning.runs.reader import Run, known_metric
from fl_lightning.runs.search import has_value, known_key

DEFAULT_METRICS = ("global/acc", "client/acc_mean", "global/mae", "client/mae_mean")
"""Metrics that are compared by default. Regression has the error `mae` in place of the accuracy `acc`."""

UNCOMPARED = FREE_KEYS | {"seed", "evaluation.target_accuracies"}
"""Settings that are ignored when runs are grouped."""


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
    reference: bool = False
    difference: Difference | None = None

    @property
    def seeds(self) -> list[Any]:
        """The distinct seeds of the group's runs."""
        return _seeds(self.runs)

    def name_among(self, groups: Sequence[Group]) -> str:
        """Return the group's name: the value of its first setting or, if that is not unique, of all settings."""
        first, *_ = names = list(self.names.values()) or ["all runs"]
        unique = sum(list(group.names.values())[:1] == [first] for group in groups) <= 1
        return first if unique else " ".join(filter(None, names))

    def in_percent(self) -> Group:
        """Return a copy of the group with its metric, and the difference from the reference group, in percent."""
        last, best, difference = percent(self.last), percent(self.best), percent(self.difference)
        return replace(self, last=last, best=best, difference=difference)


@dataclass(frozen=True)
class Comparison:
    """A comparison of groups of runs by one metric.

    Args:
        keys: The settings in which the groups differ.
        metric: The metric that is compared.
        lower: Whether lower values are better.
        targets: Values of the metric for which to report when they were reached.
        groups: The groups, sorted by their values; a reference comes before the groups that are compared with it.
        reference: The name of the reference; empty if there is none.
        remarks: Warnings about how comparable the groups are.
        across: The setting whose values become columns or panels; empty if there is none.
        percent: Whether the values of the metric are in percent.
    """

    keys: list[str]
    metric: str
    lower: bool
    targets: list[float]
    groups: list[Group]
    reference: str
    remarks: list[str]
    across: str = ""
    percent: bool = False

    @property
    def digits(self) -> int:
        """The number of decimal places with which to show values of the metric."""
        return 2 if self.percent else 4

    @property
    def columns(self) -> list[str]:
        """The settings that have a table column. `algorithm.mu` is shown in the column of `algorithm`."""
        return _columns(self.keys, self.across)

    @property
    def seeds(self) -> list[Any]:
        """The distinct seeds of all groups."""
        return _seeds(run for group in self.groups for run in group.runs)

    @property
    def missing_seeds(self) -> list[str]:
        """A list with one warning if not all groups have the same seeds; otherwise an empty list."""
        if all(len(group.seeds) == len(self.seeds) for group in self.groups):
            return []
        return [f"seeds: {', '.join(map(str, self.seeds))}; some groups lack some."]

    def in_percent(self) -> Comparison:
        """Return a copy of the comparison with the metric and its differences between groups in percent."""
        return replace(self, groups=[group.in_percent() for group in self.groups], percent=True)


def comparable_runs(runs: Iterable[Run], unfinished: bool = False) -> list[Run]:
    """Return the finished runs that have a config, one per combination of settings and seed, and warn about the others.

    Of several runs with the same settings and seed, the newest finished one is kept.

    Args:
        runs: Any runs.
        unfinished: Include unfinished runs, with the rounds that they have.

    Raises:
        ConfigError: No run is left.
    """
    runs = list(runs)
    configured = [run for run in runs if run.config]
    _warn(set(runs) - set(configured), "no config.yaml, left out")
    candidates = [run for run in configured if run.finished or unfinished]
    _warn(set(configured) - set(candidates), "not finished, left out (--unfinished includes them)")
    newest: dict[Any, Run] = {}
    for run in sorted(candidates, key=lambda run: (run.finished, (run.run_dir / "metrics.csv").stat().st_mtime)):
        newest[repr(run.settings.get("seed")), tuple(sorted(compared_settings(run).items()))] = run
    kept = [run for run in candidates if run in set(newest.values())]
    reason = "the same settings and seed as another run, left out (the newest finished run is kept)"
    _warn(set(candidates) - set(kept), reason)
    if not kept:
        raise ConfigError("no run is left to compare")
    return kept


def compare(
    runs: Sequence[Run],
    by: Sequence[str] = (),
    metric: str | None = None,
    lower: bool | None = None,
    reference: Mapping[str, Any] | None = None,
    targets: Sequence[float] = (),
    across: str | None = None,
) -> Comparison:
    """Group runs that differ only in the seed, and compare the groups by a metric.

    Args:
        runs: The runs, as `comparable_runs` returns them.
        by: Settings to group by: keys, or ends of keys. By default all in which the runs differ, except the seed and
            settings that do not affect results.
        metric: The metric to compare; by default the first of `DEFAULT_METRICS` that a run has.
        lower: Whether lower values are better; by default the direction of the metric.
        reference: Settings of the reference groups, among those that are grouped by. Each group is compared with the
            one that has these settings and otherwise the same. By default `algorithm: FedAvg`, if that is one group.
        targets: Values of the metric for which to report when they were reached.
        across: A setting whose values become columns or panels. It is added to `by`.

    Raises:
        ConfigError: No run has the metric or a key, the groups do not differ in `across`, or the reference matches no
            group, or several.
    """
    texts = {run: compared_settings(run) for run in runs}
    varied = _varied(texts)
    keys = list(dict.fromkeys(known_key(name, runs, "--by") for name in by)) or list(varied)
    across = _across_key(across, keys, runs, bool(by)) if across else ""
    keys += [across] if across and across not in keys else []
    if uncompared := [key for key in keys if _is_uncompared(key)]:
        option = "--across" if uncompared[0] == across else "--by"
        raise ConfigError(f"{option}: {uncompared[0]} cannot group runs: it does not affect results, or is the seed")
    metric = _default_metric(runs) if metric is None else known_metric(metric, runs, "--metric")
    lower = is_lower_better(metric) if lower is None else lower
    wanted = {known_key(key, runs, "--reference"): value for key, value in (reference or {}).items()}
    if wanted and not keys:
        raise ConfigError("--reference: all runs have the same settings, so there is only one group. Add other runs")
    distinctive = {
        key: value
        for key, value in wanted.items()
        if key in keys or not all(has_value(run.settings.get(key), value) for run in runs)
    }
    wanted = distinctive or wanted
    if reference is None and "algorithm" in keys:
        wanted = {"algorithm": "FedAvg"}
    if unknown := wanted.keys() - set(keys):
        fix = f"Use one of {join_names(keys)}"
        raise ConfigError(f"--reference: {unknown.pop()} is not among the settings that differ. {fix}")

    grouping = _Grouping(keys, varied, texts, metric, lower, targets, across)
    members: dict[tuple[str | None, ...], list[Run]] = defaultdict(list)
    for run in runs:
        members[tuple(texts[run].get(key) for key in keys)].append(run)

    def order(group: Group) -> list[Any]:
        values = [(group.values.get(key), wanted.get(key)) for key in keys]
        return [(not has_value(value, reference_value), sort_key(value)) for value, reference_value in values]

    groups = sorted((_group(group_runs, grouping) for group_runs in members.values()), key=order)
    remarks = _remarks(groups, grouping)

    other_keys = [key for key in keys if key not in wanted and not is_below(key, wanted)]
    references = [_reference_groups(group, groups, other_keys, wanted) if wanted else [] for group in groups]
    if ambiguous := next((matches for matches in references if len(matches) > 1), None):
        names = _names_of(ambiguous, groups)
        match = f"{_describe(wanted)} matches {len(ambiguous)} groups with otherwise equal settings, {names}"
        if reference is not None:
            raise ConfigError(f"--reference: {match}. Add another KEY=VALUE")
        remarks.append(f"no comparison with FedAvg: {match}. Choose one with --reference algorithm=FedAvg KEY=VALUE")
        references = [[] for _ in groups]
    if reference and not any(references):
        raise ConfigError(f"--reference: no group has {_describe(wanted)}. Available: {_names_of(groups, groups)}.")
    bases = [matches[0] if matches else None for matches in references]
    differences = add_holm([_difference(group, base, grouping) for group, base in zip(groups, bases, strict=True)])
    compared = [
        replace(group, reference=base is group, difference=difference)
        for group, base, difference in zip(groups, bases, differences, strict=True)
    ]
    reference_name = _describe(wanted) if any(bases) else ""
    return Comparison(keys, metric, lower, list(targets), compared, reference_name, remarks, across)


def across_values(found: Comparison) -> list[str]:
    """Return the sorted values, as text, of the setting that a comparison spreads over columns or panels (`across`).

    The value of a group without the setting is an empty text. If `across` is empty, the list is empty.
    """
    groups = sorted(found.groups, key=lambda group: sort_key(group.values.get(found.across)))
    return list(dict.fromkeys(group.names[found.across] for group in groups)) if found.across else []


def _across_key(name: str, keys: Sequence[str], runs: Sequence[Run], grouped: bool) -> str:
    """Return the full dotted key of the setting that a user gives as `--across`: the key or its end, such as `tau`.

    Args:
        name: The key or its end.
        keys: The keys to group by.
        runs: The runs.
        grouped: Whether the user chose the keys to group by, to which any setting of the runs can be added.

    Raises:
        ConfigError: There is no such setting, or several.
    """
    matching = [key for key in keys if key == name or key.endswith(f".{name}")]
    if not matching and grouped:
        return known_key(name, runs, "--across")
    if len(matching) != 1:
        available = ", ".join(_columns(keys, "")) or "none"
        raise ConfigError(f"--across: {name} is no key in which these groups differ. Available: {available}")
    return matching[0]


def _columns(keys: Sequence[str], across: str) -> list[str]:
    """Return the keys without nested ones, such as `algorithm.mu` if `algorithm` is a key. Always keep `across`."""
    return [key for key in keys if key == across or not is_below(key, keys)]


# --- Groups ---


def _difference(group: Group, base: Group | None, grouping: _Grouping) -> Difference | None:
    """Return the mean difference of the metric's last value between a group and its reference group `base`.

    Runs are paired by their seed, and by the settings that vary inside one of the two groups.
    """
    if base is None or base is group:
        return None
    keys, texts = grouping.keys, grouping.texts
    varied = _varied({run: texts[run] for run in group.runs}) | _varied({run: texts[run] for run in base.runs})
    inner = [key for key in varied if key not in keys and not is_below(key, keys)]

    def last_values(runs: list[Run]) -> dict[Any, float]:
        """Return the metric's mean last value by pairing key: the seed and the values of the settings in `inner`."""
        values: dict[Any, list[float]] = defaultdict(list)
        for run in runs:
            if figures := best_and_last(run.rounds, grouping.metric):
                pair = repr(run.settings.get("seed")), *(texts[run].get(key) for key in inner)
                values[pair].append(figures["last"])
        return {pair: float(np.mean(each)) for pair, each in values.items()}

    ours, theirs = last_values(group.runs), last_values(base.runs)
    pairs = [pair for pair in ours if pair in theirs]
    return paired_difference([ours[pair] for pair in pairs], [theirs[pair] for pair in pairs])


class _Grouping(NamedTuple):
    """How runs are grouped and compared: the settings to group by, and the metric with its direction and targets.

    Args:
        keys: The settings by which runs are grouped.
        varied: The settings in which runs differ, see `_varied`.
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


def _group(runs: list[Run], grouping: _Grouping) -> Group:
    keys, settings = grouping.keys, runs[0].settings
    figures = list(filter(None, (best_and_last(run.rounds, grouping.metric, grouping.lower) for run in runs)))
    return Group(
        {key: settings[key] for key in keys if key in settings},
        {key: _name(key, runs[0], grouping) for key in _columns(keys, grouping.across)},
        runs,
        spread(figure["last"] for figure in figures),
        spread(figure["best"] for figure in figures),
        spread(count for count in (transferred_bytes(run.rounds) for run in runs) if count is not None),
        {target: _reach(runs, target, grouping, len(figures)) for target in grouping.targets},
    )


def _reach(runs: list[Run], target: float, grouping: _Grouping, of: int) -> Reach:
    rounds = [(run.rounds, rounds_to(run.rounds, target, grouping.metric, grouping.lower)) for run in runs]
    until = [rows[:number] for rows, number in rounds if number is not None]
    times = [[row["time/round_s"] for row in rows] for rows in until if all("time/round_s" in row for row in rows)]
    transferred = spread(count for count in map(transferred_bytes, until) if count is not None)
    return Reach(spread(map(len, until)), transferred, spread(map(sum, times)), len(until), of)


def transferred_bytes(rows: Sequence[Row]) -> float | None:
    """Return the communication cost of some rounds in bytes, uploads plus downloads; None if it was not recorded."""
    counted = [row[name] for row in rows for name in ("comm/up_bytes", "comm/down_bytes") if name in row]
    return sum(counted) if counted else None


def _default_metric(runs: Sequence[Run]) -> str:
    names = {name for run in runs for row in run.rounds for name in row}
    return next((name for name in DEFAULT_METRICS if name in names), DEFAULT_METRICS[1])


def _reference_groups(group: Group, groups: list[Group], other_keys: list[str], wanted: dict[str, Any]) -> list[Group]:
    """Return the reference groups of a group: those that have the settings `wanted` and otherwise equal settings."""
    return [
        other
        for other in groups
        if all(has_value(other.values.get(key), value) for key, value in wanted.items())
        and all(repr(other.values.get(key)) == repr(group.values.get(key)) for key in other_keys)
    ]


def _remarks(groups: list[Group], grouping: _Grouping) -> list[str]:
    keys, varied, texts, metric, *_ = grouping
    remarks = []
    if without := [group for group in groups if group.last is None]:
        fix = ": no global model, or no global test set. The metric client/acc_mean includes them"
        remarks.append(f"no {metric} in {_names_of(without, groups)}" + (fix if metric == "global/acc" else ""))
    if partly := [group for group in groups if group.last and group.last.n < len(group.runs)]:
        remarks.append(f"not all runs of {_names_of(partly, groups)} have {metric}; the figures cover those that do")
    mixed = {key for group in groups for key in _varied({run: texts[run] for run in group.runs})} - set(keys)
    if mixed:
        keys_of_mixed = ", ".join(key for key in varied if key in mixed)
        fix = "± is not over seeds alone. Use --by or --where to separate them"
        remarks.append(f"runs of one group differ in {keys_of_mixed}, too: {fix}")
    if others := [key for key in varied if key not in mixed and key not in keys]:
        remarks.append(f"groups differ in {', '.join(others)}, too")
    return remarks


def compared_settings(run: Run) -> dict[str, str]:
    """Return the settings of a run that affect results. They are text, so that NaN is equal to NaN."""
    return {key: repr(value) for key, value in run.settings.items() if not _is_uncompared(key)}


def _is_uncompared(key: str) -> bool:
    return key in UNCOMPARED or is_below(key, UNCOMPARED)


def _varied(texts: Mapping[Run, dict[str, str]]) -> dict[str, set[Any]]:
    """Return the settings in which runs with the same classes differ. Settings of the algorithm come first.

    A nested setting is compared only among runs with the same class above it: `tau` is returned only if two FedSKC
    runs differ in it, not because a FedAvg run has no `tau`.

    Returns:
        For each key, the values of the keys above it (such as the class) with which it differs.
    """
    varied = {}
    for key in dict.fromkeys(key for each in texts.values() for key in each):
        seen: dict[Any, set[str | None]] = defaultdict(set)
        for each in texts.values():
            seen[_above(key, each)].add(each.get(key, "None"))  # an older version has fewer keys
        if contexts := {context for context, values in seen.items() if len(values) > 1}:
            varied[key] = contexts
    return dict(sorted(varied.items(), key=lambda item: item[0].partition(".")[0] != "algorithm"))


def _above(key: str, texts: dict[str, str]) -> tuple[str | None, ...]:
    """Return the values of all parents of a nested setting: for `algorithm.mu`, the class of `algorithm`."""
    parts = key.split(".")
    return tuple(texts.get(".".join(parts[:i])) for i in range(1, len(parts)))


# --- Text ---


def format_setting(value: Any) -> str:
    """Return the value of a setting as text: as in YAML, or the class name followed by the arguments."""
    if isinstance(value, dict) and "class_path" in value:
        arguments = (f"{name}={format_setting(each)}" for name, each in (value.get("init_args") or {}).items())
        return " ".join([str(value["class_path"]).rpartition(".")[2], *arguments])
    if isinstance(value, list):
        return f"[{', '.join(map(format_setting, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _name(key: str, run: Run, grouping: _Grouping) -> str:
    """Return the table cell of a setting: its value and the nested settings that vary, such as `FedSKC tau=0.1`."""
    settings, texts, varied = run.settings, grouping.texts[run], grouping.varied
    inner = [
        f"{each.removeprefix(f'{key}.')}={format_setting(settings[each])}"
        for each in grouping.keys
        if is_below(each, [key]) and each in settings and _above(each, texts) in varied.get(each, ())
        if each != grouping.across
    ]
    return " ".join([format_setting(settings[key]) if key in settings else "", *inner]).strip()


def group_labels(groups: Sequence[Group]) -> list[str]:
    """Return the label of each group: its method, and the settings that vary among the groups of this method."""

    def label(group: Group) -> str:
        same_method = [other for other in groups if other.names.get("algorithm") == group.names.get("algorithm")]
        names = [
            value if key == "algorithm" else f"{key.rpartition('.')[2]}={value}"
            for key, value in group.names.items()
            if key == "algorithm" or len({other.names.get(key) for other in same_method}) > 1
        ]
        return " ".join(names) or str(group.runs[0].settings.get("algorithm", "all runs"))

    return [label(group) for group in groups]


def _names_of(named: Iterable[Group], groups: Sequence[Group]) -> str:
    return join_names(group.name_among(groups) for group in named)


def _describe(wanted: Mapping[str, Any]) -> str:
    ends = ((key.rpartition(".")[2], format_setting(value)) for key, value in wanted.items())
    return " ".join(value if end == "algorithm" else f"{end}={value}" for end, value in ends)


def sort_key(value: Any) -> tuple[int, float, str]:
    """Return the key by which values of a setting are sorted: missing values first, then numbers, then text."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 1, float(value), ""
    return 0 if value is None else 2, 0.0, format_setting(value)


def _seeds(runs: Iterable[Run]) -> list[Any]:
    seeds = {repr(seed): seed for seed in (run.settings.get("seed") for run in runs)}
    return sorted(seeds.values(), key=sort_key)


def _warn(runs: set[Run], reason: str) -> None:
    if runs:
        folders = join_names(sorted(str(run.run_dir) for run in runs))
        warnings.warn(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {folders}: {reason}", stacklevel=3)
