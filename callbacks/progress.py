"""Callback that shows the progress of a run on the screen, and messages about its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType  # a type
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.callbacks.pace import Pace, View
from fl_lightning.callbacks.run_summary import summarize_run
from fl_lightning.core.console import SafeConsole
from fl_lightning.core.durations import format_duration
from fl_lightning.core.round_progress import listen
from fl_lightning.core.terminal import wrap_words
from fl_lightning.evaluation.summary import label_of

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.evaluation.round_metrics import RoundMetrics


SHOWN = {
    name: label_of(name)
    for metric in ("acc", "mae")
    for name in (f"global/{metric}", f"client/{metric}_mean", f"new_client/{metric}_mean")
} | {"client/train_loss": "train loss"}
"""The metrics that the line of a round shows if the run has them, and their labels."""

LINE_SECONDS = 30.0
"""Without a terminal: seconds without a line after which a line about the unfinished round is printed."""

SLOW_CLIENT = 2.0
"""Seconds after which a terminal shows the steps of clients, or an evaluation. Shorter ones would only flicker."""


class RoundProgress(RoundCallback):
    """Show a summary of the run and its progress: bars on a terminal, a live view in a notebook, else lines.

    Without a terminal, each round has a line, and a round that takes longer has one about every 30 seconds. So have
    terminals with `TERM=dumb` or `NO_COLOR`.

    Args:
        console: The output; standard output by default.
    """

    keeps_no_uploads = True
    clock: Callable[[], float] = staticmethod(time.monotonic)

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or SafeConsole()
        self._pace: Pace | None = None
        self._view: View | None = None
        self._contexts = ExitStack()

    def on_fit_start(self, run: FederatedRun) -> None:
        """Print the summary of the run, and start the display of the progress."""
        self._print("\n".join(summarize_run(run)))
        self._pace = Pace(run, self.clock)
        self._view = self._pace.view = self._new_view(self._pace)
        self._contexts.enter_context(listen(self._pace))

    def _new_view(self, pace: Pace) -> View:
        console = self.console
        if console.is_jupyter and not console.quiet:
            from fl_lightning.callbacks.notebook_view import NotebookView  # imports pandas

            return NotebookView(pace)
        if console.is_terminal and not console.is_dumb_terminal and not console.no_color:
            return Bars(pace, console)
        return Lines(pace, self._print)

    def on_round_start(self, run: FederatedRun, participants: Sequence[int]) -> None:
        """Reset the count of clients that have finished their fit in the round."""
        if self._pace:
            self._pace.begin_round(len(participants))

    def on_round_end(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Show the metrics of the round.

        After the first round, also print the engine's message, such as the engine that `auto` has chosen.
        """
        if not self._pace or not self._view:
            return
        if run.engine.note and run.round == self._pace.first_round + 1:
            self._print(run.engine.note)
        self._pace.begin_round(0)
        self._view.end_round(
            "  ".join(f"{label} {metrics[name]:.4f}" for name, label in SHOWN.items() if name in metrics)
        )

    def on_fit_end(self, run: FederatedRun) -> None:
        """Remove the progress bars. In a notebook, show the final metrics, why the run ended, and how long it took."""
        self._contexts.close()
        if self._pace and self._view:
            end = describe_end(run, self._pace.first_round)
            stopped = f"stopped after round {run.round} of {run.rounds}"
            self._view.end(f"{end if run.is_over else stopped}; {describe_time(self._pace.seconds)}")
        self._pace = self._view = None

    def _print(self, text: str) -> None:
        """Print lines. On a terminal, they are broken between words, but no word is broken, such as a path."""
        text = wrap_words(text, self.console.width) if self.console.is_terminal else text
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)


