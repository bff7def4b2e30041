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

ROOM = 1 << 26
"""Bytes of results that may wait until their shared fit ends."""


class SequentialEngine(Engine):
    """Trains clients one after another on the trainer's device, with memory for one client's training at a time.

    One `Trainer.fit` takes up clients for some time, since a fit of Lightning's has a cost of its own, and their
    results, some 64 MB of them at most, follow when it ends. What each of them comes to is the same to the bit as in a
    fit of its own, which it is given where the trainer has callbacks or other options that are meant for one fit.

    Args:
        seconds: How long a fit takes up further clients; 0 gives each client a fit of its own.

    Raises:
        ConfigError: `seconds` is below 0.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        check_number("engine.seconds", seconds, "[0, inf)", "use 0 for a fit of its own for each client")
        self.seconds = seconds
        self._asked: Worker | None = None
        self._relays = False

    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Carry out tasks when their results are asked for."""
        tasks = iter(tasks)
        if self._asked is not worker:
            self._asked, self._relays = worker, self.seconds > 0 and can_share_fit(worker)
        if self._relays:
            for task in tasks:
                yield from run_shared_fit(worker, partial(self._carried_out, worker, chain([task], tasks)))
        for task in tasks:
            yield worker.run(task)
            gc.collect()  # a used Trainer is a cycle that holds its model

    def _carried_out(self, worker: Worker, tasks: Iterator[Task], fit: Fit) -> list[Result]:
        """Return the results of as many tasks as time and memory for results allow."""
        results: list[Result] = []
        waiting = 0
        for task in take_for(tasks, self.seconds):
            results.append(worker.run(task, fit))
            waiting += size(results[-1])
            if waiting > ROOM:
                break
        return results


def size(result: Result) -> int:
    """Return the bytes of the tensors in a result."""
    sections = [result.upload.tensors] if result.upload else []
    return sum(value.nbytes for section in (*sections, *result.memory.values()) for value in section.values())
