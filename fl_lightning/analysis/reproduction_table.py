"""Format a reproduced table beside the paper's numbers: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fl_lightning.analysis.paper_table import RULE, PaperTable
from fl_lightning.analysis.reproduction import Cell, Reproduction, Verdict, margin_needed
from fl_lightning.analysis.result_table import escape_markdown, mean_and_std, to_csv

Grid = list[list[str]]
"""Rows of cells; the first is the header. A cell may have several lines."""

MISSING = "-"
LABELS = {
    "percent": "ours\npaper (difference)\nours, mean of last 10",
    "rounds": "ours\npaper (difference)",
}
CLAIMS = ["claim", "column", "paper", "ours", "seeds ahead", "p", ""]
COLUMNS = ["column", "row", "metric", "unit", "seeds", "missing", "mean", "std", "bound"]
COLUMNS += ["paper", "paper_std", "difference", "last10"]


def heading(table: PaperTable, scale: float, overrides: Sequence[str]) -> list[str]:
    """Return the title of a table, and how its experiments differ from the paper's."""
    unit = "Percent" if table.unit == "percent" else "Rounds, fewer are better"
    lines = [table.title, f"{unit}; mean ± standard deviation over seeds {', '.join(map(str, table.seeds))}."]
    if scale != 1:
        lines.append(f"At scale {scale:g}: {RULE.format(scale)}.")
    if overrides:
        lines.append(f"With {', '.join(overrides)}.")
    return lines


def grid(reproduction: Reproduction) -> Grid:
    """Return the table: in each cell our number above the paper's; in the last row the rank correlations."""
    table = reproduction.table
    lines = [["", "", *table.columns]]
    for row in table.rows:
        lines.append(
            [row, LABELS[table.unit], *(format_cell(reproduction.cells[column, row]) for column in table.columns)]
        )
    orders = [reproduction.order(column) for column in table.columns]
    cells = [f"{_number(one.spearman, '.2f')}\n{_number(one.kendall, '.2f')}\n{one.rows}" for one in orders]
    return [*lines, ["order of rows", "Spearman\nKendall\nof rows", *cells]]


def format_cell(cell: Cell) -> str:
    """Return our number, the paper's with the difference, and ours as the mean of the last ten rounds, line by line."""
    papers = MISSING
    if cell.paper is not None:
        papers = mean_and_std(*cell.paper, "g")
        papers += f" ({cell.difference:+.1f})" if cell.difference is not None else ""
    last10 = "" if cell.last10 is None else f"\n{cell.last10:.1f}"
    return f"{format_ours(cell)}\n{papers}{last10}"


def format_ours(cell: Cell) -> str:
    """Return our mean and deviation, with `>` before a lower bound, and the number of missing and failed runs."""
    failed = sum(bool(one.reason) for one in cell.readings.values())
    what = f"{failed} failed" if failed else ""
    if cell.mean is None:
        return what or MISSING
    number = ("" if cell.reached else "> ") + mean_and_std(cell.mean, cell.std, ".1f")
    some = f"{len(cell.values)} of {len(cell.readings)}" if len(cell.values) < len(cell.readings) else ""
    notes = ", ".join(filter(None, [some, what]))
    return number + (f" ({notes})" if notes else "")


def claims_grid(verdicts: Iterable[Verdict]) -> Grid:
    """Return a row for each claim and column with results: the paper's margin, ours, and whether the claim holds."""
    return [CLAIMS, *(_claim_line(verdict) for verdict in verdicts if verdict.margins)]


def _claim_line(verdict: Verdict) -> list[str]:
    name = f"{verdict.claim.better} > {verdict.claim.than}"
    papers = _number(verdict.paper, "+.4g")
    margin = f"{verdict.mean:+.1f}" + (f" ± {verdict.std:.1f}" if verdict.std is not None else "")
    ahead = f"{verdict.ahead} of {len(verdict.margins)}"
    how = "holds" if verdict.holds else "does not hold"
    return [name, verdict.column, papers, margin, ahead, _number(verdict.p, ".3f"), how]


