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
from fl_lightning.runs.partition import MAX_COLUMNS, group_clients


def partition_figure(counts: np.ndarray, path: Path) -> None:
    """Draw a partition: a bubble per client and class, with an area proportional to the number of samples.

    More than 200 clients are drawn as a heat map: clients are sorted by their largest class and its size, and grouped
    into 200 columns, each the mean of its clients.

    Args:
        counts: `(clients, C)` samples.
        path: The PNG to write.
    """
    clients, classes = counts.shape
    if clients > MAX_COLUMNS:
        title = f"mean samples of {clients:,} clients"
        write_png(heat_maps({title: group_clients(counts)}, "class", "clients, sorted"), path)
        return
    figure = Figure(figsize=(min(2 + 0.35 * clients, 24), min(1.5 + 0.3 * classes, 24)), layout="constrained")
    axes = figure.subplots()
    client, label = np.nonzero(counts)
    area = 220 * counts[client, label] / max(counts.max(), 1)
    axes.scatter(client, label, s=area, alpha=0.7, linewidths=0)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
    axes.set_title(f"{counts.sum():,} training samples; the largest bubble is {counts.max():,}", fontsize=9)
    for axis, size in ((axes.xaxis, clients), (axes.yaxis, classes)):
        axis.set_ticks(range(0, size, max(1, size // 20)))
    write_png(figure, path)


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
    matrices: Mapping[str, np.ndarray], rows: str = "client", columns: str = "class", ids: Sequence[int] = ()
) -> Figure:
    """Draw matrices side by side, each with its own colour scale.

    Args:
        matrices: Title to `(n, m)` matrix.
        rows: Label of the rows.
        columns: Label of the columns.
        ids: Names of the rows, for matrices with as many rows; otherwise 0, 1, ...
    """
    figure, places = panels(len(matrices))
    for axes, (title, matrix) in zip(places, matrices.items(), strict=True):
        heat_map(axes, matrix, title, ids)
        axes.set_xlabel(columns)
    places[0].set_ylabel(rows)
    return figure


def heat_map(axes: Axes, matrix: np.ndarray, title: str, ids: Sequence[int] = ()) -> None:
    """Draw a matrix as a heat map; with negative entries, the colour scale is centred at zero."""
    largest = np.abs(matrix).max() if (matrix < 0).any() else None
    limits = {} if largest is None else {"vmin": -largest, "vmax": largest}
    image = axes.imshow(matrix, aspect="auto", cmap="Blues" if largest is None else "RdBu_r", **limits)
    axes.set_title(title, fontsize=9)
    for axis, size in ((axes.xaxis, matrix.shape[1]), (axes.yaxis, len(matrix))):
        axis.set_ticks(range(0, size, max(1, size // 10)))
    if len(ids) == len(matrix):
        axes.set_yticks(axes.get_yticks(), [str(ids[int(i)]) for i in axes.get_yticks()])
    axes.figure.colorbar(image, ax=axes)


def lines(axes: Axes, series: Mapping[str, tuple[ArrayLike, ArrayLike]], ylabel: str, xlabel: str = "round") -> None:
    """Draw each series of points `(x, y)` as a line, labelled with its name."""
    for name, (x, y) in series.items():
        axes.plot(x, y, label=name, marker=".")
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) > 1:
        axes.legend(fontsize=8)


def bars(axes: Axes, labels: Sequence[int], heights: np.ndarray, title: str, xlabel: str = "client") -> None:
    """Draw a bar chart with one bar per label."""
    axes.bar([str(label) for label in labels], heights)
    axes.set_xlabel(xlabel)
    axes.set_title(title, fontsize=9)
