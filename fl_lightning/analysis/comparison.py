"""Compare runs: group them by settings, and test whether groups differ significantly from a reference group."""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fl_lightning.analysis.run_groups import (
    Group,
    Grouping,
    build_group,
    column_keys,
    names_of,
    reference_difference,
    seeds_of,
)
from fl_lightning.analysis.run_settings import (
    compared_settings,
    format_setting,
    is_uncompared,
    sort_key,
    varied_settings,
)
from fl_lightning.analysis.statistics import add_holm
from fl_lightning.core.config import is_below
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.names import join_names
from fl_lightning.evaluation.summary import is_lower_better
from fl_lightning.runs.curves import scale
from fl_lightning.runs.reader import Run, known_metric
from fl_lightning.runs.search import has_value, known_key

DEFAULT_METRICS = ("global/acc", "client/acc_mean", "global/mae", "client/mae_mean")
"""Metrics that are compared by default. Regression has the error `mae` in place of the accuracy `acc`."""

ACCURACY = re.compile(r".*/acc(_mean|_weighted|_worst_decile)?")
"""Matches columns with an accuracy, which is between 0 and 1."""


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
        """The number of decimal places for values of the metric: 2 in percent, otherwise 4."""
        return 2 if self.percent else 4

    @property
    def columns(self) -> list[str]:
        """The keys of the settings that get a table column. Nested settings share the column of their parent.

        For example, the column of `algorithm` also shows `algorithm.mu`. The setting `across` always has a column.
        """
        return column_keys(self.keys, self.across)

    @property
    def seeds(self) -> list[Any]:
        """The distinct seeds of all groups."""
        return seeds_of(run for group in self.groups for run in group.runs)

    @property
    def missing_seeds(self) -> list[str]:
        """Warnings about missing seeds: a list with one message if groups have different seeds, otherwise empty."""
        if all(len(group.seeds) == len(self.seeds) for group in self.groups):
            return []
        return [f"seeds: {', '.join(map(str, self.seeds))}; some groups lack some."]

    def in_percent(self) -> Comparison:
        """Convert the metric to percent, including its differences between groups, and return the new comparison.

        Raises:
            ConfigError: A value of the metric is no fraction.
        """
        spreads = [spread for group in self.groups for spread in (group.last, group.best) if spread]
        scale(np.array([spread.mean for spread in spreads]), self.metric, percent=True)
        return replace(self, groups=[group.in_percent() for group in self.groups], percent=True)


def comparable_runs(runs: Iterable[Run], unfinished: bool = False) -> list[Run]:
    """Return the finished runs with a config, one per combination of settings and seed. Warn about runs left out.

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


def _warn(runs: set[Run], reason: str) -> None:
    if runs:
        folders = join_names(sorted(str(run.run_dir) for run in runs))
        warnings.warn(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {folders}: {reason}", stacklevel=3)


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
        ConfigError: No run has the metric or a key, the groups do not differ in `across`, the reference matches no
            group, or several, or a target is above 1 and the metric is an accuracy.
    """
    texts = {run: compared_settings(run) for run in runs}
    varied = varied_settings(texts)
    keys = list(dict.fromkeys(known_key(name, runs, "--by") for name in by)) or list(varied)
    across = "" if across is None else _across_key(across, keys, runs, bool(by))
    if by and keys == [across]:
        others = [key for key in varied if key != across and not is_below(key, [across])]
        fix = f"Use --by {others[0]}" if others else "Leave out --by"
        raise ConfigError(f"--across: {across} is the only key of --by, so no groups are left. {fix}.")
    keys += [across] if across and across not in keys else []
    if uncompared := [key for key in keys if is_uncompared(key)]:
        option = "--across" if uncompared[0] == across else "--by"
        raise ConfigError(f"{option}: {uncompared[0]} cannot group runs: it does not affect results, or is the seed")
    metric = _default_metric(runs) if metric is None else known_metric(metric, runs, "--metric")
    if ACCURACY.fullmatch(metric) and (above := [target for target in targets if target > 1]):
        fix = f"For {above[0]:g} %, set it to {above[0] / 100:g}"
        raise ConfigError(f"--target: {above[0]:g} is above 1, but {metric} is a fraction. {fix}")
    lower = is_lower_better(metric) if lower is None else lower
    wanted = _reference_settings(reference, keys, runs)
    grouping = Grouping(keys, varied, texts, metric, lower, targets, across)
    groups = _group_runs(runs, grouping, wanted)
    bases, ambiguous = _reference_groups(groups, keys, wanted, is_default=reference is None)
    differences = add_holm([reference_difference(*pair, grouping) for pair in zip(groups, bases, strict=True)])
    compared = [
        replace(group, reference=base is group, difference=difference)
        for group, base, difference in zip(groups, bases, differences, strict=True)
    ]
    remarks = [*_remarks(groups, grouping), *ambiguous]
    reference_name = _describe(wanted) if any(bases) else ""
    return Comparison(keys, metric, lower, list(targets), compared, reference_name, remarks, across)


def across_values(found: Comparison) -> list[str]:
    """Return the values of the setting that has one table column or figure panel per value, sorted, as text.

    This setting is `found.across`; if it is empty, the list is empty. A group without the setting has an empty text.
    """
    groups = sorted(found.groups, key=lambda group: sort_key(group.values.get(found.across)))
    return list(dict.fromkeys(group.names[found.across] for group in groups)) if found.across else []


# --- Metric and settings to group by ---


def _default_metric(runs: Sequence[Run]) -> str:
    names = {name for run in runs for row in run.rounds for name in row}
    return next((name for name in DEFAULT_METRICS if name in names), DEFAULT_METRICS[1])


