"""The interface of an engine, and the one thing every engine's results go through."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from fl_lightning.engines.worker import Result, Task, Worker


class Engine(Protocol):
    """Carries out tasks, in any order and anywhere: `worker.run(task)` is all there is to a task."""

    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield one result a task, as they finish; take tasks from the iterator only when there is room for them."""
        ...


def in_client_order(results: Iterable[Result], clients: Iterable[int]) -> Iterator[Result]:
    """Hand results on in the order of `clients`, whatever order they arrive in: sums then round the same."""
    waiting: dict[int, Result] = {}
    arriving = iter(results)
    for client in clients:
        while client not in waiting:
            result = next(arriving)
            waiting[result.client] = result
        yield waiting.pop(client)
