"""Callback that shows the progress of a run on the screen, and messages about its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType  # a type
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.callbacks.run_summary import summarize_run
from fl_lightning.core.console import SafeConsole
from fl_lightning.evaluation.summary import label_of

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.callbacks.notebook_view import NotebookView
    from fl_lightning.engines import Result
    from fl_lightning.evaluation.round_metrics import RoundMetrics


SHOWN = {
    name: label_of(name)
    for metric in ("acc", "mae")
    for name in (f"global/{metric}", f"client/{metric}_mean", f"new_client/{metric}_mean")
} | {"client/train_loss": "train loss"}
"""The metrics that the line of a round shows if the run has them, and their labels."""


class RoundProgress(RoundCallback):
    """Show a summary of the run and its progress: bars on a terminal, a live view in a notebook, lines in a file.

    Args:
        console: The output; standard output by default.
    """

    keeps_no_uploads = True

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or SafeConsole()
        self._live: Bars | NotebookView | None = None
        self._started = 0.0
        self._first_round = 0

    def on_fit_start(self, run: FederatedRun) -> None:
        """Print the summary of the run. On a terminal or in a notebook, start the display of the progress."""
        self._started, self._first_round = time.monotonic(), run.round
        self.console.print("\n".join(summarize_run(run)), soft_wrap=True, highlight=False, markup=False)
        if self.console.is_jupyter and not self.console.quiet:
            from fl_lightning.callbacks.notebook_view import NotebookView  # imports pandas

            self._live = NotebookView(run)
        elif self.console.is_terminal:
            self._live = Bars(run, self.console)

    def on_round_start(self, run: FederatedRun, participants: Sequence[int]) -> None:
        """Reset the count of clients that have finished their fit in the round."""
        if self._live:
            self._live.begin_round(len(participants))

    def on_client_end(self, run: FederatedRun, result: Result) -> None:
        """Show that a client has finished its fit."""
        if self._live:
            self._live.end_client()

    def on_round_end(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Show the metrics of the round or, without a terminal or notebook, print a line about it.

        After the first round, also print the engine's message, such as the engine that `auto` has chosen.
        """
        if run.engine.note and run.round == self._first_round + 1:
            self.console.print(run.engine.note, soft_wrap=True, highlight=False)
        note = "  ".join(f"{label} {metrics[name]:.4f}" for name, label in SHOWN.items() if name in metrics)
        left = (time.monotonic() - self._started) / (run.round - self._first_round) * (run.rounds - run.round)
        if self._live:
            self._live.end_round(note, left)
        else:
            line = f"round {run.round}/{run.rounds}  {note}  left {left:.0f} s"
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def on_fit_end(self, run: FederatedRun) -> None:
        """Remove the progress bars. In a notebook, show the final metrics and why the run ended."""
        if self._live:
            stopped = f"stopped after round {run.round} of {run.rounds}"
            self._live.end(describe_end(run, self._first_round) if run.is_over else stopped)
            self._live = None


class Bars(Progress):
    """Progress bars with notes below, and an empty line for the `^C` that a terminal prints at the cursor.

    Without that line, `^C` would wrap and a bar would remain on the screen.
    """

    def __init__(self, run: FederatedRun, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
        )
        self.run = run
        self._rounds = self.add_task("rounds", total=run.rounds, completed=run.round, note="")
        self._clients = self.add_task("clients", total=None, note="")
        self.start()

    def begin_round(self, clients: int) -> None:
        """Reset the bar of the round's clients."""
        self.reset(self._clients, total=clients)

    def end_client(self) -> None:
        """Advance the bar of the round's clients."""
        self.advance(self._clients)

    def end_round(self, note: str, left: float) -> None:
        """Advance the bar of rounds. `left` is not used: the bar estimates the remaining time itself."""
        self.update(self._rounds, completed=self.run.round, note=note)

    def end(self, reason: str) -> None:
        """Remove the bars. The reason is printed elsewhere."""
        self.stop()

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return what the terminal shows: the bars, the notes below them, and an empty line."""
        notes = [Text(task.fields["note"]) for task in self.tasks if task.fields["note"]]
        return self.make_tasks_table(self.tasks), *notes, ""


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
