"""Runs side by side: grouped over their seeds, what each group came to, and how sure its difference to another is."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from fl_lightning.core.config import FREE_KEYS, below
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.metrics import Row, best_and_last, is_lower_better, rounds_to
from fl_lightning.runs.reader import Run, is_setting, known_key

LEVELS = (0.05, 0.01, 0.001)
"""Significance: a star for each of these that p is below."""

UNCOMPARED = FREE_KEYS | {"seed", "evaluation.target_accuracies"}
"""Settings that tell no groups apart."""


class Spread(NamedTuple):
    """Numbers of several runs: their mean, and the sample's standard deviation (n - 1) where there are two or more."""

    mean: float
    std: float | None
    n: int


class Reach(NamedTuple):
    """When runs reached a target, over those that did.

    Args:
        rounds: The first evaluated round that reached it.
        bytes: What had crossed by then, up and down.
        seconds: What the rounds until then had taken.
        reached: How many runs did.
        of: How many have the metric.
    """

    rounds: Spread | None
    bytes: Spread | None
    seconds: Spread | None
    reached: int
    of: int


class Difference(NamedTuple):
    """How a group's last figures differ from another's, over pairs of runs with the same seed.

    Args:
        pairs: How many pairs there are.
        mean: Mean of the differences.
        std: The sample's standard deviation of them; None for a single pair.
        effect: Cohen's d for paired samples, `mean / std`; None where the differences do not vary.
        p: Of the paired t-test, two-sided; None where the differences do not vary: nothing then tells chance from
            effect. Equal differences are common where a test set is small.
        p_holm: `p` after Holm's correction for all groups that were tested.
    """

    pairs: int
    mean: float
    std: float | None
    effect: float | None
    p: float | None
    p_holm: float | None = None

    @property
    def stars(self) -> str:
        """A star for each of the levels 0.05, 0.01 and 0.001 that `p_holm` is below."""
        return "*" * sum(self.p_holm < level for level in LEVELS) if self.p_holm is not None else ""


