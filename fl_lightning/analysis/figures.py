"""Figures of many runs for papers: curves, bars, distributions over clients, and partitions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from fl_lightning.analysis.comparison import Comparison, across_values, compare
from fl_lightning.analysis.run_groups import Group, group_labels, group_styles, setting_label
from fl_lightning.analysis.run_settings import compared_settings, varied_settings
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.names import join_names, shorten_name
from fl_lightning.runs.axis_labels import axis_label, evaluated_split
from fl_lightning.runs.curves import Curve, XAxis, mean_curve, scale
from fl_lightning.runs.figure_style import FONT_SIZE, figure_style, letter_width
from fl_lightning.runs.paper_figure import PaperFigure, add_legend, draw_curves, draw_partitions, paper_figure, pick
from fl_lightning.runs.partition import PartitionCounts, read_counts
from fl_lightning.runs.reader import Run, known_metric, read_clients
from fl_lightning.runs.styles import COLOURS, HATCHES, Style

Kind = Literal["curves", "bars", "clients", "partition"]

UNUSED: dict[Kind, set[str]] = {
    "curves": set(),
    "bars": {"x"},
    "clients": {"x"},
    "partition": {"x", "y", "percent", "y_limits"},
}
"""The options that a kind of figure does not use."""

MOST_POINTS = 1000
"""Maximum number of clients of a group that are drawn as points."""
CLUSTER = 0.8
"""Width of a cluster of bars, as a share of the distance between the centres of two clusters."""


class Panels(NamedTuple):
    """The groups of runs in each panel of a figure, with the groups' labels.

    Attributes:
        groups: The groups by label, for each panel by its title: one panel without a title, or one per value of a
            setting.
        styles: The style of each label.
        ranked: The labels by the final value of the metric, highest first.
    """

    groups: dict[str, dict[str, Group]]
    styles: dict[str, Style]
    ranked: list[str]


def plot_runs(
    runs: Sequence[Run],
    kind: Kind = "curves",
    x: XAxis = "round",
    y: str | None = None,
    by: Sequence[str] = (),
    across: str | None = None,
    percent: bool = False,
    width: float | str = "column",
    font: str = "sans",
    font_size: float = FONT_SIZE,
    y_limits: Sequence[float] | None = None,
) -> PaperFigure:
    """Draw a figure for a paper that compares groups of runs. Runs of a group differ only in the seed.

    Args:
        runs: The runs, as `comparable_runs` or `open_runs` returns them.
        kind: `curves`: a metric by round, mean over seeds ± standard deviation. `bars`: the metric in the last
            evaluated round. `clients`: the distribution of a metric over clients in the last evaluated round.
            `partition`: the number of samples of each client and class.
        x: The x axis of curves: `round`, or the `bytes` (up and down) or `seconds` until the end of a round.
        y: The metric: a column of `metrics.csv`, by default `global/acc` if any run has it, else `client/acc_mean`.
            For `clients` a column of `clients.csv`, by default `acc`.
        by: Settings to group by: keys, or ends of keys; by default all that differ, as in `compare`.
        across: A setting. Each of its values gets axes of its own, or a cluster of bars or boxes.
        percent: Multiply the metric by 100.
        width: The width of a venue's column or text, such as `neurips` or `ieee-column`, or a number of inches.
            `column` and `text` are those of ICML.
        font: `sans`, `serif` (similar to Times), or the name of an installed font.
        font_size: Size of axis labels in points, such as the size of the paper's captions. Ticks and legends are one
            point smaller.
        y_limits: The lowest and the highest value of the y axis, as it is drawn. By default, they fit the values.

    Returns:
        The figure. `savefig` writes it with embedded fonts; `notes` has the lines for a caption.

    Raises:
        ConfigError: An option is unknown or does not fit the kind of figure or the runs.
    """
    if kind not in UNUSED:
        raise ConfigError(f"kind: {kind!r} is unknown. Use {', '.join(UNUSED)}.")
    given = {"x": x != "round", "y": y is not None, "percent": percent, "y_limits": y_limits is not None}
    if unused := [name for name in given if given[name] and name in UNUSED[kind]]:
        raise ConfigError(f"{unused[0]}: a figure of kind {kind} does not use it. Leave it out.")
    metric = y
    if kind == "clients":
        y = y or "acc"
        mean = f"client/{y}_mean"  # ranks the groups
        metric = mean if any(mean in row for run in runs for row in run.rounds) else None
    elif y is not None:
        known_metric(y, runs, "y")
    found = compare(runs, by, metric, reference={}, across=across)
    panels = arrange(found)
    with rc_context(figure_style(font, font_size)):
        if kind == "partition":
            return partition_figure(panels, width)
        if kind == "curves":
            figure = curves_figure(found, panels, x, percent, width)
        elif kind == "bars":
            figure = bars_figure(found, panels, percent, width)
        else:
            figure = clients_figure(found, panels, str(y), percent, width)
        set_y_limits(figure, y_limits)
        return figure


def set_y_limits(figure: PaperFigure, limits: Sequence[float] | None) -> None:
    """Set the limits of the y axes, if they are given.

    Raises:
        ConfigError: They are not two numbers, the lower one first.
    """
    if limits is None:
        return
    if len(limits) != 2 or not all(map(math.isfinite, limits)) or not limits[0] < limits[1]:
        shown = " ".join(f"{limit:g}" for limit in limits)
        raise ConfigError(f"y_limits: {shown} is no range. Give the lower and the higher end, such as 60 100.")
    for axes in figure.axes:
        axes.set_ylim(*limits)


def arrange(found: Comparison) -> Panels:
    """Assign the groups of runs to the panels of a figure, and label them.

    There is one panel for each value of the setting `found.across`; a single panel if there is no such setting.
    """
    key, values = found.across, across_values(found) or [""]
    titles = {value: value if key in ("", "algorithm") else setting_label(key, value) for value in values}
    others = [replace(group, names={k: v for k, v in group.names.items() if k != key}) for group in found.groups]
    labels = group_labels(others)
    panels: dict[str, dict[str, Group]] = {title: {} for title in titles.values()}
    finals: dict[str, list[float]] = {label: [] for label in labels}
    members: dict[str, list[Run]] = {label: [] for label in labels}
    for label, group in zip(labels, found.groups, strict=True):
        panels[titles[group.names.get(key, "")]][label] = group
        finals[label] += [group.last.mean] if group.last else []
        members[label] += group.runs
    ranked = sorted(finals, key=lambda label: np.nan_to_num(-np.mean(finals[label] or np.nan), nan=np.inf))
    styles = dict(zip(members, group_styles(members.items()), strict=True))
    return Panels(panels, styles, ranked)


# --- Kinds of figures ---


def curves_figure(found: Comparison, panels: Panels, x: XAxis, percent: bool, width: float | str) -> PaperFigure:
    """Draw each group's metric by round, bytes or seconds: the mean over its runs and a band of ± standard deviation.

    Raises:
        ConfigError: No group has a curve, or the x axis was not recorded.
    """
    curves = [_mean_curves(panel, found.metric, x, percent) for panel in panels.groups.values()]
    if not any(curves):
        raise ConfigError(f"y: {found.metric} has no value in a round that all runs of a group share. Use kind bars.")
    figure, places = paper_figure(width, len(curves))
    lines = draw_curves(places, curves, panels.styles, x)
    for axes, title in zip(places, panels.groups, strict=True):
        axes.set_title(shorten_name(title))
        if (place := axes.get_subplotspec()) and place.is_first_col():
            axes.set_ylabel(y_label(found, found.metric, percent), wrap=True)
    if len(panels.styles) > 1:
        add_legend(figure, {name: lines[name] for name in panels.ranked if name in lines})
    figure.notes = [*_curve_notes(found.metric, curves, x), *_remarks(found)]
    return figure


def _mean_curves(panel: Mapping[str, Group], metric: str, x: XAxis, percent: bool) -> dict[str, Curve]:
    """Return the mean curve of each group of a panel. Groups without a curve are left out."""
    curves = {name: mean_curve([run.rounds for run in group.runs], metric, x, percent) for name, group in panel.items()}
    return {name: curve for name, curve in curves.items() if curve}


def _curve_notes(metric: str, curves: Sequence[Mapping[str, Curve]], x: XAxis) -> list[str]:
    """Return the notes of a figure of curves: what a curve and its band are, and which curves are cut."""
    each_curve = [(name, curve) for panel in curves for name, curve in panel.items()]
    unit = "simulated seconds" if x == "simulated" else x
    at = "" if x == "round" else f", at the mean {unit} of each round"
    spread = any(curve.std is not None for _, curve in each_curve)
    over_seeds = f"mean over seeds{at}; band: ± standard deviation (n - 1)" if spread else "one run per group"
    cut = {name: curve.rounds for name, curve in each_curve if curve.rounds[0] < curve.rounds[1]}
    ends = [
        f"{name}: runs of {low} to {high} rounds; only rounds of all are drawn." for name, (low, high) in cut.items()
    ]
    return [f"{metric}: {over_seeds}.", *ends]


def bars_figure(found: Comparison, panels: Panels, percent: bool, width: float | str) -> PaperFigure:
    """Draw each group's metric in the last evaluated round as a bar: mean ± standard deviation over its runs."""
    figure, (axes,) = paper_figure(width)
    for place, size, name, group in clusters(axes, panels, figure.get_figwidth()):
        if group.last:
            std = np.nan if group.last.std is None else group.last.std
            mean, std = scale(np.array([group.last.mean, std]), found.metric, percent)
            error = None if np.isnan(std) else std
            axes.bar(place, mean, size, yerr=error, capsize=2, error_kw={"elinewidth": 0.8}, **fill(panels, name))
    axes.set_ylabel(y_label(found, found.metric, percent), wrap=True)
    add_cluster_legend(figure, panels)
    spread = any(group.last and group.last.std is not None for group in found.groups)
    over_seeds = "mean ± standard deviation over seeds (n - 1)" if spread else "one run per group"
    figure.notes = [f"{found.metric} in the last evaluated round: {over_seeds}.", *_remarks(found)]
    return figure


