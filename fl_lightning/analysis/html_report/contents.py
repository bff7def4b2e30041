"""Collect the JSON data of an HTML report from runs: settings, metrics, clients and partitions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fl_lightning.analysis.comparison import compare
from fl_lightning.analysis.comparison_cells import difference_note, format_difference
from fl_lightning.analysis.html_report.run_files import last_images, read_or_skip
from fl_lightning.analysis.result_table import mean_and_std
from fl_lightning.analysis.run_groups import group_labels, group_styles
from fl_lightning.analysis.run_settings import format_setting
from fl_lightning.analysis.statistics import Spread, spread
from fl_lightning.core.names import join_names
from fl_lightning.evaluation.summary import EPSILON
from fl_lightning.runs.axis_labels import axis_label, evaluated_split
from fl_lightning.runs.csv_reader import read_columns
from fl_lightning.runs.curves import x_values
from fl_lightning.runs.partition import MAX_COLUMNS, group_clients, read_counts
from fl_lightning.runs.reader import Run
from fl_lightning.runs.styles import COLOURS, DARK_COLOURS

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
ROUNDING = 1e-15
"""Magnitude below which a metric is a rounding error."""
MOST_ROUNDS = 1000
"""Maximum number of rounds of a run that are drawn."""
MOST_POINTS = 1000
"""Maximum number of clients of a run that are drawn as points."""
MOST_CELLS = 300_000
"""Maximum number of cells, clients times classes, of all partitions together."""
MOST_TEXT = 300
"""Maximum number of characters of a setting's value."""


