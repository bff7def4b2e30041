"""Collect the JSON data of an HTML report from runs: settings, metrics, clients and partitions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fl_lightning.analysis.comparison import compare
from fl_lightning.analysis.html_report.run_files import last_images, read_or_skip
from fl_lightning.analysis.run_groups import group_labels, group_styles
from fl_lightning.analysis.run_settings import format_setting
from fl_lightning.analysis.statistics import spread
from fl_lightning.core.names import join_names
from fl_lightning.evaluation.summary import EPSILON
from fl_lightning.runs.csv_reader import read_columns
from fl_lightning.runs.curves import x_values
from fl_lightning.runs.partition import MAX_COLUMNS, group_clients, read_counts
from fl_lightning.runs.reader import Run

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


def contents(runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything that the report of some runs shows, as JSON data with five significant digits per number."""
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
        "summary": summary(groups),
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


def summary(groups: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Return a table with each group's final results, as mean ± sample standard deviation over the group's runs."""
    names = dict.fromkeys(name for group in groups for run in group for name in run.summary)
    shown = re.compile(rf".*_(last|best)|R_.*|{EPSILON.pattern}")
    columns = [*filter(shown.fullmatch, names)]
    columns.sort(key=lambda name: (not name.startswith("global/"), not name.startswith("R_")))
    rows = []
    for group in groups:
        figures = [_mean_and_deviation([run.summary.get(name) for run in group]) for name in columns]
        rounds = _mean_and_deviation([len(run.rounds) for run in group])
        sent = _mean_and_deviation([run.rounds[-1].get("comm/total_bytes", math.nan) / 1e6 for run in group])
        seconds = _mean_and_deviation([sum(row.get("time/round_s", math.nan) for row in run.rounds) for run in group])
        rows.append([str(len(group)), rounds, *figures, sent, seconds])
    return {"columns": ["runs", "rounds", *columns, "MB", "seconds"], "rows": rows}


def _mean_and_deviation(values: Sequence[float | None]) -> str | None:
    """Return the mean ± standard deviation of the finite values, with their count if other values are missing."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    figures = spread(known)
    if figures is None:
        return None
    cell = f"{figures.mean:.4g} ± {figures.std:.2g}" if figures.std else f"{figures.mean:.4g}"
    return cell if len(known) == len(values) else f"{cell} ({len(known)} of {len(values)})"


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