def clients_figure(found: Comparison, panels: Panels, name: str, percent: bool, width: float | str) -> PaperFigure:
    """Draw a box plot with points for each group: all clients' values of a metric in the last evaluated round.

    Raises:
        ConfigError: No run has the metric by client.
        DamagedRun: A `clients.csv` cannot be read.
    """
    columns = {run: read_clients(run.run_dir) for group in found.groups for run in group.runs}
    if not any(name in each for each in columns.values()):
        names = sorted({column for each in columns.values() for column in each} - {"round", "client"})
        raise ConfigError(f"y: no clients.csv has {name!r}. Available: {', '.join(names) or 'none'}.")
    figure, (axes,) = paper_figure(width)
    rng = np.random.default_rng(0)  # only spreads the points
    for place, size, label, group in clusters(axes, panels, figure.get_figwidth()):
        values = [last_values(columns[run], name) for run in group.runs if name in columns[run]]
        shown = scale(np.concatenate([*values, []]), name, percent)
        if not len(shown):
            continue
        look = fill(panels, label)
        axes.boxplot([shown], positions=[place], widths=size, manage_ticks=False, boxprops=look | {"alpha": 0.5})
        points = shown[np.linspace(0, len(shown) - 1, min(len(shown), MOST_POINTS)).astype(int)]
        places = place + rng.uniform(-size / 4, size / 4, len(points))
        axes.scatter(places, points, s=3, color=look["facecolor"], linewidths=0, zorder=3)
    axes.set_ylabel(y_label(found, f"client/{name}", percent), wrap=True)
    add_cluster_legend(figure, panels)
    figure.notes = [
        f"{name} of the clients in the last evaluated round, over all seeds; whiskers: up to 1.5 times the box.",
        *_remarks(found),
    ]
    return figure


