"""`fl-lightning partition`: show how the data are partitioned among clients."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from jsonargparse import ArgumentParser, Namespace
from matplotlib import rc_context
from matplotlib.figure import Figure

from fl_lightning.analysis.summary_tables import partition_table
from fl_lightning.callbacks.plots import write_png
from fl_lightning.cli.commands.fit import expand
from fl_lightning.cli.experiment import instantiate
from fl_lightning.core.console import table_console
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.names import Names, labels
from fl_lightning.core.terminal import echo
from fl_lightning.data import FederatedData, Scenario
from fl_lightning.data.client_folders import write_client_folders
from fl_lightning.runs.figure_style import figure_style
from fl_lightning.runs.paper_figure import add_bubble_legend, draw_partition
from fl_lightning.runs.partition import MAX_COLUMNS, write_counts

__all__ = ["expand", "main"]

BUBBLE_AREA = 220
"""Area of the largest bubble in square points."""


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Print every client's number of samples of each class. With `--out`, also write them to a figure and a CSV."""
    if given.out and os.path.exists(Path(given.out, "metrics.csv")):  # False for an invalid name
        raise ConfigError(f"--out: {given.out} is the folder of a run. Choose another folder.")
    if given.export and not given.out:
        raise ConfigError("--export: to which folder? Give --out")
    scenario: Scenario = instantiate(given, parser).scenario
    data = scenario.build(given.seed)
    if schema := data.data.schema:
        echo(schema.summary())
    counts, test_counts = map(data.all_class_counts, ("train", "test"))
    names = names_of_everybody(data)
    echo("training samples by client" + " and class" * data.objective.classes)
    table_console().print(partition_table(counts, test_counts, names), no_wrap=True)
    if given.out:
        out = Path(given.out)
        try:
            write_figure(out / "partition.png", counts, names)
            write_counts(out / "partition.csv", data)
            if given.export:
                write_client_folders(out, data)
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            raise ConfigError(f"--out: {out} cannot be written to: {error}") from error
        echo(f"wrote {out / 'partition.png'} and {out / 'partition.csv'}")
        if given.export:
            echo(f"wrote {out}/client-0 to client-{len(data.shards) - 1}, and the global test set in {out}/test")
    return 0


def write_figure(path: Path, counts: np.ndarray, names: Names = Names()) -> None:
    """Draw a partition to a PNG file: a bubble per client and class, or a heat map for more than 200 clients.

    Args:
        path: The PNG to write.
        counts: `(clients, C)` samples.
        names: The names of the clients and classes.
    """
    clients, classes = counts.shape
    bubbles = clients <= MAX_COLUMNS
    width, height = max(2 + 0.35 * clients, 4), 1.5 + 0.3 * classes + bool(names.clients)  # names may be rotated
    size = (min(width, 24), min(height, 23.5)) if bubbles else (4.0, 3.4)  # the legend adds to the height
    with rc_context(figure_style(font_size=10)):
        figure = Figure(figsize=size, layout="constrained")
        draw_partition(axes := figure.subplots(), counts, BUBBLE_AREA, names)
        if bubbles and counts.max():
            axes.set_title(f"{counts.sum():,} training samples")
            add_bubble_legend(figure, int(counts.max()), BUBBLE_AREA)
    write_png(figure, path)


def names_of_everybody(data: FederatedData) -> Names:
    """Return the client and class names as `Names`. The names of clients that never train end with `held out`."""
    if not data.held_out:
        return data.names
    held_out = data.held_out_clients
    names = labels(data.names.clients, range(held_out.stop))
    return data.names._replace(clients=[f"{name} held out" if k in held_out else name for k, name in enumerate(names)])
