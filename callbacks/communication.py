"""Callbacks that measure communication cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from fl_lightning.callbacks.base import RoundCallback
from fl_lightning.callbacks.figures import Arrays, RoundFigure
from fl_lightning.callbacks.plots import lines, panels

if TYPE_CHECKING:
    from fl_lightning.callbacks.base import FederatedRun
    from fl_lightning.engines import Result
    from fl_lightning.evaluation.round_metrics import RoundMetrics


class CommunicationMeter(RoundCallback):
    """Count the bytes that clients upload and download, in each round and over all rounds so far.

    Logs `comm/up_bytes`, `comm/down_bytes` and, for all rounds so far, `comm/total_bytes`. Without a server, each
    message is counted once, as `down`, at the peer that receives it.
    """

    keeps_no_uploads = True

    def __init__(self) -> None:
        self.up = self.down = self.total = 0

    def metrics(self, run: FederatedRun) -> Iterable[str]:
        """Return the names of the three logged byte counts: uploads, downloads and total."""
        return [f"comm/{what}_bytes" for what in ("up", "down", "total")]

    def on_round_start(self, run: FederatedRun, participants: Sequence[int]) -> None:
        """Set the byte counts of the round to zero."""
        self.up = self.down = 0

    def on_client_end(self, run: FederatedRun, result: Result) -> None:
        """Add the bytes of the client's download and upload to the round's counts."""
        self.down += result.download_bytes
        self.up += result.upload.nbytes if result.upload and run.algorithm.server else 0

    def on_round_metrics(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Add the round's uploaded and downloaded bytes, and the total of all rounds so far, to its metrics."""
        self.total += self.up + self.down
        metrics |= {"comm/up_bytes": self.up, "comm/down_bytes": self.down, "comm/total_bytes": self.total}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of bytes sent in all rounds so far, to save in a checkpoint."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the number of bytes sent in all rounds before the resume."""
        self.total = state["total"]


class BytesByRound(RoundFigure):
    """Draw the cumulative bytes sent over rounds (UA-PDFL, Fig. 11), as counted by `CommunicationMeter`.

    Args:
        every: Rounds between figures. By default only the last round.
    """

    name = "bytes"

    def on_round_metrics(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Add no metrics, because the bytes of the round are known only in `on_round_end`."""

    def on_round_end(self, run: FederatedRun, metrics: RoundMetrics) -> None:
        """Draw the figure of cumulative bytes if it is due in this round."""
        self._arrays = self.measure(run) if self.is_due(run, run.round) else None
        super().on_round_end(run, metrics)

    def measure(self, run: FederatedRun) -> Arrays:
        """Return the bytes uploaded (`up`) and downloaded (`down`) in each round so far, each `(rounds,)`."""
        return {way: np.array([row[f"comm/{way}_bytes"] for row in run.csv.rows]) for way in ("up", "down")}

    def draw(self, arrays: Arrays) -> Figure:
        """Draw the cumulative bytes over rounds: uploads, downloads and their sum."""
        ways = arrays | {"both": arrays["up"] + arrays["down"]}
        rounds = range(1, len(arrays["down"]) + 1)
        figure, (axes,) = panels(1)
        lines(axes, {way: (rounds, np.cumsum(sent) / 1e6) for way, sent in ways.items()}, "MB sent so far")
        return figure