@dataclass(frozen=True)
class Group:
    """Runs with the same values of a comparison's keys, and what they came to.

    Args:
        values: Their values of the keys; a key that they do not have is left out.
        names: The same to be read: the column's key to the value, with what lies below it.
        runs: The runs.
        last: The metric in its last evaluated round; None where no run has the metric.
        best: The metric where it is best.
        bytes: All that crossed, up and down; None where it was not counted.
        reach: By target, when it was reached.
        reference: Whether other groups are compared with it.
        difference: How it differs from its reference; None where it has none, or shares no seed with it.
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
        """The seeds that it has, each once."""
        return _seeds(self.runs)

    def among(self, groups: Sequence[Group]) -> str:
        """What to call it among others: its first value, or all of them where another has that one, too."""
        first, *_ = names = list(self.names.values()) or ["all runs"]
        alone = sum(list(group.names.values())[:1] == [first] for group in groups) <= 1
        return first if alone else " ".join(filter(None, names))


@dataclass(frozen=True)
class Comparison:
    """Groups of runs side by side.

    Args:
        keys: The settings that tell groups apart.
        metric: What is compared.
        lower: Whether the lowest is the best.
        targets: Values of the metric for which it is told when they were reached.
        groups: The groups, in the order of their values, reference groups first among their like.
        reference: What groups are compared with, in words; empty for nothing.
        remarks: What a reader should know about these groups.
    """

    keys: list[str]
    metric: str
    lower: bool
    targets: list[float]
    groups: list[Group]
    reference: str
    remarks: list[str]

    @property
    def columns(self) -> list[str]:
        """The keys less those below others of them: `algorithm.mu` is told beside `algorithm`."""
        return [key for key in self.keys if not below(key, self.keys)]

    @property
    def seeds(self) -> list[Any]:
        """All seeds of all groups, each once."""
        return _seeds(run for group in self.groups for run in group.runs)


def comparable(runs: Iterable[Run], unfinished: bool = False) -> list[Run]:
    """The runs that can be compared: finished, with a config, and each setting and seed once; others are told of.

    Of several runs with the same settings and seed the newest finished one counts.

    Args:
        runs: Any runs.
        unfinished: Take unfinished runs, too, by the rounds that they have.

    Raises:
        ConfigError: None is left.
    """
    runs = list(runs)
    known = [run for run in runs if run.config]
    _tell(set(runs) - set(known), "no config.yaml says what they ran; left out")
    ended = [run for run in known if run.finished or unfinished]
    _tell(set(known) - set(ended), "not finished; left out (--unfinished takes them by the rounds they have)")
    newest: dict[Any, Run] = {}
    for run in sorted(ended, key=lambda run: (run.finished, _written(run))):
        newest[repr(run.settings.get("seed")), tuple(sorted(_words(run).items()))] = run
    kept = [run for run in ended if run in set(newest.values())]
    _tell(set(ended) - set(kept), "the same settings and seed as another run; the newest finished one counts")
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
) -> Comparison:
    """Group runs over their seeds and set the groups side by side.

    Args:
        runs: What `comparable` leaves of them.
        by: Settings that tell groups apart, by key or the end of one; by default all in which runs differ, but for
            the seed and what does not alter the maths.
        metric: What to compare; `global/acc` if any run has it, else `client/acc_mean`.
        lower: Whether the lowest is the best; by default as the metric has it.
        reference: Settings, among those that tell groups apart, of the groups to compare with: each group with the
            one that has these and is otherwise like it. By default `algorithm: FedAvg`, if that is one group.
        targets: Values of the metric for which it is told when they were reached.

    Raises:
        ConfigError: No run has the metric or a key, or the reference fits no group, or several.
    """
    words = {run: _words(run) for run in runs}
    varied = _varied(words)
    keys = list(dict.fromkeys(known_key(name, runs, "--by") for name in by)) or list(varied)
    if same := [key for key in keys if _uncompared(key)]:
        raise ConfigError(f"--by: {same[0]} tells no groups apart: they are over seeds, and what alters no figure")
    metric = _metric(runs, metric)
    lower = is_lower_better(metric) if lower is None else lower
    wanted = {known_key(key, runs, "--reference"): value for key, value in (reference or {}).items()}
    if reference is None and "algorithm" in keys:
        wanted = {"algorithm": "FedAvg"}
    if wanted and not keys and reference is not None:
        raise ConfigError("--reference: all runs have the same settings, so there is only one group. Add other runs")
    if unknown := wanted.keys() - set(keys):
        raise ConfigError(f"--reference: {unknown.pop()} does not tell these groups apart; {_listed(keys)} would")

    members: dict[tuple[str | None, ...], list[Run]] = defaultdict(list)
    for run in runs:
        members[tuple(words[run].get(key) for key in keys)].append(run)
    groups = [_group(alike, keys, varied, words[alike[0]], metric, lower, targets) for alike in members.values()]
    groups.sort(key=lambda group: [_place(group.values.get(key), wanted.get(key)) for key in keys])
    remarks = _remarks(groups, keys, varied, words, metric)

    own = [key for key in keys if key not in wanted and not below(key, wanted)]
    likes = [_alike(group, groups, own, wanted) for group in groups] if wanted else []
    if several := next((found for found in likes if len(found) > 1), None):
        fit = f"{_told(wanted)} fits {len(several)} groups that are otherwise alike, {_named(several, groups)}"
        if reference is not None:
            raise ConfigError(f"--reference: {fit}; add another KEY=VALUE")
        remarks.append(f"nothing is compared with FedAvg: {fit}; --reference algorithm=FedAvg KEY=VALUE chooses one")
        likes = []
    if reference and not any(likes):
        raise ConfigError(f"--reference: no group has {_told(wanted)}; there are {_named(groups, groups)}")
    base = {id(group): found[0] for group, found in zip(groups, likes, strict=False) if found}
    compared = _holm([_compared(group, base.get(id(group)), keys, words, metric) for group in groups])
    return Comparison(keys, metric, lower, list(targets), compared, _told(wanted) if base else "", remarks)


# --- Statistics ---


def spread(values: Iterable[float]) -> Spread | None:
    """Mean and the sample's standard deviation; None of nothing."""
    array = np.array(list(values), dtype=float)
    if not len(array):
        return None
    with np.errstate(all="ignore"):  # of what is not finite comes what is none
        return Spread(float(array.mean()), float(array.std(ddof=1)) if len(array) > 1 else None, len(array))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """How paired figures differ, and the paired t-test of it; None without a pair."""
    with np.errstate(all="ignore"):
        deltas = np.array(ours, dtype=float) - np.array(theirs, dtype=float)
    found = spread(deltas)
    if found is None:
        return None
    mean, std, n = found
    rounding = 1e-12 * np.abs([*ours, *theirs]).max()
    if std is None or not std > rounding:
        return Difference(n, mean, std, None, None)
    from scipy.special import stdtr  # a tenth of what scipy.stats takes to import

    t = mean / (std / math.sqrt(n))
    return Difference(n, mean, std, mean / std, float(2 * stdtr(n - 1, -abs(t))))


