"""Format a reproduced table beside the paper's numbers: for the terminal, as Markdown and as CSV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from fl_lightning.analysis.result_table import ResultTable, escape_markdown, format_number, mean_and_std, to_csv
from fl_lightning.analysis.study.paper_table import PaperTable, Scale
from fl_lightning.analysis.study.reproduction import Cell, Reproduction, Verdict, margin_needed

MISSING = "-"
LABELS = {"percent": "ours\npaper (difference)\nours, mean of last 10", "rounds": "ours\npaper (difference)"}
CLAIMS = ["claim", "column", "paper", "ours", "seeds ahead", "p", ""]
COLUMNS = ["column", "row", "metric", "unit", "seeds", "missing", "mean", "std", "bound"]
COLUMNS += ["paper", "paper_std", "difference", "last10"]


def heading(table: PaperTable, scale: Scale, overrides: Sequence[str]) -> list[str]:
    """Return the lines to print above a reproduced table: title, unit, seeds, scale and overridden options."""
    unit = "Percent" if table.unit == "percent" else "Rounds, fewer are better"
    lines = [table.title, f"{unit}; mean ± standard deviation over seeds {', '.join(map(str, table.seeds))}."]
    if scale.factor != 1:
        lines.append(f"At scale {scale.factor:g}: {scale.rule}.")
    if overrides:
        lines.append(f"With {', '.join(overrides)}.")
    return lines


def cells_table(reproduction: Reproduction) -> ResultTable:
    """Return a reproduced table. Each cell has our number, and below it that of the paper.

    The last row has the rank correlations between our column and the paper's.
    """
    table = reproduction.table
    label = "\n".join([LABELS[table.unit], *(f"ours, {name}" for name in table.beside)])
    rows = [
        [row, label, *(format_cell(reproduction.cells[column, row]) for column in table.columns)] for row in table.rows
    ]
    orders = [reproduction.order(column) for column in table.columns]
    correlations = [f"{_number(one.spearman, '.2f')}\n{_number(one.kendall, '.2f')}\n{one.rows}" for one in orders]
    header = ["", "", *table.columns]
    return ResultTable(header, [*rows, ["order of rows", "Spearman\nKendall\nof rows", *correlations]], len(header))


def format_cell(cell: Cell) -> str:
    """Return the lines of a cell: our number, the paper's with the difference, and our mean of the last ten rounds.

    The further metrics of the table follow, one per line.
    """
    papers = MISSING
    if cell.paper is not None:
        papers = mean_and_std(*cell.paper, "g")
        papers += f" ({format_number(cell.difference, '+.1f')})" if cell.difference is not None else ""
    last10 = "" if cell.last10 is None else f"\n{cell.last10:.1f}"
    others = (f"\n{mean_and_std(*one[:2], '.1f') if one else MISSING}" for one in cell.beside.values())
    return f"{format_ours(cell)}\n{papers}{last10}{''.join(others)}"


def format_ours(cell: Cell) -> str:
    """Format our result in a cell: mean ± standard deviation, and how many runs are finished or failed.

    `>` before the mean marks a lower bound, because a run did not reach the target accuracy.
    """
    failed = f"{len(cell.failures)} failed" if cell.failures else ""
    if not cell.spread:
        return failed or MISSING
    number = ("> " if cell.unreached else "") + mean_and_std(cell.spread.mean, cell.spread.std, ".1f")
    finished = f"{len(cell.values)} of {cell.seeds}" if len(cell.values) < cell.seeds else ""
    notes = ", ".join(filter(None, [finished, failed]))
    return number + (f" ({notes})" if notes else "")


def claims_table(verdicts: Iterable[Verdict]) -> ResultTable:
    """Return a table that compares, for each claim of a paper and each column, the paper's margin with ours."""
    rows = []
    for verdict in verdicts:
        if difference := verdict.difference:
            name = f"{verdict.claim.better} > {verdict.claim.than}"
            margin = mean_and_std(difference.mean, difference.std, "+.1f")
            ahead, p = f"{verdict.ahead} of {len(verdict.margins)}", _number(difference.p, ".3f")
            result = "holds" if verdict.holds else "does not hold"
            rows.append([name, verdict.column, _number(verdict.paper, "+.4g"), margin, ahead, p, result])
    return ResultTable(CLAIMS, rows, len(CLAIMS))


