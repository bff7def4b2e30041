"""Figure of mean ranks over scenarios, with the critical difference of Nemenyi's test."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from matplotlib import rc_context
from matplotlib.ticker import MaxNLocator

from fl_lightning.runs.figure_style import figure_style
from fl_lightning.runs.paper_figure import PaperFigure, paper_figure
from fl_lightning.runs.styles import COLOURS

ROW = 0.16
"""Height of a method's row in inches."""


def critical_difference(methods: int, scenarios: int, alpha: float = 0.05) -> float:
    """Return the smallest difference between two methods' mean ranks that is significant in Nemenyi's test.

    `q_α · √(k (k + 1) / (6 N))` for k methods and N scenarios (Demšar, JMLR 2006, Section 3.2.2), where `q_α` is the
    studentized range statistic for infinitely many degrees of freedom divided by √2.

    Example:
        >>> round(critical_difference(methods=4, scenarios=14), 2)
        1.25
    """
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(1 - alpha, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * scenarios))


def rank_figure(
    ranks: Mapping[str, Sequence[float]],
    before: Mapping[str, Sequence[float]] | None = None,
) -> PaperFigure:
    """Return a figure of each method's mean rank, best first, and the critical difference to the best.

    Args:
        ranks: The ranks of each method, one per scenario.
        before: If given, the ranks without tuning, drawn as hollow points.
    """
    means = {method: fmean(each) for method, each in ranks.items()}
    methods, scenarios = sorted(means, key=lambda method: -means[method]), len(next(iter(ranks.values())))
    with rc_context(figure_style()):
        figure, [axes] = paper_figure("column", height=ROW * len(methods) + 0.8)
        rows = range(len(methods))
        if before:
            old = [fmean(before[method]) for method in methods]
            axes.hlines(rows, old, [means[method] for method in methods], color="#999999", linewidth=0.8)
            axes.plot(old, rows, "o", color=COLOURS[1], markerfacecolor="white", label="one learning rate for all")
        axes.plot([means[method] for method in methods], rows, "o", color=COLOURS[0], label="tuned")
        notes = [f"Mean rank over {scenarios} scenario{'s' * (scenarios > 1)}; 1 is the best."]
        if scenarios > 1 and len(methods) > 1:
            critical, best = critical_difference(len(methods), scenarios), min(means.values())
            axes.axvspan(best, best + critical, color=COLOURS[0], alpha=0.12, linewidth=0, label="critical difference")
            test = f"Nemenyi's test, p = 0.05, critical difference {critical:.2f}"
            notes.append(f"Shaded: not significantly worse than the best ({test}).")
        axes.set_yticks(rows, methods)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(0.5, len(methods) + 0.5)
        axes.set_xlabel("Mean rank")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=2)
    figure.notes = notes
    return figure
