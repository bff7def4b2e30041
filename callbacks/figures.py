"""What papers look at, round by round: the base of the callbacks that leave numbers, arrays and pictures."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from fl_lightning.callbacks.base import RoundCallback
from matplotlib.figure import Figure

from fl_lightning.errors import ConfigError
from fl_lightning.files import write_atomically
from fl_lightning.report.figures import write_png

if TYPE_CHECKING:
    from fl_lightning.metrics import Row
    from fl_lightning.orchestrator import FederatedOrchestrator

Arrays = dict[str, np.ndarray]


class RoundFigure(RoundCallback):
    """Measures something every few rounds and after the last that was planned.

    Each time, numbers join the round's metrics, and `figures/<name>/round-<n>.npz` and `.png` appear in the run's
    folder and, where the logger takes images, as `figures/<name>` there. Subclasses set `name` and override `measure`,
    `numbers` and `draw`.

    Args:
        every: Rounds between measurements; by default only the last round has one.

    Raises:
        ConfigError: `every` is below 1.
    """

    name: str

    def __init__(self, every: int | None = None) -> None:
        if every is not None and every < 1:
            raise ConfigError(f"callbacks: {type(self).__name__}.every: {every} is below 1")
        self.every = every
        self._arrays: Arrays | None = None

    def is_due(self, run: FederatedOrchestrator, round: int) -> bool:
        """Whether a round is measured."""
        return round == run.rounds or (self.every is not None and round % self.every == 0)

    def measure(self, run: FederatedOrchestrator) -> Arrays:
        """The arrays that numbers and picture are made of, after a round's aggregation."""
        raise NotImplementedError

    def numbers(self, arrays: Arrays) -> Row:
        """What joins the round's metrics."""
        return {}

    def draw(self, arrays: Arrays) -> Figure:
        """The picture."""
        raise NotImplementedError

    def on_round_metrics(self, run: FederatedOrchestrator, metrics: Row) -> None:
        """Measure, if the round is due."""
        self._arrays = self.measure(run) if self.is_due(run, run.round) else None
        if self._arrays is not None:
            metrics |= self.numbers(self._arrays)

    def on_round_end(self, run: FederatedOrchestrator, metrics: Row) -> None:
        """Write the arrays and the picture."""
        if self._arrays is None:
            return
        folder, stem = run.run_dir / "figures" / self.name, f"round-{run.round:06d}"
        np.savez_compressed(content := BytesIO(), **cast(dict[str, Any], self._arrays))
        write_atomically(folder / f"{stem}.npz", content.getvalue())
        write_png(self.draw(self._arrays), folder / f"{stem}.png")
        log_image = getattr(run.logger, "log_image", None)
        if log_image:
            log_image(f"figures/{self.name}", [str(folder / f"{stem}.png")], step=run.round)
        self._arrays = None