def holm(p_values: Sequence[float]) -> list[float]:
    """P values corrected for their number by Holm's step-down procedure."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(np.argsort(p_values, kind="stable")):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def _holm(groups: list[Group]) -> list[Group]:
    tested = [i for i, group in enumerate(groups) if group.difference and group.difference.p is not None]
    corrected = holm([groups[i].difference.p for i in tested])  # type: ignore[union-attr, misc]
    for i, p in zip(tested, corrected, strict=True):
        groups[i] = replace(groups[i], difference=groups[i].difference._replace(p_holm=p))  # type: ignore[union-attr]
    return groups


def _compared(
    group: Group, base: Group | None, keys: list[str], words: dict[Run, dict[str, str]], metric: str
) -> Group:
    """A group with its difference to another. Runs are paired by seed and by what else varies in either group."""
    if base is None or base is group:
        return replace(group, reference=base is group)
    ours, theirs = ({run: words[run] for run in each.runs} for each in (group, base))
    within = [key for key in _varied(ours) | _varied(theirs) if key not in keys and not below(key, keys)]

    def units(runs: list[Run]) -> dict[Any, float]:
        """The last figures by seed and the settings within; a mean where there are several such runs."""
        found: dict[Any, list[float]] = defaultdict(list)
        for run in runs:
            unit = repr(run.settings.get("seed")), *(words[run].get(key) for key in within)
            found[unit] += [figures["last"] for figures in [best_and_last(run.rounds, metric)] if figures]
        return {unit: float(np.mean(values)) for unit, values in found.items() if values}

    our, their = units(group.runs), units(base.runs)
    both = [unit for unit in our if unit in their]
    return replace(group, difference=paired([our[unit] for unit in both], [their[unit] for unit in both]))


# --- Groups ---


def _group(
    runs: list[Run],
    keys: list[str],
    varied: dict[str, set[Any]],
    words: dict[str, str],
    metric: str,
    lower: bool,
    targets: Sequence[float],
) -> Group:
    settings = runs[0].settings
    figures = [found for found in (best_and_last(run.rounds, metric, lower) for run in runs) if found]
    return Group(
        {key: settings[key] for key in keys if key in settings},
        {key: _name(key, keys, varied, settings, words) for key in keys if not below(key, keys)},
        runs,
        spread(figure["last"] for figure in figures),
        spread(figure["best"] for figure in figures),
        spread(crossed for crossed in (_crossed(run.rounds) for run in runs) if crossed is not None),
        {target: _reach(runs, target, metric, lower, len(figures)) for target in targets},
    )


def _reach(runs: list[Run], target: float, metric: str, lower: bool, of: int) -> Reach:
    ends = [(run.rounds, rounds_to(run.rounds, target, metric, lower)) for run in runs]
    until = [rows[:round] for rows, round in ends if round is not None]
    return Reach(
        spread(len(rows) for rows in until),
        spread(crossed for crossed in map(_crossed, until) if crossed is not None),
        spread(
            sum(row["time/round_s"] for row in rows) for rows in until if all("time/round_s" in row for row in rows)
        ),
        len(until),
        of,
    )


def _seconds(rows: Sequence[Row]) -> float | None:
    """What these rounds took; None where that was not measured."""
    return sum(row["time/round_s"] for row in rows) if all("time/round_s" in row for row in rows) else None


def _crossed(rows: Sequence[Row]) -> float | None:
    """Bytes up and down over these rounds; None where they were not counted."""
    counted = [row[name] for row in rows for name in ("comm/up_bytes", "comm/down_bytes") if name in row]
    return sum(counted) if counted else None


def _metric(runs: Sequence[Run], metric: str | None) -> str:
    there = sorted({name for run in runs for row in run.rounds for name in row} - {"round"})
    if metric is None:
        return "global/acc" if "global/acc" in there else "client/acc_mean"
    if metric not in there:
        raise ConfigError(f"--metric: no run has {metric!r}; there are {', '.join(there)}")
    return metric


def _alike(group: Group, groups: list[Group], own: list[str], wanted: dict[str, Any]) -> list[Group]:
    """The groups with the settings that are wanted and, of other keys, the group's own."""
    return [
        other
        for other in groups
        if all(is_setting(other.values.get(key), value) for key, value in wanted.items())
        and all(repr(other.values.get(key)) == repr(group.values.get(key)) for key in own)
    ]


