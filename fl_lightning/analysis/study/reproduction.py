"""Compare our results with a paper's table: the numbers, the ranking of the methods, and the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from scipy import stats

from fl_lightning.analysis.statistics import Difference, Spread, paired_difference, spread
from fl_lightning.analysis.study.executor import Job, is_finished
from fl_lightning.analysis.study.paper_table import Claim, PaperTable, PaperValue, Unit
from fl_lightning.evaluation.summary import best_and_last
from fl_lightning.runs.reader import DamagedRun, open_run_folder


class SeedResult(NamedTuple):
    """The result of one run, that is, of one seed of a cell in the reproduced table.

    Args:
        value: The result in the table's unit; None if the run failed or has not finished.
        reached: Whether the run reached the accuracy; if not, `value` is its number of rounds plus one.
        reason: Why the run failed; empty if it did not.
        last10: Mean over the last ten evaluated rounds, in percent; None in tables of rounds.
        beside: The run's further metrics of the table, in percent, by description.
    """

    value: float | None = None
    reached: bool = True
    reason: str = ""
    last10: float | None = None
    beside: Mapping[str, float] = {}


@dataclass(frozen=True)
class Cell:
    """A cell of a reproduced table: our results and the paper's number.

    Args:
        results: The results of our runs, by seed.
        paper: The paper's number, if it has one.
    """

    results: Mapping[int, SeedResult]
    paper: PaperValue | None = None

    @cached_property
    def values(self) -> dict[int, float]:
        """The results of the cell's finished runs, by seed."""
        return {seed: one.value for seed, one in self.results.items() if one.value is not None}

    @cached_property
    def spread(self) -> Spread | None:
        """The mean and standard deviation of our results over seeds; None without a finished run."""
        return spread(self.values.values())

    @cached_property
    def last10(self) -> float | None:
        """The metric's mean over the last ten evaluated rounds, averaged over our runs; None if no run has it."""
        means = [one.last10 for one in self.results.values() if one.last10 is not None]
        return fmean(means) if means else None

    def beside(self, name: str) -> Spread | None:
        """Return the mean and standard deviation of a further metric over seeds; None without a run that has it."""
        return spread([one.beside[name] for one in self.results.values() if name in one.beside])

    @cached_property
    def reached(self) -> bool:
        """Whether all runs of the cell reached the accuracy until which the paper's table counts rounds.

        If not, the mean number of rounds is a lower bound.
        """
        return all(one.reached for one in self.results.values())

    @cached_property
    def difference(self) -> float | None:
        """Our mean over seeds minus the paper's number; None if either number is missing."""
        return self.spread.mean - self.paper.mean if self.spread and self.paper else None


class Order(NamedTuple):
    """The rank correlations between our numbers and the paper's over the rows of a column.

    Args:
        spearman: Spearman's rank correlation; None if all rows are equal on one side.
        kendall: Kendall's tau-b; None in the same case.
        rows: Number of rows that have a number on both sides.
    """

    spearman: float | None
    kendall: float | None
    rows: int


@dataclass(frozen=True)
class Verdict:
    """Our result for a claim "A > B" of a paper in one column of a table: the difference of A and B for each seed.

    Args:
        claim: The claim.
        column: The column.
        paper: The margin in the paper, in the table's unit; None if a number is missing.
        margins: The margin in our runs, by seed. A seed is left out if a run is missing, or if neither run reached the
            accuracy.
    """

    claim: Claim
    column: str
    paper: float | None
    margins: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def difference(self) -> Difference | None:
        """Statistics over seeds of our margin of A over B: its mean and a paired t-test; None without results."""
        return paired_difference(list(self.margins.values()), [0.0] * len(self.margins))

    @cached_property
    def ahead(self) -> int:
        """The number of seeds for which A is ahead of B in our runs, as the paper claims."""
        return sum(margin > 0 for margin in self.margins.values())

    @cached_property
    def holds(self) -> bool | None:
        """Whether our runs confirm the paper's claim on average over seeds; None if no seed can be compared."""
        return self.difference.mean > 0 if self.difference else None


