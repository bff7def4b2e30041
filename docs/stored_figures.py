"""Draw the figures of runs that take too long to repeat, from their stored results: `python docs/stored_figures.py`.

The numbers are those of docs/images/compression.csv and of the first tables with ranks in docs/results.md.
"""

from __future__ import annotations

import csv
import re
from itertools import groupby
from pathlib import Path

import numpy as np
from matplotlib import rc_context

from fl_lightning.analysis.rank_figure import rank_figure
from fl_lightning.runs.axis_labels import axis_label
from fl_lightning.runs.curves import Curve
from fl_lightning.runs.figure_style import figure_style
from fl_lightning.runs.paper_figure import PaperFigure, add_legend, draw_curves, paper_figure
from fl_lightning.runs.styles import numbered_styles

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
RANK_ROW = re.compile(r"^\| (\S+) \| (?:[^|]+\| ){3}([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def compression() -> PaperFigure:
    """Return a figure of the accuracy by uploaded megabytes, with a curve for each compressor."""
    curves = {}
    with (IMAGES / "compression.csv").open() as file:
        for name, rows in groupby(csv.DictReader(file), lambda row: row["compression"]):
            each = [[float(row[column]) for column in ("uploaded_mb", "mean", "std")] for row in rows]
            uploaded, mean, std = np.array(each).T
            curves[name] = Curve(1e6 * uploaded, mean, std, (len(each), len(each)))
    with rc_context(figure_style()):
        figure, [axes] = paper_figure("column")
        lines = draw_curves([axes], [curves], numbered_styles(curves), "bytes")
        axes.set(xscale="log", xlabel="Total uploads (MB)", xlim=(0.1, 200), ylim=(60, 100))
        axes.set_ylabel(axis_label("global/acc", percent=True))
        add_legend(figure, lines)
    return figure


def ranks() -> PaperFigure:
    """Return a figure of the mean ranks over three scenarios of methods with a global model, tuned and not tuned."""
    table = (DOCS / "results.md").read_text().partition("| rank | rank untuned |")[2].partition("\n\n")[0]
    rows = RANK_ROW.findall(table)
    return rank_figure(*({row[0]: [float(row[column])] * 3 for row in rows} for column in (1, 2)))


if __name__ == "__main__":
    with rc_context({"svg.hashsalt": "fl-lightning", "svg.fonttype": "none"}):
        for name, figure in (("compression", compression()), ("benchmark_ranks", ranks())):
            figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
