"""Format a table of text for the terminal, as CSV, as LaTeX and as Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fl_lightning.core.errors import one_line

LATEX = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
}

_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
FIGURE = re.compile(rf"-|-inf|{_NUMBER}( ± {_NUMBER})?( \*+)?", re.ASCII)
"""Cells that begin like a formula and are not: a number, a mean with its deviation, or a dash for a missing value."""


def to_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV that is safe to open in a spreadsheet: one line per row, and no cell is run as a formula."""
    writer = csv.writer(text := io.StringIO(), lineterminator="\n")
    writer.writerows([_inert("" if cell is None else str(cell)) for cell in row] for row in rows)
    return text.getvalue()


def _inert(cell: str) -> str:
    """Return a cell on one line, with an apostrophe before what a spreadsheet would execute (OWASP, CSV injection)."""
    line = one_line(cell)
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) and not FIGURE.fullmatch(line) else line


@dataclass(frozen=True)
class ResultTable:
    """A table of text.

    Args:
        header: The columns' names.
        rows: A cell for each of them.
        words: Number of columns with words, from the left; the others hold numbers.
        bold: Bold cells, by row and column.
        notes: Lines below the table.
    """

    header: list[str]
    rows: list[list[str]]
    words: int = 1
    bold: set[tuple[int, int]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def plain(self) -> str:
        """Return the table for the terminal: aligned columns, then the notes."""
        lines = [[one_line(cell) for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        told = ["  ".join(self._aligned(cell, i, widths[i]) for i, cell in enumerate(line)).rstrip() for line in lines]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([told[0], rule, *told[1:], *([""] if self.notes else []), *map(one_line, self.notes)])

    def _aligned(self, cell: str, column: int, width: int) -> str:
        return cell.ljust(width) if column < self.words else cell.rjust(width)

    def csv(self) -> str:
        """Return the table as CSV, without notes."""
        return to_csv([self.header, *self.rows]).rstrip("\n")

    def latex(self) -> str:
        """Return a LaTeX `tabular` with rules of booktabs; notes are comments."""

        def line(cells: list[str]) -> str:
            return "  " + " & ".join(cells) + r" \\"

        body = [
            line([rf"\textbf{{{_latex(cell)}}}" if (i, j) in self.bold else _latex(cell) for j, cell in enumerate(row)])
            for i, row in enumerate(self.rows)
        ]
        columns = "l" * self.words + "r" * (len(self.header) - self.words)
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{columns}}}  % \usepackage{{booktabs}}",
                r"  \toprule",
                line([_latex(cell) for cell in self.header]),
                r"  \midrule",
                *body,
                r"  \bottomrule",
                r"\end{tabular}",
                *(f"% {one_line(note)}" for note in self.notes),
            ]
        )

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, then the notes."""
        rules = ["---"] * self.words + ["--:"] * (len(self.header) - self.words)
        body = [
            [
                f"**{escape_markdown(cell)}**" if (i, j) in self.bold else escape_markdown(cell)
                for j, cell in enumerate(row)
            ]
            for i, row in enumerate(self.rows)
        ]
        lines = [[escape_markdown(cell) for cell in self.header], rules, *body]
        told = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([*told, *(f"\n{escape_markdown(note)}" for note in self.notes)])


def _latex(cell: str) -> str:
    return "".join(LATEX.get(letter, letter) for letter in one_line(cell))


def escape_markdown(cell: str) -> str:
    """Return text as one line in which Markdown finds no markup."""
    return re.sub(r"([\\|*`<\[])", r"\\\1", one_line(cell))
