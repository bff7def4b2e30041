"""One client after another, in this process."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator

from fl_lightning.engines.base import Engine
from fl_lightning.engines.worker import Result, Task, Worker


class SequentialEngine(Engine):
    """Fits clients one after another on the trainer's device; memory for one client at a time."""

    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Run each task when its result is asked for."""
        for task in tasks:
            yield worker.run(task)
            gc.collect()  # a used Trainer is a cycle that holds its model
