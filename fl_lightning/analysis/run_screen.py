"""A run under way, as it is shown in a terminal: time left, curves, clients, last warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import uniplot
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fl_lightning.analysis.run_status import Look
from fl_lightning.evaluation.metrics import Row, best_and_last, is_lower_better

PLOTS: Sequence[Mapping[str, str]] = (
    {
        "global/acc": "global acc",
        "client/acc_mean": "client acc",
        "personal_on_global/acc_mean": "personal on global",
    },
    {
        "client/train_loss": "training loss",
        "global/loss": "global loss",
        "client/loss_mean": "client loss",
    },
)
"""What is drawn in each plot, and what it is called."""

COLORS, MARKS = ("cyan", "yellow", "magenta"), "*o+"
"""What tells a plot's curves apart, with colours and without."""

LINES_OF_ASCII = str.maketrans("┌┐└┘│─", "++++|-")
BESIDE, NARROWEST = 72, 24
"""Columns from which on two plots stand beside each other, and from which on there are plots at all."""
FEWEST, USUAL, MOST = 3, 10, 12
"""Rows of a plot."""
FRAME = 3
"""Lines a plot takes beside its rows: the frame's two and the rounds."""
LARGEST = 1e6
"""A loss beyond it is no longer drawn: it would hide all others."""
QUIET = 60.0
"""Seconds without a change, three rounds' time at least, after which a run is said to be silent."""


@dataclass(frozen=True)
class Screen:
    """A look at a run, for rich to print: it adapts itself to the width and to what the terminal can show.

    Args:
        look: What there is to show.
        height: Lines there are for it; by default as many as it takes.
    """

    look: Look
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Its parts from top to bottom; the plots get the lines that the others leave."""
        pen = Pen(options.max_width, bool(console.color_system) and not console.no_color, console.encoding)
        above: list[RenderableType] = [*heading(self.look, pen), progress(self.look), pen.text(state(self.look)), ""]
        below: list[RenderableType] = ["", *map(pen.text, clients(self.look)), *last_warnings(self.look, pen)]
        lines = None
        if self.height is not None:
            below.append(pen.text("q or Ctrl-C ends the watching, not the run", "dim"))
            lines = self.height - len(console.render_lines(Group(*above, *below), options))
        yield from (*above, *plots(self.look.run.rounds, pen, lines), *below)


@dataclass(frozen=True)
class Pen:
    """What there is to draw with.

    Args:
        width: Columns.
        colors: Whether there are any.
        encoding: The terminal's.
    """

    width: int
    colors: bool
    encoding: str

    @property
    def ascii(self) -> bool:
        """Whether there is nothing but ASCII."""
        return not self.encoding.lower().startswith("utf")

    def text(self, words: str, style: str = "") -> Text:
        """Words from a run's files, less what the terminal cannot show, or would obey."""
        shown = "".join(sign if sign.isprintable() else "?" for sign in words)
        return Text(shown.encode(self.encoding, "replace").decode(self.encoding), style, overflow="fold")


def heading(look: Look, pen: Pen) -> list[Text]:
    """Which run it is: its folder; method, data, clients and seed as far as its config tells."""
    settings = look.run.settings
    many, each = settings.get("scenario.clients"), settings.get("clients_per_round")
    words = [" on ".join(str(settings[key]) for key in ("algorithm", "scenario.dataset") if key in settings)]
    if many:
        words.append(f"{many} clients" if each in (None, many) else f"{each} of {many} clients a round")
    elif each:
        words.append(f"{each} clients a round")
    if "seed" in settings:
        words.append(f"seed {settings['seed']}")
    told = ", ".join(filter(None, words))
    return [pen.text(str(look.run.run_dir), "bold"), *([pen.text(told)] if told else [])]


def progress(look: Look) -> Table:
    """Rounds done of how many, and the time left."""
    done, left = len(look.run.rounds), look.seconds_left
    cells: list[RenderableType] = [f"round {done}" + (f"/{look.total}" if look.total else "")]
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True, overflow="crop")
    if look.total:
        line.add_column(ratio=1)
        cells.append(ProgressBar(look.total, done))
    if left is not None:
        line.add_column(no_wrap=True, overflow="crop")
        cells.append(f"{hours(left)} left")
    line.add_row(*cells)
    return line


def state(look: Look) -> str:
    """Whether the run goes on, as far as its folder shows."""
    done, each = len(look.run.rounds), look.round_seconds
    if look.ended:
        return f"ended after round {done}"
    if look.silence > max(QUIET, 3 * (each or 0)) and done:
        mend = f"if it was stopped, go on with: fl-lightning fit --resume {look.run.run_dir}"
        return f"nothing has changed for {hours(look.silence)}; {mend}"
    if not done:
        return f"waits for its first round to end, for {hours(look.since_round)} so far"
    if look.total and done >= look.total:
        return "all rounds are done, the rest is being written"
    return f"round {done + 1} is under way" + ("" if each is None else f"; a round takes {each:.3g} s")


def clients(look: Look) -> list[str]:
    """How far apart the clients' accuracies lie, and the worst three clients, where single ones are logged."""
    if look.clients:
        scores = sorted((row["acc"], int(row["client"])) for row in look.clients if "client" in row)
        acc = [score for score, _ in scores]
        count = f"{len(acc)} client{'s' if len(acc) > 1 else ''}"
        spread = f"acc {acc[0]:.4f} to {acc[-1]:.4f}, median {np.median(acc):.4f}, deviation {np.std(acc):.4f}"
        worst = ", ".join(f"{client} ({score:.4f})" for score, client in scores[:3])
        return [f"{count} in round {look.clients[0]['round']}: {spread}", f"the worst: {worst}"]
    for row in reversed(look.run.rounds):
        if {"client/acc_mean", "client/acc_std", "client/acc_worst_decile"} <= row.keys():
            mean, std, worst_tenth = (row[f"client/acc_{name}"] for name in ("mean", "std", "worst_decile"))
            spread = f"acc mean {mean:.4f}, deviation {std:.4f}, worst tenth {worst_tenth:.4f}"
            return [f"clients in round {row['round']}: {spread}"]
    return []


