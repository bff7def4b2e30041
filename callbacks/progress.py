"""Callback that shows the progress of a run on the screen, and messages about its end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fl_lightning.callbacks.base import RoundCallback
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun

    from fl_lightning.engines import Result
    from fl_lightning.evaluation.summary import Row


class RoundProgress(RoundCallback):
    """Show rounds, accuracy and remaining time: bars on a terminal, otherwise one line per round.

    Args:
        console: The output; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()
        self._bars: Progress | None = None
        self._started = 0.0
        self._first_round = 0

    def on_fit_start(self, run: FederatedRun) -> None:
        """Print the columns of a tabular dataset and, on a terminal, start the progress bars."""
        self._started, self._first_round = time.monotonic(), run.round
        if schema := run.data.data.schema:
            self.console.print(schema.summary(), soft_wrap=True, highlight=False, markup=False)
        if not self.console.is_terminal:
            return
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            TimeRemainingColumn(table_column=Column(no_wrap=True)),
            console=self.console,
            transient=True,
        )
        self._rounds = self._bars.add_task("rounds", total=run.rounds, completed=run.round, note="")
        self._clients = self._bars.add_task("clients", total=None, note="")
        self._bars.start()

    def on_round_start(self, run: FederatedRun, participants: Sequence[int]) -> None:
        """Reset the progress bar of the round's clients."""
        if self._bars:
            self._bars.reset(self._clients, total=len(participants))

    def on_client_end(self, run: FederatedRun, result: Result) -> None:
        """Advance the progress bar of the round's clients."""
        if self._bars:
            self._bars.advance(self._clients)

    def on_round_end(self, run: FederatedRun, metrics: Row) -> None:
        """Advance the progress bar of rounds or, without a terminal, print a line about the round.

        After the first round, also print the engine's message, such as the engine that `auto` has chosen.
        """
        if run.engine.note and run.round == self._first_round + 1:
            self.console.print(run.engine.note, soft_wrap=True, highlight=False)
        labels = {"global/acc": "global acc", "client/acc_mean": "client acc", "client/train_loss": "loss"}
        note = "  ".join(f"{label} {metrics[name]:.4f}" for name, label in labels.items() if name in metrics)
        if self._bars:
            self._bars.update(self._rounds, completed=run.round, note=note)
        else:
            done = run.round - self._first_round
            left = (time.monotonic() - self._started) / done * (run.rounds - run.round)
            self.console.print(f"round {run.round}/{run.rounds}  {note}  left {left:.0f} s", soft_wrap=True)

    def on_fit_end(self, run: FederatedRun) -> None:
        """Remove the progress bars."""
        if self._bars:
            self._bars.stop()
            self._bars = None


class Bars(Progress):
    """Progress bars with notes below, and an empty line for the `^C` that a terminal prints at the cursor.

    Without that line, `^C` would wrap and a bar would remain on the screen.
    """

    def get_renderables(self) -> Iterable[RenderableType]:
        """Return the bars, the notes and the empty line."""
        notes = [Text(task.fields["note"]) for task in self.tasks if task.fields["note"]]
        return self.make_tasks_table(self.tasks), *notes, ""


def describe_progress(run: FederatedRun, resumable: bool) -> str:
    """Return a message that says after which round a run was interrupted, and how to resume it."""
    rest = f"resume it with: fl-lightning fit --resume {run.run_dir}" if resumable else "nothing is kept"
    return f"after round {run.round} of {run.rounds}; {rest}"


def describe_end(run: FederatedRun, first_round: int) -> str:
    """Return a message that says why a run is over: all rounds are done, or a callback stopped it.

    Args:
        run: The run.
        first_round: The last finished round when `fit` was called. If it still is, there was nothing to do.
    """
    callback = next((each for each in run.callbacks if each.stops), None)
    reason = f"all {run.rounds} rounds are done"
    if run.round < run.rounds and callback:
        name, why = type(callback).__name__, callback.stop_reason
        reason = f"stopped after round {run.round} of {run.rounds} by {name}{why and f': {why}'}"
    return f"nothing to do: {reason}" if run.round == first_round else reason
