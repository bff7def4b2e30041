"""An engine that trains several clients at a time on the machines of a Ray cluster."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from fl_lightning.core.errors import ConfigError, check_number, check_positive
from fl_lightning.core.terminal import echo
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.engines.pool import PoolEngine, PoolWorker, WorkerLost
from fl_lightning.engines.serialization import SerializedValue, deserialize
from fl_lightning.engines.task_server import Answer, Request, TaskServer
from fl_lightning.engines.worker import Worker

CONNECT = 10.0  # seconds in which a cluster must accept a connection
REPORT = 5.0  # seconds between messages while no actor has started


class RayEngine(PoolEngine):
    """Trains several clients at a time, in actors on the machines of a Ray cluster.

    On CPUs of the same model, results are identical to the sequential engine's with the same number of threads. The
    data and the tensors that a round's clients share are sent to each machine once, through Ray's object store. If an
    actor or a machine is lost, its clients are trained again by other actors. Needs the extra `ray`.

    Args:
        address: Address of the cluster. By default `RAY_ADDRESS`, a cluster on this machine, or a new one.
        workers: Number of actors. By default, as many as the cluster has cores or GPUs for.
        threads: Number of torch's threads, and so of CPU cores, of each actor.
        gpus: GPUs of each actor; with 0.25, four actors share one GPU. By default 1 if clients train on GPUs, else 0.
        timeout: Seconds that a client may take in one round, once an actor has it. An actor that takes longer is killed
            and replaced. By default there is no limit.
        retries: How many times a client is trained again if its actor is lost or takes too long. Then it fails.
        held_megabytes: Memory in MiB for results that wait for a slower client with a lower id. While it is full, no
            other client starts. Each actor can have one such result, even if they take more.

    Raises:
        ConfigError: A number is out of range.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        threads: int = 1,
        gpus: float | None = None,
        timeout: float | None = None,
        retries: int = 2,
        held_megabytes: float = 256.0,
    ) -> None:
        super().__init__(timeout, retries, held_megabytes)
        require_trust("engine.address", address)
        check_positive("engine.", workers=workers, threads=threads)
        check_number("engine.gpus", gpus, "[0, inf)")
        self.address, self.workers, self.threads, self.gpus = address, workers, threads, gpus
        self.gpus_per_actor = 0.0
        self._started, self._reported = False, 0.0

    def size(self, worker: Worker) -> int:
        """Connect to the Ray cluster, and return the number of actors: `workers`, or as many as fit on the machines.

        Raises:
            ConfigError: Ray is not installed, the cluster cannot be reached, or no machine has room for an actor.
        """
        ray = self.connect()
        self.gpus_per_actor = self.gpus if self.gpus is not None else float(worker.device.type == "cuda")
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        places = sum(places_on(node, self.threads, self.gpus_per_actor) for node in nodes)
        if not places:
            needs = f"{self.threads} core(s)" + (f" and {self.gpus_per_actor:g} GPU(s)" if self.gpus_per_actor else "")
            raise ConfigError(f"engine: no machine of the Ray cluster has {needs} for a worker; set threads or gpus")
        return self.workers or places

    def close(self) -> None:
        """End all actors, and the Ray cluster or connection if this engine opened it."""
        super().close()
        if self._started:
            import_ray().shutdown()
            self._started = False

    def connect(self) -> ModuleType:
        """Connect to the Ray cluster, or start one on this machine, and return the module `ray`."""
        ray = import_ray()
        if not ray.is_initialized():
            check_address(self.address)
            try:
                with keep_signal_handlers():
                    ray.init(self.address, logging_level="error", log_to_driver=False, include_dashboard=False)
            except (Exception, SystemExit) as error:  # Ray exits if no Ray cluster answers at an open port
                reason = " ".join(str(error).split())
                raise ConfigError(f"engine.address: Ray cluster {self.address} not found: {reason}") from error
            self._started = True
        return ray

    def _start_worker(self) -> Actor:
        self._reported = time.monotonic()
        return Actor(self.threads, self.gpus_per_actor)

    def _new_storage(self) -> Callable[[SerializedValue], Any]:
        return lambda serialized: import_ray().put(serialized.parts)

    def _wait(self, seconds: float) -> Sequence[PoolWorker]:
        by_reference = {one.expected[0]: one for one in self.pool_workers if isinstance(one, Actor) and one.expected}
        references = list(by_reference)
        ready, _ = import_ray().wait(references, num_returns=1, timeout=seconds)
        if not ready:
            self._report_waiting()
            return []
        ready, _ = import_ray().wait(references, num_returns=len(references), timeout=0)
        return [by_reference[reference] for reference in ready]

    def _report_waiting(self) -> None:
        """Print what the actors wait for, every few seconds until one of them has started."""
        started = any(isinstance(one, Actor) and one.started for one in self.pool_workers)
        if started or time.monotonic() - self._reported < REPORT:
            return
        self._reported = time.monotonic()
        ray = import_ray()
        free, total = ray.available_resources(), ray.cluster_resources()
        needs = {"CPU": self.threads} | ({"GPU": self.gpus_per_actor} if self.gpus_per_actor else {})
        wanted = " and ".join(f"{count:g} {kind}" for kind, count in needs.items())
        found = " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind} free" for kind in needs)
        echo(f"engine: waiting for {wanted} to start an actor. The cluster has {found}.", to_stderr=True)


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
        self.expected.append(self._actor.serve.remote(handle, blocks))

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
        sys.path += [folder for folder in path if folder not in sys.path]
        self._requests: SimpleQueue[Request] = SimpleQueue()
        self._answers: SimpleQueue[SerializedValue | BaseException] = SimpleQueue()
        threading.Thread(target=self._run, args=(threads, trainer), daemon=True).start()

    def serve(self, parts: list[np.ndarray], blocks: dict[int, Any] | None) -> list[np.ndarray]:
        """Process one request (a task, or an experiment (`Worker`) to load), and return the serialized answer.

        `blocks` is None for a `Worker`. The tensors of a task are copied, because the object store is read-only
        and methods may change the tensors.
        """
        if blocks is None:
            request = Request(parts, None)
        else:
            request = Request([part.copy() for part in parts], partial(read_block, blocks))
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


