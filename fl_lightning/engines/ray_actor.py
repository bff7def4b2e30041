"""The Ray actors that train clients, their handles in the main process, and what they read from the object store."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from fl_lightning.core.errors import one_line
from fl_lightning.engines.data_source import matching_parts
from fl_lightning.engines.pool_worker import PoolWorker, WorkerLost
from fl_lightning.engines.ray_connection import import_ray
from fl_lightning.engines.serialization import SerializedValue, deserialize
from fl_lightning.engines.task_server import Answer, Request, TaskServer


@dataclass(frozen=True)
class StoredExperiment:
    """The references to a serialized experiment (`Worker`) in Ray's object store.

    Args:
        parts: The parts of its `SerializedValue`.
        opened: The parts of the dataset that a machine has opened itself, by the id of the node.
        sent: Each part of the dataset. It is empty if the experiment contains the dataset.
    """

    parts: Any
    opened: Mapping[str, Any] = field(default_factory=dict)
    sent: Sequence[Any] = ()


class Actor(PoolWorker):
    """The main process's handle of a Ray actor that runs clients' tasks.

    Args:
        threads: Number of torch's threads, and so of CPU cores, of the actor.
        gpus: Number of GPUs of the actor, possibly a fraction.

    Attributes:
        expected: References to the answers to come.
        started: Whether the actor has answered a request.
    """

    def __init__(self, threads: int, gpus: float) -> None:
        super().__init__()
        self.expected: list[Any] = []
        self.started = False
        actor = import_ray().remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(RemoteServer)
        self._actor = actor.remote(threads, {"devices": 1} if gpus else {}, sys.path)  # an actor sees only its GPUs

    def send(self, handle: Any, blocks: dict[int, Any] | None = None) -> None:
        """Send the Ray actor one request: a task, or the run's experiment (`Worker`) to load."""
        if isinstance(handle, StoredExperiment):
            answer = self._actor.load.remote(handle.parts, handle.opened, handle.sent)
        else:
            answer = self._actor.serve.remote(handle, blocks)
        self.expected.append(answer)

    def answer(self) -> Answer:
        """Return the Ray actor's next answer, copied from the object store."""
        ray = import_ray()
        try:
            parts = ray.get(self.expected.pop(0))
        except ray.exceptions.RayError as error:
            raise WorkerLost(f"with {type(error).__name__}: {' '.join(str(error).split())}") from error
        self.started = True
        return deserialize(parts, copy=True)

    def kill(self) -> None:
        """Kill the Ray actor."""
        import_ray().kill(self._actor)

    end = kill


class RemoteServer:
    """A Ray actor that answers requests with a `TaskServer`, which runs in a thread of the actor.

    Lightning installs no signal handlers in the thread.

    Args:
        threads: Number of torch's threads.
        trainer: Options that the worker's trainer has in this process.
        path: Search path for modules of the main process.
    """

    def __init__(self, threads: int, trainer: dict[str, Any], path: list[str]) -> None:
        add_to_path(path)
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._answers: SimpleQueue[SerializedValue | BaseException] = SimpleQueue()
        threading.Thread(target=self._run, args=(threads, trainer), daemon=True).start()

    def load(self, parts: list[np.ndarray], opened: Mapping[str, Any], sent: Sequence[Any]) -> list[np.ndarray]:
        """Load an experiment (`Worker`), and return the serialized answer.

        Args:
            parts: The serialized experiment.
            opened: The parts of the dataset that a machine has opened itself, by node.
            sent: All parts of the dataset. It is empty if the experiment contains them.
        """
        return self._answer(Request(parts, None, partial(read_dataset, opened, sent) if sent else None))

    def serve(self, parts: list[np.ndarray], blocks: dict[int, Any]) -> list[np.ndarray]:
        """Process a task, and return the serialized answer.

        The tensors of a task are copied, because the object store is read-only and methods may change the tensors.
        """
        return self._answer(Request([part.copy() for part in parts], partial(read_block, blocks)))

    def _answer(self, request: Request) -> list[np.ndarray]:
        self._requests.put(request)
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer.parts

    def _run(self, threads: int, trainer: dict[str, Any]) -> None:
        try:
            torch.set_num_threads(threads)
            TaskServer(trainer).serve(self._requests.get, self._answers.put)
        except BaseException as error:
            self._answers.put(error)


def read_block(blocks: dict[int, Any], block: int) -> list[torch.Tensor]:
    """Return the tensors in one block of a `SharedTensorStore`, copied from Ray's object store."""
    return deserialize(import_ray().get(blocks[block]), copy=True)


def open_dataset(arguments: list[np.ndarray], path: list[str]) -> tuple[str, list[np.ndarray]]:
    """Open a dataset on this machine.

    Args:
        arguments: The arguments of `matching_parts`, serialized.
        path: Search path for modules of the main process.

    Returns:
        Why parts of the dataset are missing, or an empty string; and the serialized parts, None for missing ones.
    """
    add_to_path(path)
    source, data_dir, digests = deserialize(arguments)
    values: list[Any] = [None] * len(digests)
    reason = ""
    try:
        values = matching_parts(source, data_dir, digests)
    except Exception as error:
        reason = one_line(error)
    if not reason and any(value is None for value in values):
        reason = f"the files in {data_dir} hold other values"
    return reason, SerializedValue(values).parts


def read_dataset(opened: Mapping[str, Any], sent: Sequence[Any], block: int) -> list[Any]:
    """Return the parts of a dataset: those that this machine has opened itself, and others from the object store."""
    ray = import_ray()
    values: list[Any] = [None] * len(sent)
    with suppress(KeyError, ray.exceptions.RayError):  # the machine joined later, or the task was lost
        values = deserialize(ray.get(opened[ray.get_runtime_context().get_node_id()]))
    return [deserialize(ray.get(part)) if value is None else value for value, part in zip(values, sent, strict=True)]


def on_node(function: Callable[..., Any], node: str, returns: int = 1) -> Any:
    """Return a function as a Ray task that runs on a certain node and needs no free CPU.

    Args:
        function: The function.
        node: The id of the node.
        returns: Number of values that the function returns.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return import_ray().remote(num_cpus=0, num_returns=returns, scheduling_strategy=there)(function)


def add_to_path(path: list[str]) -> None:
    """Let this process also search modules in these folders, after its own."""
    sys.path += [folder for folder in path if folder not in sys.path]