def _remarks(
    groups: list[Group],
    keys: list[str],
    varied: dict[str, set[Any]],
    words: dict[Run, dict[str, str]],
    metric: str,
) -> list[str]:
    remarks = []
    if without := [group for group in groups if group.last is None]:
        mend = "methods without a global model; --metric client/acc_mean has them" if metric == "global/acc" else ""
        remarks.append(f"no {metric} in {_named(without, groups)}" + (f": {mend}" if mend else ""))
    if some := [group for group in groups if group.last and group.last.n < len(group.runs)]:
        remarks.append(f"not all runs of {_named(some, groups)} have {metric}; the figures are of those that do")
    mixed = {key for group in groups for key in _varied({run: words[run] for run in group.runs})} - set(keys)
    if mixed:
        told = ", ".join(key for key in varied if key in mixed)
        remarks.append(f"runs of one group differ in {told}, too: ± is not over seeds alone; --by or --where part them")
    if others := [key for key in varied if key not in mixed and key not in keys]:
        remarks.append(f"groups differ in {', '.join(others)}, too")
    return remarks


def _words(run: Run) -> dict[str, str]:
    """The settings that alter the maths, as text that is equal where they are; a NaN is equal to a NaN so."""
    return {key: repr(value) for key, value in run.settings.items() if not _uncompared(key)}


def _uncompared(key: str) -> bool:
    return key in UNCOMPARED or below(key, UNCOMPARED)


def _varied(words: Mapping[Run, dict[str, str]]) -> dict[str, set[Any]]:
    """The settings that differ among runs which are alike in the classes above them, the algorithm's first.

    FedSKC's tau is no difference to FedAvg beside the algorithm itself: it counts where two FedSKC runs differ in it.

    Returns:
        By key, the classes above, as text, for which it differs.
    """
    found = {}
    for key in dict.fromkeys(key for each in words.values() for key in each):
        seen: dict[Any, set[str | None]] = defaultdict(set)
        for each in words.values():
            seen[_above(key, each)].add(each.get(key))
        if contexts := {context for context, values in seen.items() if len(values) > 1}:
            found[key] = contexts
    return dict(sorted(found.items(), key=lambda item: item[0].partition(".")[0] != "algorithm"))


def _above(key: str, words: dict[str, str]) -> tuple[str | None, ...]:
    parts = key.split(".")
    return tuple(words.get(".".join(parts[:i])) for i in range(1, len(parts)))


# --- Words ---


def text(value: Any) -> str:
    """A setting's value to be read: as in YAML, classes with their arguments."""
    if isinstance(value, dict) and "class_path" in value:
        arguments = (f"{name}={text(each)}" for name, each in (value.get("init_args") or {}).items())
        return " ".join([str(value["class_path"]).rpartition(".")[2], *arguments])
    if isinstance(value, list):
        return f"[{', '.join(map(text, value))}]"
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def _name(
    key: str, keys: list[str], varied: dict[str, set[Any]], settings: dict[str, Any], words: dict[str, str]
) -> str:
    """A group's value of a key, and those below it that tell it from others with that value."""
    inner = [
        f"{each.removeprefix(f'{key}.')}={text(settings[each])}"
        for each in keys
        if below(each, [key]) and each in settings and _above(each, words) in varied.get(each, ())
    ]
    return " ".join([text(settings[key]) if key in settings else "", *inner]).strip()


def _listed(things: Iterable[Any]) -> str:
    names = list(map(str, things))
    return ", ".join(names if len(names) <= 6 else [*names[:5], f"{len(names) - 5} more"])


def _named(some: Iterable[Group], groups: Sequence[Group]) -> str:
    return _listed(group.among(groups) for group in some)


def _told(wanted: Mapping[str, Any]) -> str:
    ends = ((key.rpartition(".")[2], text(value)) for key, value in wanted.items())
    return " ".join(value if end == "algorithm" else f"{end}={value}" for end, value in ends)


def rank(value: Any) -> tuple[int, float, str]:
    """Where a value stands among others of a key: none, then numbers, then words."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 1, float(value), ""
    return 0 if value is None else 2, 0.0, text(value)


def _place(value: Any, wanted: Any) -> tuple[bool, tuple[int, float, str]]:
    return not is_setting(value, wanted), rank(value)


def _seeds(runs: Iterable[Run]) -> list[Any]:
    seeds = {repr(seed): seed for seed in (run.settings.get("seed") for run in runs)}
    return sorted(seeds.values(), key=rank)


def _written(run: Run) -> float:
    return (run.run_dir / "metrics.csv").stat().st_mtime


def _tell(runs: set[Run], why: str) -> None:
    if runs:
        folders = _listed(sorted(str(run.run_dir) for run in runs))
        warnings.warn(f"{len(runs)} {'run' if len(runs) == 1 else 'runs'}, {folders}: {why}", stacklevel=3)