def places_on(node: dict[str, float], threads: int, gpus: float) -> int:
    """Return how many actors with these numbers of threads and GPUs fit on a machine of the Ray cluster."""
    rooms = [node.get("CPU", 0.0) // threads]
    if gpus:
        rooms.append(node.get("GPU", 0.0) // gpus if gpus >= 1 else node.get("GPU", 0.0) * (1 // gpus))
    return int(min(rooms))


def check_address(address: str | None) -> None:
    """Check that something answers at the address of a Ray cluster, because Ray itself waits for minutes.

    Args:
        address: The address; None for the one in `RAY_ADDRESS`. Without host and port, such as `auto`, it is not
            checked.

    Raises:
        ConfigError: Nothing answers.
    """
    key, text = ("engine.address", address) if address else ("RAY_ADDRESS", os.environ.get("RAY_ADDRESS", ""))
    try:
        place = urlsplit(f"//{text.removeprefix('ray://')}")
        if place.hostname and place.port:
            socket.create_connection((place.hostname, place.port), CONNECT).close()
    except (OSError, ValueError) as error:
        fix = "Correct the address, or start the cluster with `ray start --head`"
        raise ConfigError(f"{key}: no Ray cluster answers ({text}: {error}). {fix}") from error


def import_ray() -> ModuleType:
    """Import and return the package `ray`.

    Raises:
        ConfigError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("engine: RayEngine needs ray; pip install 'fl-lightning[ray]'") from error
    return ray


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Context that restores the handlers of SIGINT and SIGTERM at its end.

    Ray replaces them, and its handlers would end a run in the middle of a round.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
