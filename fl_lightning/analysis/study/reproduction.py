"""Compare our results with a paper's table: the numbers, the ranking of the methods, and the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import NamedTuple

from scipy import stats

from fl_lightning.analysis.statistics import Difference, Spread, paired_difference, spread
from fl_lightning.analysis.study.executor import Job
from fl_lightning.analysis.study.paper_table import Claim, PaperTable, PaperValue
from fl_lightning.analysis.study.results import Seed, SeedRuns, read_runs
from fl_lightning.evaluation.summary import best_and_last
from fl_lightning.runs.reader import Run


@dataclass(frozen=True)
class Cell:
    """A cell of a reproduced table: our results and the paper's number.

    Args:
        seeds: Number of runs of the cell, also of those that have not finished.
        values: Our results by seed, in the table's unit.
        unreached: The seeds whose run did not reach the accuracy. Their value is the number of rounds plus one.
        failures: Why runs failed, by seed.
        last10: The metric's mean over the last ten evaluated rounds, averaged over our runs; None in tables of rounds.
        beside: The further metrics of the table, in percent, by description; None without a run that has the metric.
        paper: The paper's number, if it has one.
    """

    seeds: int
    values: Mapping[Seed, float] = field(default_factory=dict)
    unreached: Collection[Seed] = ()
    failures: Mapping[Seed, str] = field(default_factory=dict)
    last10: float | None = None
    beside: Mapping[str, Spread | None] = field(default_factory=dict)
    paper: PaperValue | None = None

    @cached_property
    def spread(self) -> Spread | None:
        """The mean and standard deviation of our results over seeds; None without a finished run."""
        return spread(self.values.values())

    @cached_property
    def difference(self) -> float | None:
        """Our mean over seeds minus the paper's number; None if either number is missing."""
        return self.spread.mean - self.paper.mean if self.spread and self.paper else None


def read_cell(table: PaperTable, column: str, row: str, runs: SeedRuns) -> Cell:
    """Read the numbers of a cell from its runs, in the unit of the table."""
    metric, series, in_percent = table.figure(column, row), table.series(column, row), table.unit == "percent"
    missing = {
        seed: f"its run has no {metric}; it has {', '.join(run.summary)}"
        for seed, run in runs.runs.items()
        if metric not in run.summary
    }
    read = SeedRuns({seed: run for seed, run in runs.runs.items() if seed not in missing})
    reached = SeedRuns({seed: run for seed, run in read.runs.items() if run.summary[metric] is not None})
    last10 = reached.spread(lambda run: 100 * best_and_last(run.rounds, series)["last10"]) if in_percent else None
    return Cell(
        len(table.seeds),
        values=read.values(lambda run: _cell_value(run, metric, in_percent)),
        unreached=read.runs.keys() - reached.runs.keys(),
        failures={**runs.failures, **missing},
        last10=last10 and last10.mean,
        beside={description: _percentage(read, other) for description, other in table.beside.items()},
        paper=table.paper_values.get((column, row)),
    )


def _cell_value(run: Run, metric: str, in_percent: bool) -> float:
    """Return a run's value in the unit of its table. See `Cell.unreached` for a run without a value."""
    number = run.summary[metric]
    if number is None:
        return float(run.summary["rounds"] or 0) + 1
    return float(100 * number if in_percent else number)


def _percentage(runs: SeedRuns, metric: str) -> Spread | None:
    """Return the mean and standard deviation of a metric over runs, in percent."""
    return runs.spread(lambda run: None if (number := run.summary.get(metric)) is None else 100 * number)


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
        failures: Why runs of this call failed, by folder.

    Attributes:
        cells: The cells, by column and row.
    """

    def __init__(
        self, table: PaperTable, jobs: Mapping[tuple[str, str, int], Job], failures: Mapping[Path, str] | None = None
    ) -> None:
        self.table = table
        self.cells: dict[tuple[str, str], Cell] = {}
        for column, row in product(table.columns, table.rows):
            of_cell = {seed: jobs[column, row, seed] for seed in table.seeds}
            failed: dict[Seed, str] = {
                seed: why for seed, job in of_cell.items() if (why := (failures or {}).get(job.folder))
            }
            runs = read_runs({seed: job for seed, job in of_cell.items() if seed not in failed})
            self.cells[column, row] = read_cell(table, column, row, SeedRuns(runs.runs, {**runs.failures, **failed}))

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
            if not (seed in better.unreached and seed in than.unreached)
        }
        return Verdict(claim, column, papers, margins)


def rank_correlations(ours: Sequence[float], papers: Sequence[float]) -> Order:
    """Return Spearman's and Kendall's rank correlations between our and a paper's numbers, which may have ties."""
    if len(set(ours)) < 2 or len(set(papers)) < 2:
        return Order(None, None, len(ours))
    return Order(float(stats.spearmanr(ours, papers)[0]), float(stats.kendalltau(ours, papers)[0]), len(ours))


def margin_needed(seeds: int, p: float = 0.05) -> float:
    """Return the mean difference, in standard deviations, at which a paired t-test over `seeds` seeds gives `p`."""
    return float(stats.t.isf(p / 2, seeds - 1)) / math.sqrt(seeds)
