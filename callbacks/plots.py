"""Helper functions to draw figures without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike

from fl_lightning.core.files import write_atomically
from fl_lightning.runs.paper_figure import heat_map, set_ticks


def write_png(figure: Figure, path: Path) -> None:
    """Write a figure to a PNG file atomically."""
    write_atomically(path, to_png(figure))


def to_png(figure: Figure) -> bytes:
    """Return a figure as PNG data; identical figures give identical data."""
    figure.savefig(image := BytesIO(), format="png", dpi=120)
    return image.getvalue()


def panels(count: int) -> tuple[Figure, list[Axes]]:
    """Create a figure with `count` axes side by side."""
    figure = Figure(figsize=(3.6 * count + 0.4, 3.4), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def heat_maps(
    matrices: Mapping[str, np.ndarray],
    rows: str = "client",
    row_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
) -> Figure:
    """Draw matrices side by side, each with its own colour scale.

    Args:
        matrices: Title to `(n, m)` matrix.
        rows: Label of the rows.
        row_names: Names of the rows, for matrices with as many rows; otherwise 0, 1, ...
        column_names: Names of the columns, likewise.
    """
    figure, places = panels(len(matrices))
    for axes, (title, matrix) in zip(places, matrices.items(), strict=True):
        heat_map(axes, matrix, title, row_names, column_names)
        axes.set_xlabel("class")
    places[0].set_ylabel(rows)
    return figure


def lines(axes: Axes, series: Mapping[str, tuple[ArrayLike, ArrayLike]], ylabel: str, xlabel: str = "round") -> None:
    """Draw each series of points `(x, y)` as a line, labelled with its name."""
    for name, (x, y) in series.items():
        axes.plot(x, y, label=name, marker=".")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) > 1:
        axes.legend(fontsize=8)


def bars(axes: Axes, names: Sequence[str], heights: np.ndarray, title: str) -> None:
    """Draw a bar chart with one bar per client, given their names."""
    axes.bar(range(len(names)), heights)
    set_ticks(axes.xaxis, len(names), names)
    axes.set_xlabel("client")
    axes.set_title(title, fontsize=9)
