"""Images of a finished run for loggers: the partition and the learning curves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib import rc_context

from fl_lightning.evaluation.summary import Row, main_metrics
from fl_lightning.runs.figure_style import figure_style
from fl_lightning.runs.paper_figure import PaperFigure, draw_partitions, plot_run
from fl_lightning.runs.partition import PartitionCounts


@contextmanager
def run_images(rows: Sequence[Row], partition: PartitionCounts, split: str) -> Iterator[dict[str, str]]:
    """Context manager with PNG files of a run's figures, by name. The files are removed afterwards.

    The figures are `partition`, and `curves` with the run's main metrics, if it has any.

    Args:
        rows: The metrics of each round.
        partition: The number of training samples of each client and class.
        split: The samples on which models are evaluated: `test` or `validation`.
    """
    with TemporaryDirectory() as folder:
        paths = {}
        for name, figure in _figures(rows, partition, split).items():
            paths[name] = str(Path(folder, f"{name}.png"))
            figure.savefig(paths[name])
        yield paths


def _figures(rows: Sequence[Row], partition: PartitionCounts, split: str) -> dict[str, PaperFigure]:
    style = figure_style()
    with rc_context(style):
        figures = {"partition": draw_partitions({"": partition}, "text")}
    if metrics := main_metrics(rows):
        percent = all("/acc" in name for name in metrics)
        figures["curves"] = plot_run(rows, metrics, "round", percent, "column", style, split)
    return figures