def last_values(columns: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    """Return the clients' values of a metric in the last round for which the metric was recorded.

    Clients without a value in this round are left out.

    Args:
        columns: The columns of the run's `clients.csv`.
        name: The column of the metric.
    """
    known = np.isfinite(columns[name])
    last = columns["round"][known].max(initial=0)
    return columns[name][known & (columns["round"] == last)]


def partition_figure(panels: Panels, width: float | str) -> PaperFigure:
    """Draw the partition of the runs in each panel, all on one scale: a bubble per client and class.

    Raises:
        ConfigError: The runs of a panel have several partitions, or a file cannot be read.
    """
    found = [_partition([run for group in panel.values() for run in group.runs]) for panel in panels.groups.values()]
    return draw_partitions(dict(zip(panels.groups, found, strict=True)), width)


def _partition(runs: Sequence[Run]) -> PartitionCounts:
    """Return the partition that all runs have in common."""
    found: dict[Any, PartitionCounts] = {}
    partitions = {}
    for run in runs:
        try:
            partition = read_counts(run.run_dir / "partition.csv")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{run.run_dir}: partition.csv cannot be read: {one_line(error)}") from error
        partitions[run] = partition.counts.shape, partition.counts.tobytes()
        found[partitions[run]] = partition
    if len(found) > 1:
        raise ConfigError(f"kind: the runs have {len(found)} different partitions. {_one_partition(partitions)}")
    return next(iter(found.values()))


def _one_partition(partitions: Mapping[Run, Any]) -> str:
    """Return the options that select runs with one partition, given the partition of each run, as a sentence."""
    left, chosen = dict(partitions), {}
    for key in ("seed", *varied_settings({run: compared_settings(run) for run in partitions})):
        value = next(iter(left)).settings.get(key)
        same = {run: each for run, each in left.items() if run.settings.get(key) == value}
        if len({*same.values()}) < len({*left.values()}) and isinstance(value, int | float | str):
            left, chosen[key] = same, value
    if len({*left.values()}) > 1:
        return "Give runs that have the same partition."
    texts = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in chosen.items())
    return f"Add --where {' '.join(texts)}."


