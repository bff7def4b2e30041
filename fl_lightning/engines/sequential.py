"""The engine that trains one client after another in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

from fl_lightning.core.task import Result, Task
from fl_lightning.engines.shared_fit import SharedFitEngine, can_share_fit
from fl_lightning.engines.unread_result import read_results
from fl_lightning.engines.worker import Worker


class SequentialEngine(SharedFitEngine):
    """Trains clients one after another on the trainer's device, with memory for one client's training at a time.

    All clients of a run share one `Trainer.fit`, because starting a fit takes time. The results are the same to the
    bit as with a fit for each client. Each client gets its own fit if the trainer has callbacks or other options that
    apply to one fit, or if the method has a client module of its own.

    Args:
        shared_fit: Whether clients may share a fit.
    """

    def __init__(self, shared_fit: bool = True) -> None:
        self.shared_fit = shared_fit

    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield the results of tasks in order. On a CPU, each task is run when its result is requested."""
        if self._fit:
            started = (worker.start(task, self._fit, keep=task.keep_upload) for task in tasks)
            yield from read_results(started, worker.device)
            return
        for task in tasks:
            yield worker.run(task)
            if task.fit:
                gc.collect()  # a used Trainer is a cycle that holds its model

    def _can_share(self, worker: Worker) -> bool:
        return self.shared_fit and can_share_fit(worker)
