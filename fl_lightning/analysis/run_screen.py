"""The terminal view of the command `watch`: a run's time left, metric curves, clients and last warnings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import uniplot
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult  # noqa: TID251  # a type
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fl_lightning.analysis.run_status import RunStatus
from fl_lightning.core.durations import format_duration
from fl_lightning.core.names import labels
from fl_lightning.evaluation.summary import Row, best_and_last, is_lower_better

PLOTS: Sequence[Mapping[str, str]] = (
    {
        "global/acc": "global acc",
        "client/acc_mean": "client acc",
        "personal_on_global/acc_mean": "personal on global",
        "trained_client/acc_mean": "trained client acc",
        "new_client/acc_mean": "new client acc",
    },
    {
        "client/train_loss": "training loss",
        "global/loss": "global loss",
        "client/loss_mean": "client loss",
        "new_client/loss_mean": "new client loss",
    },
)
"""The metrics of each plot, with their labels."""

COLORS, MARKS = ("cyan", "yellow", "magenta", "green"), "*o+x"
"""Colours and characters of the curves in a plot; the characters serve terminals without colours."""

LINES_OF_ASCII = str.maketrans("┌┐└┘│─", "++++|-")
MIN_WIDTH_BESIDE, MIN_WIDTH = 72, 24
"""The minimum number of columns for two plots side by side, and for a plot at all."""
MIN_ROWS, USUAL_ROWS, MAX_ROWS = 3, 10, 12
"""Number of rows of a plot: minimum, default and maximum."""
FRAME_ROWS = 3
"""Number of lines of a plot besides its rows: two of the frame, one of the axis."""
LARGEST = 1e6
"""Largest absolute value that is drawn. A larger value would make all others appear as zero."""
QUIET = 60.0
"""Seconds without a change after which a run is reported as silent. For slow runs it is three rounds."""


@dataclass(frozen=True)
class RunScreen:
    """A terminal view of a run's progress and metrics. Print it with a console of the package `rich`.

    The view is as wide as the terminal.

    Args:
        status: The status of the run.
        height: Number of lines; unlimited by default.
    """

    status: RunStatus
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts of the view from top to bottom. The plots fill the lines that the other parts do not need."""
        terminal = Terminal(options.max_width, bool(console.color_system) and not console.no_color, console.encoding)
        status = self.status
        above: list[RenderableType] = [
            *heading(status, terminal),
            progress(status),
            terminal.text(describe_state(status)),
            "",
        ]
        below: list[RenderableType] = ["", *map(terminal.text, clients(status)), *last_warnings(status, terminal)]
        lines = None
        if self.height is not None:
            below.append(terminal.text("q or Ctrl-C closes this view; the run continues", "dim"))
            lines = self.height - len(console.render_lines(Group(*above, *below), options))
        yield from (*above, *plots(status.run.rounds, terminal, lines), *below)


@dataclass(frozen=True)
class Terminal:
    """Properties of a terminal: width, colours and encoding.

    Args:
        width: Number of columns.
        colors: Whether it has colours.
        encoding: Its encoding.
    """

    width: int
    colors: bool
    encoding: str

    @property
    def ascii(self) -> bool:
        """Whether the terminal can show only ASCII."""
        return not self.encoding.lower().startswith("utf")

    def text(self, words: str, style: str = "") -> Text:
        """Return styled text, with `?` for control characters and for characters that the terminal cannot encode."""
        printable = "".join(sign if sign.isprintable() else "?" for sign in words)
        return Text(printable.encode(self.encoding, "replace").decode(self.encoding), style, overflow="fold")


def heading(status: RunStatus, terminal: Terminal) -> list[Text]:
    """Return the first lines of the view: the run's folder, method, dataset, number of clients and seed."""
    settings = status.run.settings
    total, per_round = settings.get("scenario.clients"), settings.get("clients_per_round")
    words = [" on ".join(str(settings[key]) for key in ("algorithm", "scenario.dataset") if key in settings)]
    if total:
        words.append(f"{total} clients" if per_round in (None, total) else f"{per_round} of {total} clients a round")
    elif per_round:
        words.append(f"{per_round} clients a round")
    if held_out := settings.get("scenario.held_out_clients"):
        words.append(f"{held_out} of all clients held out" if isinstance(held_out, float) else f"{held_out} held out")
    if "seed" in settings:
        words.append(f"seed {settings['seed']}")
    lines = [(str(status.run.run_dir), "bold"), (", ".join(filter(None, words)), "")]
    return [terminal.text(line, style) for line, style in lines if line]


