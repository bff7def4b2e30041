"""Draw curves and partitions for papers, with legends. Does not use pyplot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import rc_context, rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from fl_lightning.core.names import Names, labels, shorten_name
from fl_lightning.evaluation.summary import Row, label_of
from fl_lightning.runs.axis_labels import common_label
from fl_lightning.runs.curves import Curve, XAxis, mean_curve
from fl_lightning.runs.figure_style import FILES, legend_row, width_in_inches
from fl_lightning.runs.partition import MAX_COLUMNS, PartitionCounts, group_clients
from fl_lightning.runs.styles import COLOURS, LINE_STYLES, MARKERS, Style, numbered_styles

LARGEST_BUBBLE = 22
"""Maximum diameter of the bubbles of a partition in points, so that they fit in the legend."""
BUBBLE = 0.7
"""Opacity of the bubbles of a partition."""
MOST_MARKERS = 8
"""Maximum number of markers on a curve."""
STEPS = (1, 2, 5, 10)
"""Distances between the ticks of an x axis, times a power of ten."""
TICK_LETTERS, AXIS_LETTERS = 16, 30
"""Maximum number of characters of one tick label, and of all tick labels of an x axis before they are rotated."""

SECONDS = {"h": 3600.0, "min": 60.0, "s": 1.0}
UNITS: dict[str, tuple[str, dict[str, float]]] = {
    "bytes": ("Total communication", {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1}),
    "seconds": ("Wall-clock time", SECONDS),
    "simulated": ("Simulated time", SECONDS),
}
"""Label of an x axis, and its units with their sizes, the largest first."""


class PaperFigure(Figure):
    """A Matplotlib figure for a paper: saved files contain their fonts, and a notebook shows it without pyplot.

    Attributes:
        notes: Lines for the caption: what the figure shows, and remarks about the runs.
    """

    notes: Sequence[str] = ()

    def savefig(self, fname: Any, **options: Any) -> None:
        """Save the figure with embedded TrueType fonts, and images with 300 dpi."""
        with rc_context(FILES):
            super().savefig(fname, **options)

    def _repr_png_(self) -> bytes:
        self.savefig(image := BytesIO(), format="png", dpi=150)
        return image.getvalue()


def paper_figure(width: float | str, panels: int = 1, height: float = 0) -> tuple[PaperFigure, list[Axes]]:
    """Create a figure with axes side by side, in several rows if needed.

    Call it and draw within `rc_context(figure_style())`.

    Args:
        width: A name in `WIDTHS`, or a number of inches.
        panels: Number of axes.
        height: Minimum height of the axes in inches.

    Raises:
        ConfigError: The width is unknown, or not between 1 and 50 inches.
    """
    inches = width_in_inches(width)
    columns = max(1, min(panels, int(inches // 1.5)))
    rows = -(-panels // columns)
    height = max(height, min(max(0.65 * inches / columns, 1.5), 2.4))
    figure = PaperFigure(figsize=(inches, rows * height), layout="constrained")
    grid = figure.subplots(rows, columns, sharey=True, squeeze=False).flatten()
    for axes in grid[panels:]:
        axes.remove()
    return figure, list(grid[:panels])


def plot_run(
    rows: Sequence[Row],
    metrics: Sequence[str],
    x: XAxis,
    percent: bool,
    width: float | str,
    style: Any,
    split: str = "test",
) -> PaperFigure:
    """Plot metrics of one run as curves over rounds, bytes or seconds, and return the figure.

    Args:
        rows: The metrics of each round.
        metrics: The columns of `metrics.csv` to plot.
        x: The x axis.
        percent: Multiply the metrics by 100.
        width: A name in `WIDTHS`, or a number of inches.
        style: Matplotlib's settings, as `figure_style` returns them.
        split: The samples on which models are evaluated: `test` or `validation`.

    Raises:
        ConfigError: A metric has no value, the x axis was not recorded, or the width is unknown.
    """
    with rc_context(style):
        figure, places = paper_figure(width)
        curves = {name: mean_curve([rows], name, x, percent) for name in metrics}
        known = {name: curve for name, curve in curves.items() if curve}
        lines = draw_curves(places, [known], numbered_styles(metrics), x)
        if len(lines) > 1:
            add_legend(figure, {label_of(name): line for name, line in lines.items()})
        places[0].set_ylabel(common_label(metrics, percent, split), wrap=True)
    return figure


def add_legend(figure: Figure, entries: Mapping[str, Artist]) -> None:
    """Add a legend above the axes, line by line in the given order, with as many columns as fit. The figure grows."""
    names, count = list(entries), len(entries)
    for rows in range(1, count + 1):
        columns = -(-count // rows)
        order = [names[i] for column in range(columns) for i in range(column, count, columns)]  # it is filled by column
        artists, shown = [entries[name] for name in order], [shorten_name(name) for name in order]
        legend = figure.legend(artists, shown, loc="outside upper center", ncols=columns, handlelength=2.8)
        if columns == 1 or legend.get_window_extent().width <= figure.bbox.width:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + legend_row() * rows)


def pick(options: Sequence[str], number: int) -> str:
    """Return the option at an index, such as a colour or a hatch. After the last option, they start again."""
    return options[number % len(options)]


def draw_curves(
    places: Sequence[Axes], curves: Sequence[Mapping[str, Curve]], styles: Mapping[str, Style], x: XAxis
) -> dict[str, Artist]:
    """Draw curves as lines with a band of ± standard deviation.

    Args:
        places: The axes.
        curves: The curves of each axes by name, at least one.
        styles: The style of each name.
        x: The x axis of the curves.

    Returns:
        A line of each name for the legend.
    """
    unit, size = _unit(x, max(curve.x.max() for each in curves for curve in each.values()))
    artists: dict[str, Artist] = {}
    for axes, each in zip(places, curves, strict=True):
        for name, curve in each.items():
            style, number = styles[name], list(styles).index(name)
            colour, step = pick(COLOURS, style.colour), max(1, len(curve.x) // MOST_MARKERS)
            (line,) = axes.plot(
                *(curve.x / size, curve.mean),
                color=colour,
                linestyle=pick(LINE_STYLES, style.line),
                marker=pick(MARKERS, style.marker),
                markevery=(number * step // len(styles), step),  # markers of overlapping curves alternate
            )
            artists.setdefault(name, line)
            if curve.std is not None:
                low, high = curve.mean - curve.std, curve.mean + curve.std
                axes.fill_between(curve.x / size, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.set_xlabel(unit)
        axes.xaxis.set_major_locator(MaxNLocator(5, steps=STEPS, integer=x == "round"))
        axes.margins(x=0.02)
    return artists


def _unit(x: XAxis, largest: float) -> tuple[str, float]:
    """Return the label of an x axis, such as `Wall-clock time (min)`, and the size of its unit, such as 60."""
    if x not in UNITS:
        return "Communication rounds", 1
    label, units = UNITS[x]
    unit = next((unit for unit, size in units.items() if size <= largest), list(units)[-1])
    return f"{label} ({unit})", units[unit]


def draw_partition(
    axes: Axes, counts: np.ndarray, area: float = 220, names: Names = Names(), largest: float | None = None
) -> None:
    """Draw a partition: a bubble per client and class, with an area proportional to the number of samples.

    More than 200 clients are drawn as a heat map: clients are sorted by their largest class and its size, and grouped
    into 200 columns, each the mean of its clients.

    Args:
        axes: The axes.
        counts: `(clients, C)` samples.
        area: Area of a bubble of `largest` samples, in square points.
        names: Names of the clients and classes.
        largest: The number of samples at the end of the scale, by default the largest that is drawn.
    """
    clients, classes = counts.shape
    if clients > MAX_COLUMNS:
        heat_map(axes, group_clients(counts), f"mean samples of {clients:,} clients", names.classes, largest=largest)
        axes.set(xlabel="Clients, sorted", ylabel="Class")
        return
    client, label = np.nonzero(counts)
    areas = area * counts[client, label] / (largest or max(counts.max(), 1))
    axes.scatter(client, label, s=areas, color=COLOURS[0], alpha=BUBBLE, linewidths=0)
    axes.set(xlabel="Client", ylabel="Class", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
    set_ticks(axes.xaxis, clients, names.clients)
    set_ticks(axes.yaxis, classes, names.classes)


def draw_partitions(partitions: Mapping[str, PartitionCounts], width: float | str) -> PaperFigure:
    """Draw partitions side by side on one scale, with a legend of the sizes of bubbles.

    Call it within `rc_context(figure_style())`.

    Args:
        partitions: The partitions by title.
        width: A name in `WIDTHS`, or a number of inches.
    """
    counts = [each.counts for each in partitions.values()]
    classes = max(each.shape[1] for each in counts)
    room = float(any(names.clients for _, names in partitions.values()))  # inches for rotated names below the axes
    figure, places = paper_figure(width, len(counts), min(0.12 * classes + 0.6 + room, 5))
    extent = places[0].get_window_extent()
    height = extent.height - room * figure.dpi
    bubbles = [each for each in counts if len(each) <= MAX_COLUMNS]
    cells = [min(extent.width / len(each), height / each.shape[1]) * 72 / figure.dpi for each in bubbles]
    area, most = min([*cells, LARGEST_BUBBLE]) ** 2, max((int(each.max()) for each in bubbles), default=0)
    darkest = max((group_clients(each).max() for each in counts if len(each) > MAX_COLUMNS), default=0)
    for axes, (title, (each, names)) in zip(places, partitions.items(), strict=True):
        draw_partition(axes, each, area, names, most if len(each) <= MAX_COLUMNS else darkest)
        for axis, named in ((axes.xaxis, names.clients and len(each) <= MAX_COLUMNS), (axes.yaxis, names.classes)):
            if not named:
                axis.set_major_locator(MaxNLocator("auto", steps=STEPS, integer=True))
        axes.set_title(", ".join(filter(None, [shorten_name(title), axes.get_title()])))
        axes.label_outer()
    if most:
        add_bubble_legend(figure, most, area)
    largest = ", ".join(f"{each.max():,}" for each in counts)
    figure.notes = [f"training samples by client and class; the largest count is {largest}."]
    return figure


def add_bubble_legend(figure: Figure, largest: int, area: float) -> None:
    """Add a legend above the axes with bubbles of three sizes. The figure grows.

    Args:
        figure: The figure.
        largest: The number of samples of the largest bubble.
        area: Area of the largest bubble in square points.
    """
    counts = dict.fromkeys([largest, *(int(float(f"{largest / part:.0e}")) or 1 for part in (4, 16))])
    side = area**0.5
    style: Any = {"color": COLOURS[0], "marker": "o", "linestyle": "", "alpha": BUBBLE, "markeredgewidth": 0}
    bubbles = [Line2D([], [], markersize=side * (count / largest) ** 0.5, **style) for count in counts]
    texts = [f"{count:,}" for count in counts]
    texts[-1] += " samples"
    size = float(rcParams["legend.fontsize"])
    height = side / size + 0.7  # of the largest bubble and its margin, in font sizes
    places: Any = {
        "handleheight": height,
        "handlelength": height,
        "ncols": len(texts),
        "columnspacing": 1,
        "handletextpad": 0.4,
    }
    figure.legend(bubbles, texts, loc="outside upper center", **places)
    figure.set_figheight(figure.get_figheight() + side / 72 + legend_row() / 2)


def heat_map(
    axes: Axes,
    matrix: np.ndarray,
    title: str,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    largest: float | None = None,
) -> None:
    """Draw a matrix as a heat map; with negative entries, the colour scale is centred at zero.

    Args:
        axes: The axes.
        matrix: `(n, m)`.
        title: Title of the axes.
        rows: Names of the rows. Used if there are `n`.
        columns: Names of the columns. Used if there are `m`.
        largest: The end of a colour scale from zero, by default that of the matrix.
    """
    signed = bool((matrix < 0).any())
    end = np.abs(matrix).max() if signed else largest
    limits: Any = {} if end is None else {"vmin": -end if signed else 0, "vmax": end}
    image = axes.imshow(matrix, aspect="auto", cmap="RdBu_r" if signed else "Blues", **limits)
    axes.set_title(title, fontsize=9)
    axes.grid(visible=False)
    set_ticks(axes.xaxis, matrix.shape[1], columns, 10)
    set_ticks(axes.yaxis, len(matrix), rows, 10)
    axes.figure.colorbar(image, ax=axes)


def set_ticks(axis: Axis, size: int, names: Sequence[str] = (), number: int = 20) -> None:
    """Set about `number` ticks on an axis of `size` clients or classes, labelled by name if all of them have a name.

    Without names, the labels are the indices. Many names below an x axis are rotated.
    """
    places, named = range(0, size, max(1, size // number)), len(names) == size
    texts = [shorten_name(text, TICK_LETTERS) for text in labels(names if named else (), places)]
    axis.set_ticks(places, texts, parse_math=False)
    if named and axis is axis.axes.xaxis and len(texts) * max(map(len, texts), default=0) > AXIS_LETTERS:
        axis.set_tick_params(rotation=90)
