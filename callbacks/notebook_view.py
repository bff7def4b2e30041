"""Live view of a run in a Jupyter notebook. Imported only in notebooks, because importing pandas is slow."""

from __future__ import annotations

import time
from base64 import b64encode
from html import escape
from typing import TYPE_CHECKING

import pandas as pd

from fl_lightning.core.durations import format_duration
from fl_lightning.evaluation.summary import best_and_last, is_lower_better, label_of, main_metrics
from fl_lightning.runs.reader import Run

if TYPE_CHECKING:
    from fl_lightning.callbacks.pace import Pace

LONGEST_PAUSE = 2.0
"""Maximum number of seconds for which no further update is made after an update."""

CURVES = "Curves of the main metrics by round"
"""Alternative text of the curves, for screen readers."""


class NotebookView:
    """The progress, main metrics and curves of a run, in one output of a notebook that is updated during the run.

    After an update that took t seconds, the next one waits for 9 t seconds, at most `LONGEST_PAUSE`. Updates thus take
    little of the run's time.

    Args:
        pace: The progress of the run.
    """

    def __init__(self, pace: Pace) -> None:
        from IPython.display import display  # not a dependency: where a notebook runs, it is installed

        self.pace, self.run, self._status, self._note = pace, pace.run, "", ""
        self._trained, self._slow = 0, LONGEST_PAUSE
        self._curves, self._drawn_round = "", 0
        self._next_update = 0.0
        self._handle = display(self, display_id=True)

    def tick(self) -> None:
        """Show that one more client has finished its fit, or the steps of a client that takes long."""
        if self.pace.trained != self._trained:
            self._trained, self._slow = self.pace.trained, LONGEST_PAUSE
            self._update()
        elif self.pace.client_seconds >= self._slow:
            self._slow = self.pace.client_seconds + LONGEST_PAUSE
            self._update()

    def end_round(self, note: str) -> None:
        """Show the metrics of the round, and the estimated time until the run ends."""
        left = self.pace.seconds_left
        self._note, self._trained = note, 0
        self._status = "" if left is None else f"left {format_duration(left)}"
        self._update()

    def end(self, reason: str) -> None:
        """Show the final metrics and why the run ended."""
        self.pace.begin_round(0)
        self._status, self._next_update = reason, 0.0
        self._update()

    def _update(self) -> None:
        started = time.monotonic()
        if started >= self._next_update:
            self._handle.update(self)
            now = time.monotonic()
            self._next_update = now + min(9 * (now - started), LONGEST_PAUSE)

    def __repr__(self) -> str:
        """Return the progress and the last metrics as a line of text, for frontends without HTML."""
        return "  ".join([*self._progress(), *filter(None, [self._note])])

    def _repr_html_(self) -> str:
        bar = f'<progress value="{self.pace.rounds:.3f}" max="{self.run.rounds}"></progress>'
        return f"<div>{bar} {escape(', '.join(self._progress()))}{self._table()}{self._draw()}</div>"

    def _progress(self) -> list[str]:
        pace = self.pace
        clients = [f"client {pace.trained}/{pace.clients}"] * bool(pace.clients)
        parts = (f"round {pace.finished_rounds}/{self.run.rounds}", *clients, pace.describe_steps(), self._status)
        return [*filter(None, parts)]

    def _table(self) -> str:
        """Return the last and best values of the main metrics and of the training loss as an HTML table."""
        rows = self.run.csv.rows
        names = [*main_metrics(rows), "client/train_loss"]
        figures = {label_of(name): best_and_last(rows, name, is_lower_better(name)) for name in names}
        table = pd.DataFrame.from_dict({label: each for label, each in figures.items() if each}, orient="index")
        if table.empty:
            return ""
        table = table[["last", "best", "best_round"]].rename(columns={"best_round": "best round"})
        return table.to_html(float_format="{:.4f}".format)

    def _draw(self) -> str:
        """Return an HTML image of the curves of the main metrics. The image is drawn anew once per round."""
        rows = self.run.csv.rows
        if self._drawn_round < self.run.round and main_metrics(rows):
            image = b64encode(Run(self.run.run_dir, {}, rows).plot()._repr_png_()).decode()
            self._curves = f'<img alt="{CURVES}" src="data:image/png;base64,{image}">'
            self._drawn_round = self.run.round
        return self._curves