# --- Parts of figures ---


def y_label(found: Comparison, metric: str, percent: bool) -> str:
    """Return the label of the y axis. It says validation instead of test if all runs are evaluated on this split."""
    splits = {evaluated_split(run.settings) for group in found.groups for run in group.runs}
    return axis_label(metric, percent, splits.pop() if len(splits) == 1 else "test")


def clusters(axes: Axes, panels: Panels, width: float) -> Iterator[tuple[float, float, str, Group]]:
    """Arrange bars or boxes in clusters: yield the x position, width, label and group of each.

    With several panels, each is a cluster of bars; otherwise each bar has its label below it. The x axis is labelled.
    """
    if len(panels.groups) > 1:
        ticks, size = list(panels.groups), CLUSTER / len(panels.styles)
        shifts = {label: (i - (len(panels.styles) - 1) / 2) * size for i, label in enumerate(panels.ranked)}
        bars = [
            (i + shifts[label], label, panel[label])
            for i, panel in enumerate(panels.groups.values())
            for label in panels.ranked
            if label in panel
        ]
    else:
        (panel,) = panels.groups.values()
        ticks, size = panels.ranked, CLUSTER
        bars = [(i, label, panel[label]) for i, label in enumerate(ticks)]
    yield from ((place, size, label, group) for place, label, group in bars)
    ticks = [shorten_name(tick) for tick in ticks]
    crowded = sum(map(len, ticks)) * letter_width() > width
    axes.set_xticks(range(len(ticks)), ticks, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.grid(visible=False, axis="x")
    axes.margins(x=0.03)


def fill(panels: Panels, label: str) -> dict[str, Any]:
    """Return the colour and hatch of a group's bar or box."""
    colour, hatch = pick(COLOURS, panels.styles[label].colour), pick(HATCHES, panels.styles[label].line)
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0}


def add_cluster_legend(figure: PaperFigure, panels: Panels) -> None:
    """Add a legend with the colour of each group of runs to a plot with several clusters of bars or boxes.

    Each panel is one cluster. A single cluster needs no legend, because each bar or box has its label below it.
    """
    if len(panels.groups) > 1:
        add_legend(figure, {label: Patch(**fill(panels, label)) for label in panels.ranked})


def _remarks(found: Comparison) -> list[str]:
    unfinished = sorted(str(run.run_dir) for group in found.groups for run in group.runs if not run.finished)
    noted = [f"not finished: {join_names(unfinished)}."] * bool(unfinished)
    return [*found.missing_seeds, *noted, *(f"{remark}." for remark in found.remarks)]
