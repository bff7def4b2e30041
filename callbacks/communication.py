"""How much crosses between the clients and the server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fl_lightning.callbacks.base import RoundCallback

if TYPE_CHECKING:
    from fl_lightning.engines import Result
    from fl_lightning.evaluation import Row
    from fl_lightning.orchestrator import FederatedOrchestrator


class CommunicationMeter(RoundCallback):
    """Counts the bytes of the messages: `comm/up_bytes` and `comm/down_bytes` a round, `comm/total_bytes` so far.

    Without a server all is counted where it arrives, as `down`: what a peer sends is what another receives.
    """

    def __init__(self) -> None:
        self.up = self.down = self.total = 0

    def on_round_start(self, run: FederatedOrchestrator, participants: Sequence[int]) -> None:
        """Start the round's count."""
        self.up = self.down = 0

    def on_client_end(self, run: FederatedOrchestrator, result: Result) -> None:
        """Count what the client was sent and what it sent."""
        self.down += result.download_bytes
        self.up += result.upload.nbytes if result.upload and run.algorithm.server else 0

    def on_round_metrics(self, run: FederatedOrchestrator, metrics: Row) -> None:
        """Add the round's bytes to its metrics."""
        self.total += self.up + self.down
        metrics |= {"comm/up_bytes": self.up, "comm/down_bytes": self.down, "comm/total_bytes": self.total}

    def state_dict(self) -> dict[str, Any]:
        """The total."""
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a total."""
        self.total = state["total"]
