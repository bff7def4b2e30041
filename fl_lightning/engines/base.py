"""The interface of an engine, and the one thing every engine's results go through."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

from fl_lightning.core.task import Result, Task
from fl_lightning.engines.worker import Worker


class Engine(ABC):
    """Carries out tasks, in any order and anywhere: `worker.run(task)` is all there is to a task.

    Attributes:
        fits: How many fits the run has, where that is known.
        note: What there is to tell the user about it, or nothing.
    """

    fits: int = 0
    note: str = ""

    @abstractmethod
    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield one result a task, as they finish; take tasks from the iterator only when there is room for them."""

    def check(self, worker: Worker) -> None:  # noqa: B027, most engines take every worker
        """Refuse, before the first round, what this engine cannot carry out.

        Raises:
            ConfigError: Names the key, and the mend.
        """

    def start(self, worker: Worker) -> None:  # noqa: B027, most engines have nothing to start
        """Have ready what the first tasks would otherwise wait for, such as processes; `run` needs no call of it.

        Args:
            worker: The worker object of the tasks to come.

        Raises:
            FLError: It cannot be had.
        """

    def close(self) -> None:  # noqa: B027, most engines hold nothing
        """Let go of processes and memory; called when a run ends, however it ends. `run` may follow all the same."""

    def state_dict(self) -> dict[str, str]:
        """What a resumed run must know to go on in the same way; it travels with checkpoints."""
        return {}

    def load_state_dict(self, state: dict[str, str]) -> None:  # noqa: B027, most engines have no choices to keep to
        """Go on in the way that `state_dict` tells of."""


def in_client_order(results: Iterable[Result], clients: Iterable[int]) -> Iterator[Result]:
    """Hand results on in the order of `clients`, whatever order they arrive in: sums then round the same."""
    waiting: dict[int, Result] = {}
    arriving = iter(results)
    for client in clients:
        while client not in waiting:
            result = next(arriving)
            waiting[result.client] = result
        yield waiting.pop(client)
