"""The main process's handle of a worker process or Ray actor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from typing import Any

from fl_lightning.core.errors import FLError
from fl_lightning.core.task import Task
from fl_lightning.engines.task_server import Answer, Steps


class WorkerLost(FLError):
    """A worker process or actor ended unexpectedly or does not respond. The message says how it ended.

    Args:
        message: How it ended.
        exited: Whether it ended itself, with an exit status, and was not killed.
    """

    exit_code = 1

    def __init__(self, message: str, exited: bool = False) -> None:
        super().__init__(message)
        self.exited = exited


class PoolWorker(ABC):
    """The main process's handle of one worker process or actor, which answers requests in order.

    Attributes:
        ready: Whether the worker has loaded the run's experiment (`Worker`).
        tasks: The tasks that were sent to the worker and are not answered yet, in order.
        pending: Number of requests that are not answered yet.
        since: The value of `time.monotonic` when the worker began with the oldest of them; infinite without requests.
        report_at: The time from which on the worker is reported if it has not answered.
        steps: The training steps of its present client, if the worker has sent them.
        overdue: What the worker exceeded, if the engine has killed it for that; otherwise an empty string.
    """

    def __init__(self) -> None:
        self.ready, self.overdue = False, ""
        self.tasks: deque[Task] = deque()
        self.steps: Steps | None = None
        self.pending, self.since, self.report_at = 0, math.inf, math.inf

    @abstractmethod
    def send(self, handle: Any, blocks: dict[int, Any] | None = None) -> None:
        """Send the worker process one request: a task with its shared tensors, or the experiment (`Worker`) to load.

        Args:
            handle: The handle of the serialized task or `Worker` object.
            blocks: The handles of the blocks of shared tensors; None for an experiment (`Worker`).
        """

    @abstractmethod
    def answer(self) -> Answer | Steps:
        """Return the worker process's answer to the oldest request that is not answered yet.

        A worker may send the steps of its present client before.

        Raises:
            WorkerLost: The worker ended or does not respond.
        """

    @abstractmethod
    def end(self) -> None:
        """Stop the worker process without waiting for its tasks."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker process. `answer` then raises `WorkerLost`."""

    def describe(self) -> str:
        """Return what identifies the worker process, and whether it is stopped; by default an empty string."""
        return ""