def contents(runs: Sequence[Run], reference: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return everything that the report of some runs shows, as JSON data with five significant digits per number.

    Args:
        runs: The runs.
        reference: Settings of the group that the others are tested against, as in `compare`; by default FedAvg.

    Raises:
        ConfigError: The reference matches no group, or several.
    """
    left_out: list[str] = []
    names = run_names(runs)
    group_names, groups = groups_of(runs)
    styles = group_styles(zip(group_names, groups, strict=True))
    group_of = {run: i for i, group in enumerate(groups) for run in group}
    texts = [setting_texts(run) for run in runs]
    common, others = split_settings(texts)
    entries = []
    for run, name, settings in zip(runs, names, others, strict=True):
        rounds = drawn_rounds(run)
        if len(rounds) < len(run.rounds):
            left_out.append(f"{name}: {len(rounds):,} of {len(run.rounds):,} rounds are drawn")
        values = {"axes": axes(run, rounds), "metrics": metrics(run, rounds)}
        values["clients"] = read_or_skip(left_out, f"{name}/clients.csv", clients, run, rounds) or {}
        shown = name if run.finished else f"{name} (not finished)"
        entries.append({"name": shown, "group": group_of[run], **values, "settings": settings})
    return {
        "title": title_of(texts, names, sum(not run.finished for run in runs)),
        "groups": group_names,
        "styles": [[style.colour, style.dash] for style in styles],
        "runs": entries,
        "common": common,
        "summary": summary(groups, reference),
        "labels": metric_labels(runs, entries),
        "colours": {"light": COLOURS, "dark": DARK_COLOURS},
        "partitions": partitions(runs, names, left_out),
        "images": last_images(runs, names, left_out),
        "sections": [],
        "left_out": left_out,
    }


# --- numbers ---


def round_number(value: float) -> float | int | None:
    """Return a number rounded to five significant digits; None for NaN and infinity, which JSON lacks.

    Numbers below `ROUNDING` are rounding errors, such as the deviation of equal accuracies, and become 0.
    """
    rounded = float(f"{value:.5g}") if not abs(value) < ROUNDING else 0
    if not math.isfinite(rounded):  # the largest floats round to infinity
        return None
    return int(rounded) if abs(rounded) < 1e15 and rounded == int(rounded) else rounded


def drawn_rounds(run: Run) -> list[int]:
    """Return the numbers of the rounds at which the curves of a run are drawn.

    These are all rounds. In runs of more than `MOST_ROUNDS` rounds they are every n-th evaluated round and the last
    one.
    """
    count = len(run.rounds)
    if count <= MOST_ROUNDS:
        return list(range(1, count + 1))
    evaluated = [i for i, row in enumerate(run.rounds, 1) if any("/acc" in name for name in row)] or range(1, count + 1)
    step = -(-len(evaluated) // (MOST_ROUNDS - 1))
    return sorted({*evaluated[step - 1 :: step], count})


def axes(run: Run, rounds: Sequence[int]) -> dict[str, list[float | int | None]]:
    """Return the x values of a run's curves, by x axis: round number, and total bytes and seconds until the round."""
    sent, seconds = x_values(run.rounds, "bytes"), x_values(run.rounds, "seconds")
    return {
        "round": list(rounds),
        "bytes": [round_number(sent[i - 1]) for i in rounds],
        "seconds": [round_number(seconds[i - 1]) for i in rounds],
    }


def metrics(run: Run, rounds: Sequence[int]) -> dict[str, list[float | int | None]]:
    """Return each metric's values at some rounds of a run, None where missing; metrics without values are left out."""
    names = dict.fromkeys(name for row in run.rounds for name in row if name != "round")
    columns = {name: [round_number(run.rounds[i - 1].get(name, math.nan)) for i in rounds] for name in names}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def clients(run: Run, rounds: Sequence[int]) -> dict[str, Any]:
    """Return the distribution of each metric over a run's clients: quantiles by round, and values in the last round.

    Raises:
        FileNotFoundError: `clients.csv` does not exist.
        ValueError: The file is not a valid `clients.csv`.
    """
    columns = {name: np.asarray(column) for name, column in read_columns(run.run_dir / "clients.csv").items()}
    if not {"round", "client"} <= columns.keys():
        raise ValueError("the columns round and client are missing")
    round, client = columns.pop("round"), columns.pop("client")
    spreads = {name: _spread(round, client, values, rounds) for name, values in columns.items()}
    return {name: each for name, each in spreads.items() if each}


def _spread(round: np.ndarray, client: np.ndarray, values: np.ndarray, rounds: Sequence[int]) -> dict[str, Any] | None:
    """Return a metric's quantiles over clients in each of the rounds, and its values in the last one; None without any.

    Args:
        round: The round of each value, `(n,)`.
        client: The client of each value, `(n,)`.
        values: The metric, `(n,)`.
        rounds: The rounds to return.
    """
    kept = np.isfinite(values) & np.isfinite(client) & np.isin(round, rounds)
    if not kept.any():
        return None
    order = np.argsort(round[kept], kind="stable")
    round, client, values = round[kept][order], client[kept][order], values[kept][order]
    measured_rounds, starts = np.unique(round, return_index=True)
    parts = np.split(values, starts[1:])
    quantiles = np.array([np.quantile(part, QUANTILES) for part in parts]).T
    last = slice(starts[-1], None)
    chosen = np.linspace(0, len(parts[-1]) - 1, min(len(parts[-1]), MOST_POINTS)).astype(int)
    return {
        "rounds": measured_rounds.astype(int).tolist(),
        "quantiles": [[round_number(value) for value in line] for line in quantiles.tolist()],
        "last": {
            "round": int(measured_rounds[-1]),
            "client": client[last][chosen].astype(int).tolist(),
            "value": [round_number(value) for value in values[last][chosen].tolist()],
        },
    }


# --- names, groups and settings ---


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return the name of each run: the path of its folder relative to the folder that contains all runs."""
    folders = [run.run_dir.absolute() for run in runs]
    base = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(base)) for folder in folders]


def title_of(texts: Sequence[Mapping[str, str]], names: Sequence[str], unfinished: int = 0) -> str:
    """Return the title of a report, such as `FedAvg on Digits: 6 runs, 3 seeds`.

    For a single run, its name replaces the counts.

    Args:
        texts: The settings of each run.
        names: The name of each run.
        unfinished: The number of runs that have not finished.
    """
    methods, datasets, seeds = (
        list(dict.fromkeys(settings[key] for settings in texts if key in settings))
        for key in ("algorithm", "scenario.dataset", "seed")
    )
    what = " on ".join(filter(None, map(join_names, (methods, datasets))))
    counts = f"{len(names)} runs{f', {len(seeds)} seeds' if len(seeds) > 1 else ''}" if len(names) > 1 else names[0]
    counts += f", {unfinished} not finished" if unfinished else ""
    return f"{what}: {counts}" if what else counts


def split_settings(texts: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the settings that all runs have in common, and the other settings of each run."""
    common = {key: text for key, text in texts[0].items() if all(each.get(key) == text for each in texts)}
    return common, [{key: text for key, text in each.items() if key not in common} for each in texts]


def setting_texts(run: Run) -> dict[str, str]:
    """Return a run's settings as text, by key. Long texts are cut off."""
    texts = {key: format_setting(value) for key, value in run.settings.items()}
    return {key: each if len(each) <= MOST_TEXT else f"{each[: MOST_TEXT - 1]}…" for key, each in texts.items()}


def groups_of(runs: Sequence[Run]) -> tuple[list[str], list[list[Run]]]:
    """Group runs that differ only in the seed. Return a list of the groups' names and a list of their runs.

    Each run without a config, and each run that has not finished, is a separate group.
    """
    configured = [run for run in runs if run.config]
    groups = compare(configured, reference={}).groups if configured else []
    named = list(zip(group_labels(groups), [group.runs for group in groups], strict=True))
    named += [(run.run_dir.name, [run]) for run in runs if not run.config]
    names, members = [], []
    for name, group in named:
        if finished := [run for run in group if run.finished]:
            names.append(name)
            members.append(finished)
        unfinished = [run for run in group if not run.finished]
        names += [f"{name} (not finished: {run.run_dir.name})" for run in unfinished]
        members += [[run] for run in unfinished]
    return names, members


def metric_labels(runs: Sequence[Run], entries: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the label of each metric on axes, such as `Test accuracy`, by its name in `metrics.csv` or `clients.csv`.

    Args:
        runs: The runs.
        entries: The content of the report for each run.
    """
    splits = {evaluated_split(run.settings) for run in runs}
    split = splits.pop() if len(splits) == 1 else "test"
    labels = {name: axis_label(f"client/{name}", split=split) for entry in entries for name in entry["clients"]}
    return labels | {name: axis_label(name, split=split) for entry in entries for name in entry["metrics"]}


def summary(groups: Sequence[Sequence[Run]], reference: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a table with each group's final results, as mean ± sample standard deviation over the group's runs.

    The numbers of a column have the same number of decimal places. The column of the main metric is followed by the
    difference to the reference, with a test of significance.

    Args:
        groups: The runs of each group.
        reference: Settings of the reference, as in `compare`.

    Raises:
        ConfigError: The reference matches no group, or several.
    """
    names = dict.fromkeys(name for group in groups for run in group for name in run.summary)
    metrics = [*filter(re.compile(rf".*_(last|best)|R_.*|{EPSILON.pattern}").fullmatch, names)]
    metrics.sort(key=lambda name: (not name.startswith("global/"), not name.startswith("R_")))
    columns = {
        "runs": [str(len(group)) for group in groups],
        "rounds": [_rounds(group) for group in groups],
        **{
            name: column_texts(
                [[run.summary.get(name) for run in group] for group in groups], 1 if name.startswith("R_") else 4
            )
            for name in metrics
        },
        "MB": column_texts(
            [[run.rounds[-1].get("comm/total_bytes", math.nan) / 1e6 for run in group] for group in groups]
        ),
        "seconds": column_texts(
            [[sum(row.get("time/round_s", math.nan) for row in run.rounds) for run in group] for group in groups]
        ),
    }
    tested = differences(groups, reference)
    order = [*columns]
    if tested.header:
        columns[tested.header] = tested.texts
        last = f"{tested.metric}_last"
        order.insert(order.index(last) + 1 if last in order else len(order), tested.header)
    rows = [list(row) for row in zip(*(columns[name] for name in order), strict=True)]
    return {"columns": order, "rows": rows, "notes": tested.notes}


class Differences(NamedTuple):
    """A column of the summary with the differences of groups to the reference group.

    Attributes:
        metric: The metric that is compared.
        header: Name of the column; empty if there is no reference.
        texts: The cell of each group; None for a group without a difference.
        notes: Lines below the table.
    """

    metric: str
    header: str
    texts: list[str | None]
    notes: list[str]


def differences(groups: Sequence[Sequence[Run]], reference: Mapping[str, Any] | None) -> Differences:
    """Return the difference of each group to the reference group, with a paired t-test. Unfinished runs are left out.

    Args:
        groups: The runs of each group.
        reference: Settings of the reference, as in `compare`; by default FedAvg, if that is one group.

    Raises:
        ConfigError: The reference matches no group, or several.
    """
    finished = [run for group in groups for run in group if run.config and run.finished]
    if not finished:
        return Differences("", "", [], [])
    found = compare(finished, reference=reference)
    if not found.reference:
        return Differences(found.metric, "", [], found.remarks)
    group_of = {run: group for group in found.groups for run in group.runs}
    own = [group_of.get(group[0]) for group in groups]
    texts = [format_difference(group, found.digits) if group else None for group in own]
    notes = [f"{found.metric}, {difference_note(found.reference)}", *found.missing_seeds, *found.remarks]
    return Differences(found.metric, f"to {found.reference}", texts, notes)


def _rounds(group: Sequence[Run]) -> str:
    """Return the mean number of rounds of a group's runs, and for an unfinished run the planned number."""
    (text,) = column_texts([[len(run.rounds) for run in group]], 1)
    planned = group[0].config.get("rounds")
    return str(text) if group[0].finished or not isinstance(planned, int) else f"{text} of {planned}"


def column_texts(values: Sequence[Sequence[float | None]], most_places: int = 4) -> list[str | None]:
    """Return the mean ± standard deviation of each group's values, all with the same number of decimal places.

    The largest mean has four significant digits. Counts have none after the point. A deviation is left out if it is 0
    in all groups. If values are missing, their number follows: `0.5000 (2 of 3)`. A group without values has None.

    Args:
        values: The values of each group; None or NaN where missing.
        most_places: Maximum number of decimal places.

    Example:
        >>> column_texts([[0.5, 0.75], [0.5, None], [None]])
        ['0.6250 ± 0.1768', '0.5000 (1 of 2)', None]
    """
    known = [[value for value in group if value is not None and math.isfinite(value)] for group in values]
    figures = [spread(group) for group in known]
    places = decimal_places([value for group in known for value in group], [each.mean for each in figures if each])
    places = min(places, most_places)
    varied = any(each and each.std for each in figures)

    def text(figure: Spread | None, count: int, of: int) -> str | None:
        if figure is None:
            return None
        cell = mean_and_std(figure.mean, figure.std if varied else None, f".{places}f")
        return cell if count == of else f"{cell} ({count} of {of})"

    return [text(*each) for each in zip(figures, map(len, known), map(len, values), strict=True)]


def decimal_places(values: Sequence[float], means: Sequence[float]) -> int:
    """Return the number of decimal places of a column: none for counts with whole means, else 4 significant digits."""
    if all(value == int(value) for value in (*values, *means)):
        return 0
    largest = max(map(abs, means))
    return max(0, 4 - len(str(int(largest)))) if largest > 1 else 4


# --- partitions ---


def partitions(runs: Sequence[Run], names: Sequence[str], left_out: list[str]) -> list[dict[str, Any]]:
    """Return a dict for each distinct partition: the runs that have it, and its samples by client and class.

    The names of clients and classes are included. More than `MAX_COLUMNS` clients are averaged in groups.
    """
    found: dict[Any, dict[str, Any]] = {}
    cells = 0
    for i, run in enumerate(runs):
        path = f"{names[i]}/partition.csv"
        partition = read_or_skip(left_out, path, lambda run: read_counts(run.run_dir / "partition.csv"), run)
        if partition is None:
            continue
        counts, names_of = partition
        if known := found.get(key := (counts.shape, counts.tobytes(), *map(tuple, names_of))):
            known["runs"].append(i)
            continue
        drawn = group_clients(counts).T if len(counts) > MAX_COLUMNS else counts
        cells += drawn.size
        if cells > MOST_CELLS:
            left_out.append(f"{path}: earlier partitions fill the page")
            continue
        rows = [[round_number(count) for count in row] for row in drawn.tolist()]
        shown = {"clients": names_of.clients if len(counts) <= MOST_POINTS else [], "classes": names_of.classes}
        found[key] = {"runs": [i], "clients": len(counts), "counts": rows, "names": shown}
    return list(found.values())
