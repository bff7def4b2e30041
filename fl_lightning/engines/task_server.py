"""The loop of a worker process: receive an experiment (`Worker`) and tasks, and send results back to the engine."""

from __future__ import annotations

import gc
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fl_lightning.core.errors import one_line
from fl_lightning.core.processor_time import processor_seconds
from fl_lightning.core.task import Result, Tasks, failed_result
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.serialization import Block, SerializedValue, deserialize
from fl_lightning.engines.worker import Worker


@dataclass(frozen=True)
class Request:
    """A request to a worker process: run a task, or load an experiment (`Worker`) for the tasks that follow.

    Args:
        parts: The serialized task, or the `Worker` object and the settings of the main process.
        block: Reads a block of the tensors that tasks share; None for an experiment (`Worker`).
        data: Reads the dataset of an experiment (`Worker`) that was serialized without it.
    """

    parts: Sequence[np.ndarray]
    block: Block | None
    data: Block | None = None


@dataclass(frozen=True)
class Answer:
    """The answer of a worker process to one request.

    Args:
        result: The result of a task; None for an experiment (`Worker`).
        refused: The reason if an experiment (`Worker`) could not be loaded.
        warnings: Text, category, file and line of each warning that was shown.
        trace: The traceback of the error in the result.
        processor_seconds: Processor time of the task.
    """

    result: Result | None = None
    refused: str | None = None
    warnings: list[tuple[str, type[Warning], str, int]] = field(default_factory=list)
    trace: str | None = None
    processor_seconds: float = 0.0


@dataclass(frozen=True)
class Steps:
    """The training steps of the client that a worker process trains. Sent before the answer to the client's task.

    Args:
        done: Number of steps so far.
        total: Number of steps in all.
    """

    done: int
    total: int


def process_settings() -> list[tuple[Callable[[Any], Any], Any]]:
    """Return the torch and warning settings of this process, as pairs of the function that sets one and its value."""
    filters = [entry for entry in warnings.filters if is_importable(entry[2])]
    return [
        (torch.set_default_dtype, torch.get_default_dtype()),
        (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        (torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode()),
        (set_warning_filters, filters),
    ]


def set_warning_filters(filters: list[Any]) -> None:
    """Replace the filters of the module `warnings` in this process."""
    warnings.resetwarnings()
    warnings.filters[:] = filters  # type: ignore[index]


def is_importable(category: Any) -> bool:
    """Return whether another process can import a warning class by its module and name."""
    return (
        isinstance(category, type) and getattr(sys.modules.get(category.__module__), category.__name__, 0) is category
    )


class TaskServer:
    """Serves requests in a worker process: loads an experiment (`Worker`) and runs tasks.

    Each task is answered at once, and is a round of one client for the sequential engine.

    Args:
        trainer: Options that the worker's trainer has in this process.
    """

    def __init__(self, trainer: dict[str, Any]) -> None:
        self.trainer = trainer
        self.worker: Worker | None = None

    def serve(self, receive: Callable[[], Request], answer: Callable[[SerializedValue], None]) -> None:
        """Answer the main process's requests in order, endlessly.

        Args:
            receive: Waits for the next request. The first request contains an experiment (`Worker`).
            answer: Sends an answer.

        Raises:
            Exception: The error that `receive` raises when there are no more requests.
        """
        engine = SequentialEngine()
        with warnings.catch_warnings(record=True) as shown:
            while True:
                request = receive()
                if request.block and self.worker:
                    answer(run_task(engine, self.worker, request, shown))
                else:
                    answer(SerializedValue(self._load(request)))
                del request

    def _load(self, request: Request) -> Answer:
        try:
            worker, settings = deserialize(request.parts, request.data)
            for apply, value in settings:
                apply(value)
            training = replace(worker.training, trainer=worker.training.trainer | self.trainer)
            self.worker = replace(worker, training=training)
        except Exception as error:
            return Answer(refused=f"{type(error).__name__}: {one_line(error)}")
        gc.collect()
        gc.freeze()  # later collections then look only at objects of clients' fits
        return Answer()


def run_task(
    engine: SequentialEngine, worker: Worker, request: Request, shown: list[warnings.WarningMessage]
) -> SerializedValue:
    """Run the task that a request contains, and return the serialized answer.

    Args:
        engine: Runs the task.
        worker: The worker.
        request: The task.
        shown: Warnings that were shown. They move into the answer.
    """
    started, results = processor_seconds(), list[Result]()
    task = deserialize(request.parts, request.block)
    engine.run(worker, Tasks([task.client], [task], task.fit), ClientOrder([task.client], results.append))
    (result,) = results
    seen = [(str(one.message), one.category, one.filename, one.lineno) for one in shown]
    shown.clear()
    cause = result.failure.__cause__ if result.failure else None
    trace = "".join(traceback.format_exception(cause)) if cause else None
    try:
        if result.upload:
            result = replace(result, upload=result.upload.on_cpu())
        return SerializedValue(Answer(result, None, seen, trace, processor_seconds() - started))
    except Exception as error:
        return SerializedValue(Answer(failed_result(task, error), None, seen))
