"""The base class of engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from fl_lightning.core.message import Tensors
from fl_lightning.core.task import Result, Tasks
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.data_source import DataSource
from fl_lightning.engines.worker import Worker


class Engine(ABC):
    """Base class of engines: ways to run clients' tasks, such as one after another or in several processes.

    An engine may run tasks in any order, on any machine that has a `Worker`.

    Attributes:
        fits: Number of fits in the run, if known.
        note: A message for the user, or an empty string.
        data_source: Loads the run's dataset on another machine. The orchestrator sets it.
        check_interrupt: Raises an error if SIGINT or SIGTERM has arrived. The orchestrator sets it, and an engine that
            waits for other machines calls it.
        try_upload: Raises an error if the server cannot aggregate the upload of a result, given the shared entries of
            the client's network. The experiment sets it.
    """

    fits: int = 0
    note: str = ""
    data_source: DataSource | None = None
    check_interrupt: Callable[[], None] = staticmethod(lambda: None)
    try_upload: Callable[[Result, Tensors], None] = staticmethod(lambda result, model: None)

    @abstractmethod
    def run(self, worker: Worker, tasks: Tasks, done: ClientOrder) -> None:
        """Run tasks in any order, and call `done(result)` with each result as soon as it is there.

        Take a task from the iterator only when it can be started. An error of a task is part of its result; what `done`
        raises ends the run.

        Args:
            worker: The worker object of the tasks.
            tasks: The tasks.
            done: Receives the results, and knows how much memory those take that wait for other clients.
        """

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