def progress(status: RunStatus) -> Table:
    """Return the line with the number of rounds, the progress bar and the time left."""
    done, left = len(status.run.rounds), status.seconds_left
    cells: list[RenderableType] = [f"round {done}" + (f"/{status.total}" if status.total else "")]
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column(no_wrap=True, overflow="crop")
    if status.total:
        line.add_column(ratio=1)
        cells.append(ProgressBar(status.total, done))
    if left is not None:
        line.add_column(no_wrap=True, overflow="crop")
        cells.append(f"{format_duration(left)} left")
    line.add_row(*cells)
    return line


def describe_state(status: RunStatus) -> str:
    """Return the line that describes the state of the run: waiting, in progress, without recent changes, or ended."""
    done, seconds = len(status.run.rounds), status.round_seconds
    if status.ended:
        return f"ended after round {done}"
    if status.silence > max(QUIET, 3 * (seconds or 0)) and done:
        fix = f"if it was stopped, resume it with: fl-lightning fit --resume {status.run.run_dir}"
        return f"nothing has changed for {format_duration(status.silence)}; {fix}"
    if not done:
        return f"waits for its first round to end, for {format_duration(status.since_round)} so far"
    if status.total and done >= status.total:
        return "all rounds are done, final files are being written"
    return f"round {done + 1} is under way" + ("" if seconds is None else f"; a round takes {seconds:.3g} s")


def clients(status: RunStatus) -> list[str]:
    """Return lines about the clients' accuracies: their spread and, if logged by client, the three worst clients."""
    if status.clients:
        scores = sorted((row["acc"], int(row["client"])) for row in status.clients if "client" in row)
        acc = [score for score, _ in scores]
        count = f"{len(acc)} client{'s' if len(acc) > 1 else ''}"
        spread = f"acc {acc[0]:.4f} to {acc[-1]:.4f}, median {np.median(acc):.4f}, deviation {np.std(acc):.4f}"
        names = labels(status.names.clients, [client for _, client in scores[:3]])
        worst = ", ".join(f"{name} ({score:.4f})" for name, (score, _) in zip(names, scores, strict=False))
        return [f"{count} in round {status.clients[0]['round']}: {spread}", f"the worst: {worst}"]
    for row in reversed(status.run.rounds):
        if {"client/acc_mean", "client/acc_std", "client/acc_worst_decile"} <= row.keys():
            mean, std, worst_tenth = (row[f"client/acc_{name}"] for name in ("mean", "std", "worst_decile"))
            spread = f"acc mean {mean:.4f}, deviation {std:.4f}, worst tenth {worst_tenth:.4f}"
            return [f"clients in round {row['round']}: {spread}"]
    return []


def last_warnings(status: RunStatus, terminal: Terminal) -> list[Text]:
    """Return the run's last warnings, each cut to three lines of the terminal."""
    length = 3 * terminal.width
    lines = [line if len(line) <= length else f"{line[: length - 3]}..." for line in status.warnings]
    return [terminal.text(line, "yellow") for line in (["last warnings:"] if lines else []) + lines]


