"""Format a table of results for the terminal, as CSV, as LaTeX and as Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Column, Table
from rich.text import Text

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

MINUS = re.compile(r"(?<![\w.)-])-(?=\.?\d|inf\b)|(?<=\d[eE])-(?=\d)", re.ASCII)
"""Matches the minus sign of a number or of its exponent. In LaTeX, a `-` outside of math mode is a hyphen."""

_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?"
FIGURE = re.compile(rf"-|-inf|{_NUMBER}( ± {_NUMBER})?( \*+)?", re.ASCII)
"""Matches cells that are no formulas: a number, a mean ± deviation, or a dash for a missing value."""


def to_csv(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV with one line per row. Formulas are escaped, so that spreadsheets do not execute them."""
    writer = csv.writer(text := io.StringIO(), lineterminator="\n")
    writer.writerows([_escape_formula("" if cell is None else str(cell)) for cell in row] for row in rows)
    return text.getvalue()


def _escape_formula(cell: str) -> str:
    """Return a cell's text on one line. An apostrophe before a formula keeps spreadsheets from executing it.

    See CSV injection at OWASP.
    """
    line = one_line(cell)
    return f"'{line}" if line.startswith(("=", "+", "-", "@")) and not FIGURE.fullmatch(line) else line


def format_number(value: float, form: str) -> str:
    """Format a number in a format such as `.4f` or `+.4f`. A number that is rounded to 0 gets no minus sign."""
    text = format(value, form)
    return text if float(text) else format(0.0, form)


def mean_and_std(mean: float, std: float | None, form: str) -> str:
    """Format a mean ± standard deviation in a number format such as `.4f`; only the mean if `std` is None."""
    return format_number(mean, form) + (f" ± {format_number(std, form.lstrip('+'))}" if std is not None else "")


@dataclass(frozen=True)
class ResultTable:
    """A table of text cells, with methods that format it for the terminal, CSV, LaTeX and Markdown.

    Args:
        header: The columns' names.
        rows: The cells of each row.
        words: Number of columns with words, from the left; the others hold numbers and are right-aligned.
        bold: Bold cells, by row and column.
        notes: Lines below the table.
    """

    header: list[str]
    rows: list[list[str]]
    words: int = 1
    bold: set[tuple[int, int]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def plain(self) -> str:
        """Return the table as aligned columns for the terminal, followed by the lines of `notes`."""
        cells = [[one_line(cell) for cell in row] for row in (self.header, *self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        forms = [f"{'<' if i < self.words else '>'}{width}" for i, width in enumerate(widths)]
        lines = ["  ".join(map(format, row, forms)).rstrip() for row in cells]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, *([""] if self.notes else []), *map(one_line, self.notes)])

    def rich(self, title: str | None = None) -> Table:
        """Return the table with lines around its cells for the terminal, without notes. Cells may have several lines.

        Args:
            title: Text above the table.
        """
        several = any("\n" in cell for row in self.rows for cell in row)
        table = Table(*(Column(Text(name)) for name in self.header), title=title and Text(title), show_lines=several)
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table

    def csv(self) -> str:
        """Return the table as CSV, without notes."""
        return to_csv([self.header, *self.rows]).rstrip("\n")

    def latex(self) -> str:
        """Return the table as a LaTeX `tabular` for the package booktabs. The lines of `notes` follow as comments."""
        header, *body = (f"  {' & '.join(row)} \\\\" for row in self._cells(_latex, r"\textbf{%s}"))
        columns = "l" * self.words + "r" * (len(self.header) - self.words)
        return "\n".join(
            [
                rf"\begin{{tabular}}{{{columns}}}  % \usepackage{{booktabs}}",
                r"  \toprule",
                header,
                r"  \midrule",
                *body,
                r"  \bottomrule",
                r"\end{tabular}",
                *(f"% {one_line(note)}" for note in self.notes),
            ]
        )

    def markdown(self) -> str:
        """Return the table in GitHub's Markdown, followed by the lines of `notes`. Cells may have several lines."""
        rules = ["---"] * self.words + ["--:"] * (len(self.header) - self.words)
        header, *body = self._cells(_markdown_lines, "**%s**")
        lines = [f"| {' | '.join(row)} |" for row in (header, rules, *body)]
        return "\n".join([*lines, *(f"\n{escape_markdown(note)}" for note in self.notes)])

    def _cells(self, escape: Callable[[str], str], bold: str) -> list[list[str]]:
        """Return header and rows with escaped cells; bold cells are put into the pattern `bold`, such as `**%s**`."""
        rows = [
            [bold % escape(cell) if (i, j) in self.bold else escape(cell) for j, cell in enumerate(row)]
            for i, row in enumerate(self.rows)
        ]
        return [list(map(escape, self.header)), *rows]


def _latex(cell: str) -> str:
    return MINUS.sub("$-$", "".join(LATEX.get(letter, letter) for letter in one_line(cell)))


def _markdown_lines(cell: str) -> str:
    return "<br>".join(map(escape_markdown, cell.split("\n")))


def escape_markdown(cell: str) -> str:
    """Return text on one line, with Markdown's markup characters escaped."""
    return re.sub(r"([\\|*`<\[])", r"\\\1", one_line(cell))
