"""Figures, drawn without a screen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure


def partition_figure(counts: np.ndarray, path: Path) -> None:
    """Draw who holds what: a bubble a client and class, its area the number of samples.

    Args:
        counts: `(clients, C)` samples.
        path: The PNG to write.
    """
    clients, classes = counts.shape
    figure = Figure(figsize=(min(2 + 0.35 * clients, 24), min(1.5 + 0.3 * classes, 24)), layout="constrained")
    axes = figure.subplots()
    client, label = np.nonzero(counts)
    area = 220 * counts[client, label] / max(counts.max(), 1)
    axes.scatter(client, label, s=area, alpha=0.7, linewidths=0)
    axes.set(xlabel="client", ylabel="class", xlim=(-0.7, clients - 0.3), ylim=(-0.7, classes - 0.3))
    axes.set_title(f"{counts.sum():,} training samples; the largest bubble is {counts.max():,}", fontsize=9)
    for axis, size in ((axes.xaxis, clients), (axes.yaxis, classes)):
        axis.set_ticks(range(0, size, max(1, size // 20)))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