class Reproduction:
    """A reproduced table: the results of its finished runs, and the paper's numbers and claims.

    Args:
        table: The table, or a part of it.
        jobs: The runs by column, row and seed; see `paper_table.table_jobs`.
        failures: The reasons of failed runs, by folder.

    Attributes:
        cells: The cells, by column and row.
    """

    def __init__(
        self, table: PaperTable, jobs: Mapping[tuple[str, str, int], Job], failures: Mapping[Path, str] | None = None
    ) -> None:
        self.table = table
        self.cells: dict[tuple[str, str], Cell] = {}
        form = (table.unit, table.beside)
        for column, row in product(table.columns, table.rows):
            figure, series, results = table.figure(column, row), table.series(column, row), {}
            for seed in table.seeds:
                folder = jobs[column, row, seed].folder
                reason = (failures or {}).get(folder, "")
                results[seed] = SeedResult(reason=reason) if reason else read_result(folder, figure, series, *form)
            self.cells[column, row] = Cell(results, table.paper_values.get((column, row)))

    def order(self, column: str) -> Order:
        """Return the rank correlations between our numbers in one column of the table and the paper's numbers."""
        cells = [self.cells[column, row] for row in self.table.rows]
        both = [(cell.spread.mean, cell.paper.mean) for cell in cells if cell.spread and cell.paper]
        return rank_correlations([ours for ours, _ in both], [papers for _, papers in both])

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Our results for the paper's claims: one `Verdict` for each claim and each column to which it applies."""
        return [self._verdict(claim, column) for claim in self.table.claims for column in claim.columns]

    def _verdict(self, claim: Claim, column: str) -> Verdict:
        better, than = (self.cells[column, row] for row in (claim.better, claim.than))
        sign = -1 if self.table.unit == "rounds" else 1
        papers = sign * (better.paper.mean - than.paper.mean) if better.paper and than.paper else None
        margins = {
            seed: sign * (better.values[seed] - than.values[seed])
            for seed in self.table.seeds
            if seed in better.values and seed in than.values
            if better.results[seed].reached or than.results[seed].reached
        }
        return Verdict(claim, column, papers, margins)


def read_result(folder: Path, figure: str, series: str, unit: Unit, further: Mapping[str, str] = {}) -> SeedResult:
    """Read a run's result from its folder, in the unit of the paper's table. An unfinished run has no value.

    Args:
        folder: The run's folder.
        figure: The entry of the run's `summary.json` that the table shows.
        series: The metric whose last 10 values are averaged.
        unit: The unit of the paper's table.
        further: Further entries of `summary.json` that the table shows, by description.
    """
    if not is_finished(folder):
        return SeedResult()
    try:
        run = open_run_folder(folder)
    except DamagedRun as error:
        return SeedResult(reason=str(error))
    summary = run.summary
    if figure not in summary:
        return SeedResult(reason=f"its run has no {figure}; it has {', '.join(summary)}")
    value = summary[figure]
    if value is None:
        return SeedResult(float(summary["rounds"] or 0) + 1, reached=False)
    if unit == "rounds":
        return SeedResult(float(value))
    beside = {name: 100 * number for name, metric in further.items() if (number := summary.get(metric)) is not None}
    return SeedResult(100 * value, last10=100 * best_and_last(run.rounds, series)["last10"], beside=beside)


def rank_correlations(ours: Sequence[float], papers: Sequence[float]) -> Order:
    """Return Spearman's and Kendall's rank correlations between our and a paper's numbers, which may have ties."""
    if len(set(ours)) < 2 or len(set(papers)) < 2:
        return Order(None, None, len(ours))
    return Order(float(stats.spearmanr(ours, papers)[0]), float(stats.kendalltau(ours, papers)[0]), len(ours))


def margin_needed(seeds: int, p: float = 0.05) -> float:
    """Return the mean difference, in standard deviations, at which a paired t-test over `seeds` seeds gives `p`."""
    return float(stats.t.isf(p / 2, seeds - 1)) / math.sqrt(seeds)