class Lines:
    """A line for each round, and lines about rounds that take long, for files and plain terminals.

    Args:
        pace: The progress of the run.
        show: Prints a line.
    """

    def __init__(self, pace: Pace, show: Callable[[str], None]) -> None:
        self.pace, self.show = pace, show
        self._last = pace.clock()

    def tick(self) -> None:
        """Print a line if the last one was long ago."""
        if self.pace.clock() - self._last < LINE_SECONDS:
            return
        run, pace = self.pace.run, self.pace
        clients = [f"client {pace.trained}/{pace.clients}"] * bool(pace.clients)
        self._show(f"round {pace.finished_rounds + 1}/{run.rounds}", *clients, pace.describe_steps())

    def end_round(self, note: str) -> None:
        """Print the line of a round."""
        run = self.pace.run
        self._show(f"round {run.round}/{run.rounds}", note)

    def end(self, reason: str) -> None:
        """Do nothing. The reason is printed elsewhere."""

    def _show(self, *parts: str) -> None:
        left = self.pace.seconds_left
        self.show("  ".join(filter(None, [*parts, "" if left is None else f"left {format_duration(left)}"])))
        self._last = self.pace.clock()


class Bars(Progress):
    """Progress bars with notes below, and an empty line for the `^C` that a terminal prints at the cursor.

    Without that line, `^C` would wrap and a bar would remain on the screen. The bars are drawn ten times a second, and
    read the progress then.

    Args:
        pace: The progress of the run.
        console: The terminal.
    """

    def __init__(self, pace: Pace, console: Console) -> None:
        self.pace, self.note = pace, ""
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TextColumn("{task.fields[left]}", table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
        )
        self._rounds = self.add_task("rounds", total=pace.run.rounds, left="")
        self._clients = self.add_task("clients", total=None, left="")
        self._steps = self.add_task("steps", total=None, left="", visible=False)
        self.start()

    def tick(self) -> None:
        """Do nothing. The bars are drawn at their own pace."""

    def end_round(self, note: str) -> None:
        """Set the note below the bars."""
        self.note = note

    def end(self, reason: str) -> None:
        """Remove the bars. The reason is printed elsewhere."""
        self.stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what the terminal shows: the bars, the note below them, and an empty line."""
        if self.tasks:  # not yet while the base class is built
            self._read_progress()
        notes = [Text(self.note)] if self.note else []
        return self.make_tasks_table(self.tasks), *notes, ""

    def _read_progress(self) -> None:
        pace, left = self.pace, self.pace.seconds_left
        self.update(
            self._rounds,
            completed=pace.finished_rounds,
            left="" if left is None else str(timedelta(seconds=math.ceil(left))),
        )
        self.update(self._clients, total=pace.clients or None, completed=pace.trained)
        name, done, total = "steps", pace.steps, pace.all_steps
        if pace.all_evaluated:
            name, done, total = "evaluated", pace.evaluated, pace.all_evaluated
        is_slow = total > 0 and pace.client_seconds >= SLOW_CLIENT
        self.update(self._steps, description=name, total=total or None, completed=done, visible=is_slow)


def describe_progress(run: FederatedRun, has_config: bool) -> str:
    """Return a message that says after which round a run was interrupted, and how to resume it.

    Args:
        run: The run.
        has_config: Whether the run can be rebuilt from its config, as `fit --resume` does.
    """
    fix = f"resume it with: fl-lightning fit --resume {run.run_dir}"
    if run.is_dry_run:
        fix = "nothing is kept"
    elif not has_config:
        fix = f"resume it with: FederatedOrchestrator(..., run_dir={str(run.run_dir)!r}).fit(resume=True)"
    return f"after round {run.round} of {run.rounds}; {fix}"


def describe_end(run: FederatedRun, first_round: int) -> str:
    """Return a message that says why a run is over: all rounds are done, or a callback stopped it.

    Args:
        run: The run.
        first_round: The last finished round when `fit` was called. If it still is, there was nothing to do.
    """
    callback = next((each for each in run.callbacks if each.stops), None)
    reason = f"all {run.rounds} rounds are done" if run.rounds > 1 else "1 round is done"
    if run.round < run.rounds and callback:
        name, why = type(callback).__name__, callback.stop_reason
        reason = f"stopped after round {run.round} of {run.rounds} by {name}{why and f': {why}'}"
    return f"nothing to do: {reason}" if run.round == first_round else reason


def describe_time(seconds: float) -> str:
    """Return a message that says how long a run took."""
    return f"it took {format_duration(seconds)}"
