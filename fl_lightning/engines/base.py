"""The base class of engines, and the reordering of their results by client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fl_lightning.core.task import Result, Task
from fl_lightning.engines.worker import Worker

Value = TypeVar("Value")


class Engine(ABC):
    """Base class of engines: ways to run clients' tasks, such as one after another or in several processes.

    An engine may run tasks in any order, on any machine that has a `Worker`.

    Attributes:
        fits: Number of fits in the run, if known.
        note: A message for the user, or an empty string.
        check_interrupt: Raises an error if SIGINT or SIGTERM has arrived. The orchestrator sets it, and an engine that
            waits for other machines calls it.
    """

    fits: int = 0
    note: str = ""
    check_interrupt: Callable[[], None] = staticmethod(lambda: None)

    def in_one_fit(self, worker: Worker, work: Callable[[], Value]) -> Value:
        """Call `work`, which trains many clients, and return its value. An engine may let them share one `Trainer.fit`.

        The base class calls `work` without a shared fit.

        Args:
            worker: The worker object of the tasks.
            work: The rounds of a run, or any other work that calls `run`.
        """
        return work()

    @abstractmethod
    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield one result per task in any order. Take a task from the iterator only when it can be started."""

    def check(self, worker: Worker) -> None:  # noqa: B027, most engines take every worker
        """Check, before the first round, that this engine can run the experiment.

        Raises:
            ConfigError: Names the key and the fix.
        """

    def start(self, worker: Worker) -> None:  # noqa: B027, most engines have nothing to start
        """Start what the first tasks would otherwise wait for, such as worker processes. Calling it is optional.

        Args:
            worker: The worker object of the tasks to come.

        Raises:
            FLError: It cannot be prepared.
        """

    def close(self) -> None:  # noqa: B027, most engines hold nothing
        """Release processes and memory. Called at the end of every run; `run` may be called again afterwards."""

    def state_dict(self) -> dict[str, Any]:
        """Return the engine's state for checkpoints, such as a choice that a resumed run must keep.

        It consists of nested dicts and lists of tensors, numbers and strings.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027, most engines have no choices to keep to
        """Restore the engine's state that `state_dict` returned."""


def in_client_order(results: Iterable[Result], clients: Iterable[int]) -> Iterator[Result]:
    """Yield results in the order of `clients`, not of arrival, so that floating-point sums are reproducible."""
    waiting: dict[int, Result] = {}
    arriving = iter(results)
    for client in clients:
        while client not in waiting:
            result = next(arriving)
            waiting[result.client] = result
        yield waiting.pop(client)
