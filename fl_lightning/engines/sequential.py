"""The engine that trains one client after another in this process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler

from fl_lightning.core.task import Task
from fl_lightning.engines.round_fit import RoundEngine
from fl_lightning.engines.unread_result import UnreadResult
from fl_lightning.engines.worker import Worker


class SequentialEngine(RoundEngine):
    """Trains clients one after another on the trainer's device, with memory for one client's training at a time.

    A round is one `Trainer.fit`, and a client is one of its batches, in which the local loop trains it. The results are
    the same to the bit as with a fit for each client. Each client gets a fit of its own inside the round's if the
    trainer has callbacks or other options that apply to one fit, or if the method has a client module of its own.

    Args:
        callbacks: Lightning callbacks of the round's `Trainer`, for which an epoch is a round and a batch is a client.
        profiler: Lightning profiler of the round's `Trainer`, such as `SimpleProfiler`, with a file.
        local_loop: Whether the local loop may train clients. Otherwise each client has a `Trainer.fit` of its own.
    """

    def __init__(
        self, callbacks: list[Callback] | None = None, profiler: Profiler | None = None, local_loop: bool = True
    ) -> None:
        super().__init__(callbacks, profiler)
        self.local_loop = local_loop

    def batches(self, worker: Worker, clients: Sequence[int]) -> Sequence[int]:
        """Return the ids of the clients: each is a batch."""
        return clients

    def run_batch(self, worker: Worker, arriving: Iterator[Task], batch: int) -> list[UnreadResult]:
        """Train the client of a batch, and return its result."""
        return [self.run_alone(worker, next(arriving))]