def last_warnings(look: Look, pen: Pen) -> list[Text]:
    """The last warnings, each cut to what fits on three lines."""
    fitting = 3 * pen.width
    lines = [line if len(line) <= fitting else f"{line[: fitting - 3]}..." for line in look.warnings]
    return [pen.text(line, "yellow") for line in (["last warnings:"] if lines else []) + lines]


def plots(rounds: Sequence[Row], pen: Pen, lines: int | None) -> list[RenderableType]:
    """Accuracies and losses against rounds, each under what its curves are called and have come to.

    Args:
        rounds: The run's metrics.
        pen: What there is to draw with.
        lines: How many lines there are for it all; None for as many as it takes.
    """
    present = [{name: label for name, label in names.items() if points(rounds, name)} for names in PLOTS]
    present = [names for names in present if names]
    beside = len(present) > 1 and pen.width >= BESIDE
    each = replace(pen, width=(pen.width - 2) // 2) if beside else pen
    rows = rows_of_plots(lines, [len(names) for names in present], beside) if each.width >= NARROWEST else []
    panels = [Group(*legend(rounds, names, each)) for names in present]
    for panel, names, number in zip(panels, present, rows, strict=False):
        panel.renderables.extend([curves(rounds, list(names), each, number)] if number else [])
    if not beside:
        return [*panels]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in panels:
        grid.add_column(vertical="bottom", width=each.width)
    grid.add_row(*panels)
    return [grid]


def rows_of_plots(lines: int | None, legends: Sequence[int], beside: bool) -> list[int]:
    """How many rows each plot gets; the last ones get none where the lines do not suffice for all.

    Args:
        lines: How many lines there are for plots and legends; None for as many as they take.
        legends: How many lines each plot's legend takes.
        beside: Whether the plots stand beside each other.
    """
    if lines is None:
        return [USUAL] * len(legends)
    if beside:
        rows = lines - max(legends) - FRAME
        return [min(rows, MOST) if rows >= FEWEST else 0] * len(legends)
    for drawn in range(len(legends), 0, -1):
        rows = (lines - sum(legends)) // drawn - FRAME
        if rows >= FEWEST:
            return [min(rows, MOST)] * drawn + [0] * (len(legends) - drawn)
    return [0] * len(legends)


def legend(rounds: Sequence[Row], names: Mapping[str, str], pen: Pen) -> list[Text]:
    """A line for each curve: how it is drawn, what it is, its last value and, of accuracies, the best."""
    lines = []
    for (name, label), color, mark in zip(names.items(), COLORS, MARKS, strict=False):
        figures = best_and_last(points(rounds, name), name, is_lower_better(name))
        words = f" {label} {figures['last']:.4f}"
        best = f", best {figures['best']:.4f} in round {figures['best_round']}"
        if "acc" in name and 2 + len(words + best) <= pen.width:
            words += best
        sign = ("--" if pen.ascii else "━━") if pen.colors else 2 * mark
        lines.append(Text.assemble((sign, color), words, no_wrap=True, overflow="crop"))
    return lines


def curves(rounds: Sequence[Row], names: Sequence[str], pen: Pen, rows: int) -> Text:
    """Metrics against rounds: fine lines where there are colours to tell them apart, a sign for each otherwise.

    Beside the plot stand the largest and the smallest value, below it the first and the last round.
    """
    drawn = [points(rounds, name) for name in names]
    xs = [[row["round"] for row in curve] for curve in drawn]
    ys = [[row[name] for row in curve] for name, curve in zip(names, drawn, strict=True)]
    (first, last), (low, high) = ((min(map(min, each)), max(map(max, each))) for each in (xs, ys))
    margin = 0.0 if low < high else 0.1 * (abs(low) or 1)
    bottom, top = f" {low - margin:.3g}", f" {high + margin:.3g}"
    width = pen.width - 2 - max(len(bottom), len(top))
    plot = uniplot.plot_to_string(
        xs=xs,
        ys=ys,
        y_min=low - margin,
        y_max=high + margin,
        lines=True,
        width=width,
        height=rows,
        x_labels=False,  # uniplot rounds labels, to nothing but 0 and 1 where there is little room
        y_labels=False,
        x_gridlines=[],
        y_gridlines=[],
        character_set="braille" if pen.colors and not pen.ascii else "ascii",
        force_ascii_characters=list(MARKS),
        color=list(COLORS) if pen.colors else False,
    )
    lines = plot.translate(LINES_OF_ASCII if pen.ascii else {}).split("\n")
    lines[1] += top
    lines[rows] += bottom
    lines.append(f" {first}" + (f"{last:>{width - len(str(first))}}" if last > first else ""))
    return Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop")


def points(rounds: Sequence[Row], name: str) -> list[Row]:
    """The rounds in which a metric has a value that can be drawn."""
    return [row for row in rounds if abs(row.get(name, math.inf)) <= LARGEST]


def hours(seconds: float) -> str:
    """A time as h:mm, begun minutes counted."""
    minutes = math.ceil(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02}"
