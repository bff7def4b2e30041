"""The engine that trains one client after another in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

from fl_lightning.core.errors import check_number
from fl_lightning.core.task import Result, Task
from fl_lightning.engines.base import Engine
from fl_lightning.engines.shared_fit import can_share_fit, run_shared_fit, take_for
from fl_lightning.engines.worker import Fit, Worker

MAX_WAITING = 1 << 26
"""Bytes of results that may wait until their shared fit ends."""


class SequentialEngine(Engine):
    """Trains clients one after another on the trainer's device, with memory for one client's training at a time.

    Several clients share one `Trainer.fit`, because starting a fit takes time. Their results, at most some 64 MB,
    are returned when it ends. The results are the same to the bit as with a fit for each client. Each client gets its
    own fit if the trainer has callbacks or other options that apply to one fit.

    Args:
        seconds: How long a shared fit takes further clients; 0 gives each client its own fit.

    Raises:
        ConfigError: `seconds` is below 0.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        check_number("engine.seconds", seconds, "[0, inf)", "use 0 for a fit of its own for each client")
        self.seconds = seconds
        self._worker: Worker | None = None
        self._shares_fit = False

    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Carry out tasks when their results are asked for."""
        tasks = iter(tasks)
        if self._worker is not worker:
            self._worker, self._shares_fit = worker, self.seconds > 0 and can_share_fit(worker)
        if self._shares_fit:
            for task in tasks:
                yield from run_shared_fit(worker, partial(self._run_tasks, worker, chain([task], tasks)))
        for task in tasks:
            yield worker.run(task)
            gc.collect()  # a used Trainer is a cycle that holds its model

    def _run_tasks(self, worker: Worker, tasks: Iterator[Task], fit: Fit) -> list[Result]:
        """Return the results of as many tasks as time and memory for results allow."""
        results: list[Result] = []
        waiting = 0
        for task in take_for(tasks, self.seconds):
            results.append(worker.run(task, fit))
            waiting += size(results[-1])
            if waiting > MAX_WAITING:
                break
        return results


def size(result: Result) -> int:
    """Return the bytes of the tensors in a result."""
    sections = [result.upload.tensors] if result.upload else []
    return sum(value.nbytes for section in (*sections, *result.memory.values()) for value in section.values())
