"""The process side of a worker pool: receive workers and tasks, and send results back."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import one_line
from fl_lightning.core.task import Result, failed
from fl_lightning.engines.serialization import SerializedValue, unpack
from fl_lightning.engines.shared_fit import can_share_fit, run_shared_fit, take_for
from fl_lightning.engines.worker import Fit, Worker

SECONDS = 1.0  # how long a member's fit takes up further clients


@dataclass(frozen=True)
class Answer:
    """The answer of a worker process to one request.

    Args:
        result: Of a task; None for a worker object.
        refused: Why a worker object could not be taken in.
        warnings: Text, category, file and line of each warning that was not to be ignored.
        trace: Where the error behind the result's failure came from.
    """

    result: Result | None = None
    refused: str | None = None
    warnings: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)
    trace: str | None = None


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of a process that results depend on, such as torch's global flags and warning filters.

    Args:
        dtype: Torch's default type.
        precision: Torch's precision of float32 products.
        deterministic: Whether torch is to use deterministic algorithms: not, only with a warning, or always.
        filters: Which warnings to ignore, show or raise; the first that fits counts.
    """

    dtype: torch.dtype
    precision: str
    deterministic: int
    filters: list[tuple[Any, str, Any, str, int]]

    @classmethod
    def here(cls) -> ProcessSettings:
        """Return the settings of this process."""
        filters = [
            (action, pattern(message), category, pattern(module), line)
            for action, message, category, module, line in warnings.filters
            if isinstance(category, type) and found(category)
        ]
        precision, mode = torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()
        return cls(torch.get_default_dtype(), precision, mode, filters)

    def adopt(self) -> None:
        """Apply the settings to this process."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.set_deterministic_debug_mode(self.deterministic)
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(self.filters):
            warnings.filterwarnings(action, message, category, module, line)


def found(category: type) -> bool:
    """Return whether another process can import a class."""
    return getattr(sys.modules.get(category.__module__), category.__name__, None) is category


def pattern(expression: Any) -> str:
    """Return the pattern of a regular expression in `warnings.filters`, or "" for one that matches everything."""
    return getattr(expression, "pattern", expression) or ""


@dataclass(frozen=True)
class LoadWorker:
    """A request to load a worker object.

    Args:
        source: Its parcel.
        trainer: Options that its trainer has there.
    """

    source: np.ndarray
    trainer: dict[str, Any]


@dataclass(frozen=True)
class RunTask:
    """A request to carry out a task.

    Args:
        source: Its parcel.
        block: Gives the shelf's blocks that it needs.
    """

    source: np.ndarray
    block: Callable[[int], list[Tensor]]


Request = LoadWorker | RunTask


class TaskServer:
    """Serves requests in a worker process: loads worker objects and carries out tasks. Everything is sent as bytes.

    Each task is answered at once, but several that follow one another are carried out in one `Trainer.fit`, as by the
    sequential engine: for about a second, or until another worker object comes.
    """

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._relays: bool | None = None

    def serve(self, receive: Callable[[], Request], answer: Callable[[SerializedValue], None]) -> None:
        """Answer requests in order until there are no more.

        Args:
            receive: Waits for the next request; a worker object has to come first.
            answer: Takes the answer to it.

        Raises:
            Exception: Whatever `receive` raises when there are no more.
        """
        while True:
            request = self._orders_carried_out(self.worker, receive, answer) if self.worker else receive()
            if isinstance(request, LoadWorker):
                answer(self._taken_in(request))

    def _taken_in(self, load: LoadWorker) -> SerializedValue:
        try:
            worker, surroundings = unpack(load.source)
            surroundings.adopt()
            self.worker, self._relays = replace(worker, trainer=worker.trainer | load.trainer), None
        except Exception as error:
            return SerializedValue(Answer(refused=f"{type(error).__name__}: {one_line(error)}"))
        gc.collect()
        gc.freeze()  # what is here stays: a collection then looks only at what clients' fits have made
        return SerializedValue(Answer())

    def _orders_carried_out(
        self, worker: Worker, receive: Callable[[], Request], answer: Callable[[SerializedValue], None]
    ) -> LoadWorker | None:
        """Carry out tasks, in one shared fit if possible. Return the next worker object, or None if time was up."""

        def work(fit: Fit | None = None) -> LoadWorker | None:
            requests: Iterator[Request] = iter(receive, None)
            for request in take_for(requests, SECONDS if fit else 0):
                if isinstance(request, LoadWorker):
                    return request
                answer(carried_out(worker, request, fit, shown))
                del request
            return None

        with warnings.catch_warnings(record=True) as shown:
            if self._relays is None:
                self._relays = relays(worker)
            load = run_shared_fit(worker, work) if self._relays else work()
        gc.collect()  # a used Trainer is a cycle that holds its model
        return load


def relays(worker: Worker) -> bool:
    """Return whether tasks can share a fit; an error in the check becomes each client's own failure."""
    try:
        return can_share_fit(worker)
    except BaseException:
        return False


def carried_out(
    worker: Worker, order: RunTask, fit: Fit | None, shown: list[warnings.WarningMessage]
) -> SerializedValue:
    """Carry out a task and return the answer.

    Args:
        worker: The worker.
        order: The task.
        fit: Trains the client, as `Worker.run` takes it.
        shown: Warnings that were shown; those that the answer tells are taken out.
    """
    task = unpack(order.source, order.block)
    result = worker.run(task, fit)
    told = [(str(one.message), one.category, one.filename, one.lineno) for one in shown]
    shown.clear()
    cause = result.failure.__cause__ if result.failure else None
    trace = "".join(traceback.format_exception(cause)) if cause else None
    try:
        if result.upload:
            result = replace(result, upload=result.upload.on_cpu())
        return SerializedValue(Answer(result, None, told, trace))
    except Exception as error:
        return SerializedValue(Answer(failed(task, error), None, told))