def verdict_line(verdicts: Sequence[Verdict]) -> str:
    """Return the line to print below the table of claims: how many claims hold, and how to read the p values."""
    counts = []
    for holds, what in ((True, "hold"), (False, "do not")):
        differences = [verdict.difference for verdict in verdicts if verdict.difference and verdict.holds is holds]
        significant = sum(each.p is not None and each.p < 0.05 for each in differences)
        counts.append(f"{len(differences)} {what} ({significant} with p < 0.05)")
    open_claims = sum(verdict.holds is None for verdict in verdicts)
    line = f"Claims: {', '.join(counts)}, {open_claims} cannot be judged yet."
    seeds = max((len(verdict.margins) for verdict in verdicts), default=0)
    if seeds < 2:
        return line
    return (
        f"{line} A claim holds if its better row is also better in our runs, on average over seeds. p is from a "
        f"two-sided paired t-test over seeds, for each claim separately. With {seeds} seeds, p < 0.05 needs a mean "
        f"difference of {margin_needed(seeds):.1f} standard deviations."
    )


def failures(reproduction: Reproduction) -> list[str]:
    """Return one line for each error that made runs of the table fail, with the affected cells and seeds."""
    cells: dict[str, list[str]] = {}
    for (column, row), cell in reproduction.cells.items():
        for seed, reason in cell.failures.items():
            cells.setdefault(reason, []).append(f"{row} / {column} / seed {seed}")
    return [f"failed: {'; '.join(names)}: {reason}" for reason, names in cells.items()]


def as_text(reproduction: Reproduction, scale: Scale = Scale(), overrides: Sequence[str] = ()) -> Group:
    """Return a reproduced table and its claims for a terminal."""
    lines, claims = heading(reproduction.table, scale, overrides), claims_table(reproduction.verdicts)
    parts: list[RenderableType] = [*map(Text, lines), cells_table(reproduction).rich()]
    if claims.rows:
        parts += [claims.rich(), Text(verdict_line(reproduction.verdicts))]
    return Group(*parts, *map(Text, failures(reproduction)))


def as_markdown(reproduction: Reproduction, scale: Scale = Scale(), overrides: Sequence[str] = ()) -> str:
    """Return a reproduced table and its claims as Markdown."""
    title, *lines = map(escape_markdown, heading(reproduction.table, scale, overrides))
    claims, parts = claims_table(reproduction.verdicts), [f"**{title}.** {' '.join(lines)}"]
    judged = [claims.markdown(), verdict_line(reproduction.verdicts)] if claims.rows else []
    parts += [cells_table(reproduction).markdown(), *judged, *map(escape_markdown, failures(reproduction))]
    return "\n\n".join(parts)


def as_csv(reproduction: Reproduction) -> str:
    """Return a reproduced table as CSV: one line per cell, numbers in full precision."""
    table, lines = reproduction.table, list[Sequence[object]]([[*COLUMNS, *reproduction.table.beside]])
    for (column, row), cell in reproduction.cells.items():
        mean, std = cell.spread[:2] if cell.spread else (None, None)
        ours = [len(cell.values), cell.seeds - len(cell.values), mean, std, "lower" if cell.unreached else ""]
        papers = [*(cell.paper or (None, None)), cell.difference]
        beside = [one and one.mean for one in cell.beside.values()]
        lines.append([column, row, table.figure(column, row), table.unit, *ours, *papers, cell.last10, *beside])
    return to_csv(lines).rstrip("\n")


def _number(value: float | None, form: str) -> str:
    return MISSING if value is None else format_number(value, form)