def verdict_line(verdicts: Sequence[Verdict]) -> str:
    """Return a line with the number of claims that hold and that do not, and what p means."""
    counted = []
    for holds, what in ((True, "hold"), (False, "do not")):
        those = [verdict for verdict in verdicts if verdict.holds is holds]
        sure = sum(verdict.p is not None and verdict.p < 0.05 for verdict in those)
        counted.append(f"{len(those)} {what} ({sure} with p < 0.05)")
    rest = sum(verdict.holds is None for verdict in verdicts)
    line = f"Claims: {', '.join(counted)}, {rest} cannot be judged yet."
    seeds = max((len(verdict.margins) for verdict in verdicts), default=0)
    if seeds < 2:
        return line
    return (
        f"{line} A claim holds where the mean is ahead; p is of a paired t-test over seeds, two-sided, for each claim "
        f"by itself. With {seeds} seeds p < 0.05 takes a margin of {margin_needed(seeds):.1f} standard deviations."
    )


def failures(reproduction: Reproduction) -> list[str]:
    """Return a line for each reason why runs failed, with the affected cells."""
    where: dict[str, list[str]] = {}
    for (column, row), cell in reproduction.cells.items():
        for seed, reading in cell.readings.items():
            if reading.reason:
                where.setdefault(reading.reason, []).append(f"{row} / {column} / seed {seed}")
    return [f"failed: {'; '.join(places)}: {reason}" for reason, places in where.items()]


def as_text(reproduction: Reproduction, scale: float = 1.0, overrides: Sequence[str] = ()) -> Group:
    """Return the table and the results for its claims, for a terminal."""
    lines = map(Text, heading(reproduction.table, scale, overrides))
    parts: list[Table | Text] = [*lines, _rich(grid(reproduction))]
    if any(verdict.margins for verdict in reproduction.verdicts):
        parts += [_rich(claims_grid(reproduction.verdicts)), Text(verdict_line(reproduction.verdicts))]
    return Group(*parts, *map(Text, failures(reproduction)))


def as_markdown(reproduction: Reproduction, scale: float = 1.0, overrides: Sequence[str] = ()) -> str:
    """Return the same as Markdown."""
    title, *lines = map(escape_markdown, heading(reproduction.table, scale, overrides))
    parts = [f"**{title}.** {' '.join(lines)}", _markdown(grid(reproduction))]
    if any(verdict.margins for verdict in reproduction.verdicts):
        parts += [_markdown(claims_grid(reproduction.verdicts)), verdict_line(reproduction.verdicts)]
    return "\n\n".join([*parts, *map(escape_markdown, failures(reproduction))])


def as_csv(reproduction: Reproduction) -> str:
    """Return a CSV line for each cell, in full precision."""
    table, lines = reproduction.table, list[Sequence[object]]([COLUMNS])
    for (column, row), cell in reproduction.cells.items():
        counts = [len(cell.values), len(cell.readings) - len(cell.values)]
        numbers = [cell.mean, cell.std, "" if cell.reached else "lower", *(cell.paper or (None, None)), cell.difference]
        numbers.append(cell.last10)
        lines.append([column, row, table.figure(column, row), table.unit, *counts, *numbers])
    return to_csv(lines).rstrip("\n")


def _rich(lines: Grid) -> Table:
    head, *rest = lines
    table = Table(show_lines="\n" in rest[0][-1])
    for name in head:
        table.add_column(Text(name))
    for line in rest:
        table.add_row(*map(Text, line))
    return table


def _markdown(lines: Grid) -> str:
    rows = [["<br>".join(map(escape_markdown, cell.split("\n"))) for cell in line] for line in lines]
    head, *rest = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "---|" * len(lines[0]), *rest])


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)
