"""Ours beside a paper's: a table's cells as they were run, whether its order holds, and whether its claims do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from scipy import stats

from fl_lightning.analysis.comparison import paired
from fl_lightning.analysis.executor import Job, is_finished
from fl_lightning.analysis.paper_table import Claim, PaperTable, PaperValue, Unit
from fl_lightning.evaluation.metrics import best_and_last
from fl_lightning.runs.reader import DamagedRun, open_run_folder


class Reading(NamedTuple):
    """What one run says.

    Args:
        value: The number in the table's unit; None where there is none.
        reached: False where `value` stands for an accuracy that was not reached: then it is one more than the rounds.
        reason: Why there is no number; empty where the run has not come to its end.
        last10: Mean over the last ten evaluated rounds, in percent; None in tables of rounds.
    """

    value: float | None = None
    reached: bool = True
    reason: str = ""
    last10: float | None = None


@dataclass(frozen=True)
class Cell:
    """A cell: our runs by seed, and the paper's number.

    Args:
        readings: What the runs say, by seed.
        paper: The paper's number, where it has one.
    """

    readings: Mapping[int, Reading]
    paper: PaperValue | None = None

    @cached_property
    def values(self) -> dict[int, float]:
        """The numbers there are, by seed."""
        return {seed: one.value for seed, one in self.readings.items() if one.value is not None}

    @cached_property
    def mean(self) -> float | None:
        """Their mean."""
        return fmean(self.values.values()) if self.values else None

    @cached_property
    def std(self) -> float | None:
        """Their standard deviation, of a sample; None for less than two."""
        return stdev(self.values.values()) if len(self.values) > 1 else None

    @cached_property
    def last10(self) -> float | None:
        """Mean over seeds of the mean of the last ten evaluated rounds."""
        means = [one.last10 for one in self.readings.values() if one.last10 is not None]
        return fmean(means) if means else None

    @cached_property
    def reached(self) -> bool:
        """Whether all of them are what they say, and not a bound."""
        return all(one.reached for one in self.readings.values())

    @cached_property
    def difference(self) -> float | None:
        """Our mean less the paper's number."""
        return None if self.mean is None or self.paper is None else self.mean - self.paper.mean


class Order(NamedTuple):
    """How far our order of a column's rows is the paper's.

    Args:
        spearman: Spearman's rank correlation; None where either side has all rows alike.
        kendall: Kendall's tau-b; likewise.
        rows: How many rows have a number on both sides.
    """

    spearman: float | None
    kendall: float | None
    rows: int


@dataclass(frozen=True)
class Verdict:
    """What became of a claim in one column.

    Args:
        claim: The claim.
        column: The column.
        paper: How far ahead the better row is in the paper, in the table's unit; None where a number is missing.
        margins: How far ahead it is in ours, by seed; those seeds that both rows have, and one of them reached.
    """

    claim: Claim
    column: str
    paper: float | None
    margins: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def mean(self) -> float | None:
        """The mean margin."""
        return fmean(self.margins.values()) if self.margins else None

    @cached_property
    def std(self) -> float | None:
        """The margins' standard deviation, of a sample; None for less than two."""
        return stdev(self.margins.values()) if len(self.margins) > 1 else None

    @cached_property
    def ahead(self) -> int:
        """With how many seeds the better row is better."""
        return sum(margin > 0 for margin in self.margins.values())

    @cached_property
    def p(self) -> float | None:
        """Of a paired t-test over seeds, two-sided: see `paired_p`."""
        return paired_p(list(self.margins.values()))

    @cached_property
    def holds(self) -> bool | None:
        """Whether the better row is better on average; None where there is nothing to compare."""
        return None if self.mean is None else self.mean > 0


class Reproduction:
    """A table as far as it was run.

    Args:
        table: The table, or the part of it that is wanted.
        jobs: The run behind each of its numbers, by column, row and seed; see `paper_table.table_jobs`.
        failures: Why runs have no end, by their folders; what is in neither list has not been run.

    Attributes:
        cells: By column and row.
    """

    def __init__(
        self,
        table: PaperTable,
        jobs: Mapping[tuple[str, str, int], Job],
        failures: Mapping[Path, str] | None = None,
    ) -> None:
        self.table = table
        self.cells: dict[tuple[str, str], Cell] = {}
        for column, row in ((column, row) for column in table.columns for row in table.rows):
            figure, series, readings = table.figure(column, row), table.series(column, row), {}
            for seed in table.seeds:
                folder = jobs[column, row, seed].folder
                reason = (failures or {}).get(folder, "")
                readings[seed] = Reading(reason=reason) if reason else read(folder, figure, series, table.unit)
            self.cells[column, row] = Cell(readings, table.paper_values.get((column, row)))

    def order(self, column: str) -> Order:
        """Whether a column's rows stand in the paper's order."""
        cells = [self.cells[column, row] for row in self.table.rows]
        both = [(cell.mean, cell.paper.mean) for cell in cells if cell.mean is not None and cell.paper]
        return rank_correlations([ours for ours, _ in both], [papers for _, papers in both])

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """What became of each claim in each of its columns."""
        return [self._verdict(claim, column) for claim in self.table.claims for column in claim.columns]

    def _verdict(self, claim: Claim, column: str) -> Verdict:
        better, than = (self.cells[column, row] for row in (claim.better, claim.than))
        sign = -1 if self.table.unit == "rounds" else 1
        papers = sign * (better.paper.mean - than.paper.mean) if better.paper and than.paper else None
        told = (seed for seed in self.table.seeds if seed in better.values and seed in than.values)
        seeds = [seed for seed in told if better.readings[seed].reached or than.readings[seed].reached]
        return Verdict(
            claim, column, papers, {seed: sign * (better.values[seed] - than.values[seed]) for seed in seeds}
        )


def read(folder: Path, figure: str, series: str, unit: Unit) -> Reading:
    """Read a figure of a finished run, in a table's unit, and the mean of the last ten rounds of its series."""
    if not is_finished(folder):
        return Reading()
    try:
        run = open_run_folder(folder)
    except DamagedRun as error:
        return Reading(reason=str(error))
    summary = run.summary
    if figure not in summary:
        return Reading(reason=f"its run has no {figure}; it has {', '.join(summary)}")
    value = summary[figure]
    if value is None:
        return Reading(float(summary["rounds"] or 0) + 1, reached=False)
    if unit == "rounds":
        return Reading(float(value))
    return Reading(100 * value, last10=100 * best_and_last(run.rounds, series)["last10"])


def rank_correlations(ours: Sequence[float], papers: Sequence[float]) -> Order:
    """Spearman's and Kendall's rank correlation of two columns of numbers; ties count as such."""
    if len(set(ours)) < 2 or len(set(papers)) < 2:
        return Order(None, None, len(ours))
    return Order(float(stats.spearmanr(ours, papers)[0]), float(stats.kendalltau(ours, papers)[0]), len(ours))


def paired_p(margins: Sequence[float]) -> float | None:
    """How likely a mean as far from zero is if there is no difference: a paired t-test, two-sided.

    Args:
        margins: One side's number less the other's, seed by seed.

    Returns:
        None where it cannot tell: for less than two seeds, or where all margins are the same.
    """
    found = paired(margins, [0.0] * len(margins))
    return found.p if found else None


def margin_needed(seeds: int, p: float = 0.05) -> float:
    """How many of its standard deviations a mean margin must be for `paired_p` to be below p; for two seeds or more."""
    return float(stats.t.isf(p / 2, seeds - 1)) / math.sqrt(seeds)
