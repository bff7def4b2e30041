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

SECONDS = 1.0  # how long a shared fit takes further clients


@dataclass(frozen=True)
class Answer:
    """The answer of a worker process to one request.

    Args:
        result: The result of a task; None for a worker object.
        refused: Why a worker object could not be loaded.
        warnings: Text, category, file and line of each warning that was shown.
        trace: The traceback of the error in the result.
    """

    result: Result | None = None
    refused: str | None = None
    warnings: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)
    trace: str | None = None


@dataclass(frozen=True)
class ProcessSettings:
    """Settings of a process that results depend on, such as torch's global flags and warning filters.

    Args:
        dtype: Torch's default dtype.
        precision: Torch's precision of float32 matrix products.
        deterministic: Torch's debug mode for deterministic algorithms.
        filters: The warning filters.
    """

    dtype: torch.dtype
    precision: str
    deterministic: int
    filters: list[tuple[Any, str, Any, str, int]]

    @classmethod
    def current(cls) -> ProcessSettings:
        """Return the settings of this process."""
        filters = [
            (action, pattern(message), category, pattern(module), line)
            for action, message, category, module, line in warnings.filters
            if isinstance(category, type) and is_importable(category)
        ]
        precision, mode = torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()
        return cls(torch.get_default_dtype(), precision, mode, filters)

    def apply(self) -> None:
        """Apply the settings to this process."""
        torch.set_default_dtype(self.dtype)
        torch.set_float32_matmul_precision(self.precision)
        torch.set_deterministic_debug_mode(self.deterministic)
        warnings.resetwarnings()
        for action, message, category, module, line in reversed(self.filters):
            warnings.filterwarnings(action, message, category, module, line)


def is_importable(category: type) -> bool:
    """Return whether another process can import a class."""
    return getattr(sys.modules.get(category.__module__), category.__name__, None) is category


def pattern(expression: Any) -> str:
    """Return the pattern of a regular expression in `warnings.filters`, or "" for one that matches everything."""
    return getattr(expression, "pattern", expression) or ""


@dataclass(frozen=True)
class LoadWorker:
    """A request to load a worker object.

    Args:
        source: The serialized worker object.
        trainer: Options that its trainer has in that process.
    """

    source: np.ndarray
    trainer: dict[str, Any]


@dataclass(frozen=True)
class RunTask:
    """A request to run a task.

    Args:
        source: The serialized task.
        block: Returns the tensors of a block of shared tensors.
    """

    source: np.ndarray
    block: Callable[[int], list[Tensor]]


Request = LoadWorker | RunTask


class TaskServer:
    """Serves requests in a worker process: loads worker objects and runs tasks. Everything is sent as bytes.

    Each task is answered at once. Successive tasks share one `Trainer.fit`, as in the sequential engine: for about a
    second, or until another worker object comes.
    """

    def __init__(self) -> None:
        self.worker: Worker | None = None
        self._shares_fit: bool | None = None

    def serve(self, receive: Callable[[], Request], answer: Callable[[SerializedValue], None]) -> None:
        """Answer requests in order until there are no more.

        Args:
            receive: Waits for the next request. The first one is a worker object.
            answer: Sends the answer.

        Raises:
            Exception: Whatever `receive` raises when there are no more.
        """
        while True:
            request = self._run_tasks(self.worker, receive, answer) if self.worker else receive()
            if isinstance(request, LoadWorker):
                answer(self._load(request))

    def _load(self, load: LoadWorker) -> SerializedValue:
        try:
            worker, settings = unpack(load.source)
            settings.apply()
            self.worker, self._shares_fit = replace(worker, trainer=worker.trainer | load.trainer), None
        except Exception as error:
            return SerializedValue(Answer(refused=f"{type(error).__name__}: {one_line(error)}"))
        gc.collect()
        gc.freeze()  # later collections then look only at objects of clients' fits
        return SerializedValue(Answer())

    def _run_tasks(
        self, worker: Worker, receive: Callable[[], Request], answer: Callable[[SerializedValue], None]
    ) -> LoadWorker | None:
        """Run tasks, in one shared fit if possible. Return the next worker object, or None if time was up."""

        def work(fit: Fit | None = None) -> LoadWorker | None:
            requests: Iterator[Request] = iter(receive, None)
            for request in take_for(requests, SECONDS if fit else 0):
                if isinstance(request, LoadWorker):
                    return request
                answer(run_task(worker, request, fit, shown))
                del request
            return None

        with warnings.catch_warnings(record=True) as shown:
            if self._shares_fit is None:
                self._shares_fit = shares_fit(worker)
            load = run_shared_fit(worker, work) if self._shares_fit else work()
        gc.collect()  # a used Trainer is a cycle that holds its model
        return load


def shares_fit(worker: Worker) -> bool:
    """Return whether tasks can share a fit; an error in the check becomes each client's own failure."""
    try:
        return can_share_fit(worker)
    except BaseException:
        return False


def run_task(
    worker: Worker, request: RunTask, fit: Fit | None, shown: list[warnings.WarningMessage]
) -> SerializedValue:
    """Run a task and return the answer.

    Args:
        worker: The worker.
        request: The task.
        fit: Trains the client, as in `Worker.run`.
        shown: Warnings that were shown. They move into the answer.
    """
    task = unpack(request.source, request.block)
    result = worker.run(task, fit)
    seen = [(str(one.message), one.category, one.filename, one.lineno) for one in shown]
    shown.clear()
    cause = result.failure.__cause__ if result.failure else None
    trace = "".join(traceback.format_exception(cause)) if cause else None
    try:
        if result.upload:
            result = replace(result, upload=result.upload.on_cpu())
        return SerializedValue(Answer(result, None, seen, trace))
    except Exception as error:
        return SerializedValue(Answer(failed(task, error), None, seen))