def plots(rounds: Sequence[Row], terminal: Terminal, lines: int | None) -> list[RenderableType]:
    """Return plots of accuracies and losses over rounds, each below its legend.

    Args:
        rounds: The run's metrics.
        terminal: Width, colours and encoding of the terminal.
        lines: Number of lines for all plots; None for no limit.
    """
    recorded = [{name: label for name, label in names.items() if points(rounds, name)} for names in PLOTS]
    recorded = [names for names in recorded if names]
    beside = len(recorded) > 1 and terminal.width >= MIN_WIDTH_BESIDE
    area = replace(terminal, width=(terminal.width - 2) // 2) if beside else terminal
    rows = rows_of_plots(lines, [len(names) for names in recorded], beside) if area.width >= MIN_WIDTH else []
    panels = [Group(*legend(rounds, names, area)) for names in recorded]
    for panel, names, number in zip(panels, recorded, rows, strict=False):
        panel.renderables.extend([curves(rounds, list(names), area, number)] if number else [])
    if not beside:
        return [*panels]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for _ in panels:
        grid.add_column(vertical="bottom", width=area.width)
    grid.add_row(*panels)
    return [grid]


def rows_of_plots(lines: int | None, legends: Sequence[int], beside: bool) -> list[int]:
    """Return the number of rows of each plot; 0 if there is only enough space for its legend.

    The legends of all plots are shown. Side by side, all plots are drawn or none. Otherwise the first plots are drawn,
    as many as have enough space.

    Args:
        lines: Number of lines for plots and legends; None for no limit.
        legends: Number of lines of each plot's legend.
        beside: Whether the plots are side by side.
    """
    if lines is None:
        return [USUAL_ROWS] * len(legends)
    if beside:
        rows = lines - max(legends) - FRAME_ROWS
        return [min(rows, MAX_ROWS) if rows >= MIN_ROWS else 0] * len(legends)
    for count in range(len(legends), 0, -1):
        rows = (lines - sum(legends)) // count - FRAME_ROWS
        if rows >= MIN_ROWS:
            return [min(rows, MAX_ROWS)] * count + [0] * (len(legends) - count)
    return [0] * len(legends)


def legend(rounds: Sequence[Row], names: Mapping[str, str], terminal: Terminal) -> list[Text]:
    """Return the legend of a plot: mark, label and last value of each curve, and for accuracies also the best value."""
    lines = []
    for (name, label), color, mark in zip(names.items(), COLORS, MARKS, strict=False):
        figures = best_and_last(points(rounds, name), name, is_lower_better(name))
        words = f" {label} {figures['last']:.4f}"
        best = f", best {figures['best']:.4f} in round {figures['best_round']}"
        if "acc" in name and 2 + len(words + best) <= terminal.width:
            words += best
        sign = ("--" if terminal.ascii else "━━") if terminal.colors else 2 * mark
        lines.append(Text.assemble((sign, color), words, no_wrap=True, overflow="crop"))
    return lines


def curves(rounds: Sequence[Row], names: Sequence[str], terminal: Terminal, rows: int) -> Text:
    """Return a plot of metrics over rounds. Curves differ in colour or, without colours, in the plotted character.

    The largest and the smallest value are beside the plot, the first and the last round below it.
    """
    points_of = {name: points(rounds, name) for name in names}
    xs = [[row["round"] for row in curve] for curve in points_of.values()]
    ys = [[row[name] for row in curve] for name, curve in points_of.items()]
    (first, last), (low, high) = ((min(map(min, each)), max(map(max, each))) for each in (xs, ys))
    margin = 0.0 if low < high else 0.1 * (abs(low) or 1)
    bottom, top = f" {low - margin:.3g}", f" {high + margin:.3g}"
    width = terminal.width - 2 - max(len(bottom), len(top))
    plot = uniplot.plot_to_string(
        xs=xs,
        ys=ys,
        y_min=low - margin,
        y_max=high + margin,
        lines=True,
        width=width,
        height=rows,
        x_labels=False,  # uniplot rounds labels too much in little space
        y_labels=False,
        x_gridlines=[],
        y_gridlines=[],
        character_set="braille" if terminal.colors and not terminal.ascii else "ascii",
        force_ascii_characters=list(MARKS),
        color=list(COLORS) if terminal.colors else False,
    )
    lines = plot.translate(LINES_OF_ASCII if terminal.ascii else {}).split("\n")
    lines[1] += top
    lines[rows] += bottom
    lines.append(f" {first}" + (f"{last:>{width - len(str(first))}}" if last > first else ""))
    return Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop")


def points(rounds: Sequence[Row], name: str) -> list[Row]:
    """Return the rows of the rounds that are points of a metric's curve: those with a value that the plot can show.

    Values above `LARGEST` in absolute value are left out.
    """
    return [row for row in rounds if abs(row.get(name, math.inf)) <= LARGEST]
