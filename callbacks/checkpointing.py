"""Callback that writes checkpoints."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal

from fl_lightning.callbacks.monitor import Monitor
from fl_lightning.core.errors import check_positive

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.evaluation.round_metrics import RoundMetrics

SECONDS = 1.0
"""Minimum seconds between checkpoints if `every` is not given."""


class Checkpointing(Monitor):
    """Write checkpoints during a run and after its last round, and keep the newest and the best.

    Args:
        every: Rounds between checkpoints. By default, each round has one, except rounds that end within a second of the
            last checkpoint and are not the best so far. After a kill, the run repeats these rounds.
        keep_last: Number of newest checkpoints to keep. With 2 or more, a run can be resumed if one is damaged.
        monitor: Metric whose best round is also kept. By default `global/acc` or, for methods without a global model,
            `client/acc_mean`. With `every`, only rounds with a checkpoint can be the best.
        mode: Whether higher (`max`) or lower (`min`) is better; `auto` is the direction of the metric.

    Raises:
        ConfigError: `every` or `keep_last` is below 1, or `mode` is unknown.
    """

    def __init__(
        self,
        every: int | None = None,
        keep_last: int = 2,
        monitor: str | None = None,
        mode: Literal["auto", "max", "min"] = "auto",
    ) -> None:
        super().__init__(monitor, mode)
        check_positive("callbacks: Checkpointing.", every=1 if every is None else every, keep_last=keep_last)
        self.every, self.keep_last = every, keep_last
        self.best: float | None = None
        self.best_round: int | None = None
        self._next = 0.0  # time of the next checkpoint

    def on_round_end(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Write a checkpoint if one is due, if the round is the best so far, or if the run is over."""
        if self.every and run.round % self.every and not run.is_over:
            return
        value = self.watched(metrics)
        if value is not None and (self.best is None or self._better(value, self.best)):
            self.best, self.best_round = value, run.round
        elif not (self.every or run.is_over or run.data.is_remote) and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SECONDS
        best = self.best_round or run.round  # read now, because `keep` is called later, when the checkpoint is on disk
        run.save_checkpoint(keep=lambda rounds: {*rounds[: self.keep_last], best})

    def _better(self, value: float, best: float) -> bool:
        return value > best if self.mode == "max" else value < best

    def state_dict(self) -> dict[str, Any]:
        """Return the best value of the watched metric, and the round in which it was reached."""
        return {"best": self.best, "best_round": self.best_round}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the best value of the watched metric, and the round in which it was reached."""
        self.best, self.best_round = state["best"], state["best_round"]