def _across_key(name: str, keys: Sequence[str], runs: Sequence[Run], grouped: bool) -> str:
    """Return the full dotted key of the setting given as `--across`. Users may give only its end, such as `tau`.

    Args:
        name: The key or its end.
        keys: The keys to group by.
        runs: The runs.
        grouped: Whether the user chose the keys to group by, to which any setting of the runs can be added.

    Raises:
        ConfigError: There is no such setting, or several.
    """
    if not name:
        raise ConfigError("--across: the name of the setting is empty. Leave it out, or name one.")
    matching = [key for key in keys if key == name or key.endswith(f".{name}")]
    if not matching and grouped:
        return known_key(name, runs, "--across")
    if len(matching) != 1:
        available = ", ".join(column_keys(keys, "")) or "none"
        raise ConfigError(f"--across: {name} is no key in which these groups differ. Available: {available}")
    return matching[0]


# --- Groups and their references ---


def _group_runs(runs: Sequence[Run], grouping: Grouping, wanted: Mapping[str, Any]) -> list[Group]:
    """Group runs by their settings, and return the groups in sorted order.

    For each setting, groups with the reference's value come first.
    """
    members: dict[tuple[str | None, ...], list[Run]] = defaultdict(list)
    for run in runs:
        members[tuple(grouping.texts[run].get(key) for key in grouping.keys)].append(run)

    def order(group: Group) -> list[Any]:
        values = [(group.values.get(key), wanted.get(key)) for key in grouping.keys]
        return [(not has_value(value, reference_value), sort_key(value)) for value, reference_value in values]

    return sorted((build_group(group_runs, grouping) for group_runs in members.values()), key=order)


def _reference_settings(
    reference: Mapping[str, Any] | None, keys: Sequence[str], runs: Sequence[Run]
) -> dict[str, Any]:
    """Return the settings that define the reference groups, with full dotted keys; empty if there is no reference.

    Settings that all runs share are left out, unless there are no others.

    Raises:
        ConfigError: There is no such setting, or it is not among those that are grouped by.
    """
    if reference is None:
        return {"algorithm": "FedAvg"} if "algorithm" in keys else {}
    wanted = {known_key(key, runs, "--reference"): value for key, value in reference.items()}
    if wanted and not keys:
        raise ConfigError("--reference: all runs have the same settings, so there is only one group. Add other runs")
    distinctive = {
        key: value
        for key, value in wanted.items()
        if key in keys or not all(has_value(run.settings.get(key), value) for run in runs)
    }
    wanted = distinctive or wanted
    if unknown := wanted.keys() - set(keys):
        fix = f"Use one of {join_names(keys)}"
        raise ConfigError(f"--reference: {unknown.pop()} is not among the settings that differ. {fix}")
    return wanted


def _reference_groups(
    groups: Sequence[Group], keys: Sequence[str], wanted: Mapping[str, Any], is_default: bool
) -> tuple[list[Group | None], list[str]]:
    """Find the reference group of each group: it has the settings `wanted`, and otherwise the group's own settings.

    Args:
        groups: The groups.
        keys: The settings by which runs are grouped.
        wanted: The settings of the reference groups.
        is_default: Whether the user gave no reference. Then an ambiguous one is dropped with a remark.

    Returns:
        For each group its reference or None, and the remarks.

    Raises:
        ConfigError: The user's reference matches no group, or several.
    """
    others = [key for key in keys if key not in wanted and not is_below(key, wanted)]
    candidates = [
        group for group in groups if wanted and all(has_value(group.values.get(key), wanted[key]) for key in wanted)
    ]
    bases: list[Group | None] = []
    for group in groups:
        matches = [
            one for one in candidates if all(repr(one.values.get(key)) == repr(group.values.get(key)) for key in others)
        ]
        if len(matches) > 1:
            names = names_of(matches, groups)
            match = f"{_describe(wanted)} matches {len(matches)} groups with otherwise equal settings, {names}"
            if not is_default:
                raise ConfigError(f"--reference: {match}. Add another KEY=VALUE")
            fix = "Choose one with --reference algorithm=FedAvg KEY=VALUE"
            return [None] * len(groups), [f"no comparison with FedAvg: {match}. {fix}"]
        bases.append(matches[0] if matches else None)
    if wanted and not is_default and not any(bases):
        raise ConfigError(f"--reference: no group has {_describe(wanted)}. Available: {names_of(groups, groups)}.")
    return bases, []


def _describe(wanted: Mapping[str, Any]) -> str:
    ends = ((key.rpartition(".")[2], format_setting(value)) for key, value in wanted.items())
    return " ".join(value if end == "algorithm" else f"{end}={value}" for end, value in ends)


# --- Remarks ---


def _remarks(groups: list[Group], grouping: Grouping) -> list[str]:
    """Return what limits the comparison: missing values, and settings that differ besides those compared."""
    keys, varied, metric = grouping.keys, grouping.varied, grouping.metric
    remarks = []
    if without := [group for group in groups if group.last is None]:
        fix = ": no global model, or no global test set. The metric client/acc_mean includes them"
        remarks.append(f"no {metric} in {names_of(without, groups)}" + (fix if metric == "global/acc" else ""))
    if partly := [group for group in groups if group.last and group.last.n < len(group.runs)]:
        remarks.append(f"not all runs of {names_of(partly, groups)} have {metric}; the figures cover those that do")
    mixed = {key for group in groups for key in grouping.varied_within(group.runs)} - set(keys)
    if mixed:
        keys_of_mixed = ", ".join(key for key in varied if key in mixed)
        fix = "± is not over seeds alone. Use --by or --where to separate them"
        remarks.append(f"runs of one group differ in {keys_of_mixed}, too: {fix}")
    if others := [key for key in varied if key not in mixed and key not in keys]:
        remarks.append(f"groups differ in {', '.join(others)}, too")
    return remarks
