"""The engine that trains one client after another in this process."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator

from fl_lightning.core.task import Result, Task
from fl_lightning.engines.base import Engine, Value
from fl_lightning.engines.shared_fit import can_share_fit, run_shared_fit
from fl_lightning.engines.worker import Fit, Worker


class SequentialEngine(Engine):
    """Trains clients one after another on the trainer's device, with memory for one client's training at a time.

    All clients of a run share one `Trainer.fit`, because starting a fit takes time. The results are the same to the
    bit as with a fit for each client. Each client gets its own fit if the trainer has callbacks or other options that
    apply to one fit, or if the method has a client module of its own.

    Args:
        shared_fit: Whether clients may share a fit.
    """

    def __init__(self, shared_fit: bool = True) -> None:
        self.shared_fit = shared_fit
        self._worker: Worker | None = None
        self._can_share = False
        self._fit: Fit | None = None

    def in_one_fit(self, worker: Worker, work: Callable[[], Value]) -> Value:
        """Call `work` and return its value, if possible inside one `Trainer.fit` that all clients share."""
        if self._worker is not worker:
            self._worker, self._can_share = worker, self.shared_fit and can_share_fit(worker)
        return run_shared_fit(worker, lambda fit: self._with(fit, work)) if self._can_share else work()

    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield the results of tasks in order. Each task is run when its result is requested."""
        for task in tasks:
            yield worker.run(task, self._fit)
            if task.fit and not self._fit:
                gc.collect()  # a used Trainer is a cycle that holds its model

    def _with(self, fit: Fit, work: Callable[[], Value]) -> Value:
        self._fit = fit
        try:
            return work()
        finally:
            self._fit = None
