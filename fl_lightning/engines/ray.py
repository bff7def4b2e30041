"""An engine that trains several clients at a time on the machines of a Ray cluster."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from fl_lightning.core.errors import ConfigError, check_number, check_positive, one_line
from fl_lightning.core.terminal import echo
from fl_lightning.core.trusted_imports import require_trust
from fl_lightning.engines.data_source import DatasetParts, matching_parts
from fl_lightning.engines.pool import PoolEngine, PoolWorker, WorkerLost, serialize_worker
from fl_lightning.engines.serialization import SerializedValue, deserialize
from fl_lightning.engines.task_server import Answer, Request, TaskServer
from fl_lightning.engines.worker import Worker

CONNECT = 10.0  # seconds in which a cluster must accept a connection, and answer
SLICE = 0.25  # seconds in which Ray does not return to Python, so that a signal has to wait
REPORT = 5.0  # seconds between messages while no actor has started
LOCAL_FILES = ("working_dir", "py_modules")  # entries of a runtime environment that may name files of this machine
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # the start, and empty settings
SETTINGS = 4  # the type of the first frame that an HTTP/2 server sends


class RayEngine(PoolEngine):
    """Trains several clients at a time, in actors on the machines of a Ray cluster.

    On CPUs of the same model, results are identical to the sequential engine's with the same number of threads. The
    data and the tensors that a round's clients share are sent to each machine once, through Ray's object store. If an
    actor or a machine is lost, its clients are trained again by other actors. A client fails if three actors die while
    training it. Needs the extra `ray`.

    Without free CPUs or GPUs, the run waits and says so. Several runs can use one cluster: set `workers` in each.

    Args:
        address: Address of the cluster: `host:6379`, or `ray://host:10001` from a machine outside of it. By default
            `RAY_ADDRESS`, a cluster on this machine, or a new one.
        workers: Number of actors. By default, as many as the cluster has cores or GPUs for. If it is given, the run
            also waits for machines that join later.
        threads: Number of torch's threads, and so of CPU cores, of each actor.
        gpus: GPUs of each actor; with 0.25, four actors share one GPU. By default 1 if clients train on GPUs, else 0.
        runtime_env: Ray's runtime environment of all actors. `{working_dir: .}` sends the modules of a folder, and
            `{py_modules: [package, a.whl]}` sends packages and wheels. By default nothing is sent.
        data_dir: Folder on each machine that contains the dataset's file or folder, such as `$SCRATCH/data`. Each
            machine then reads the dataset itself. A machine that does not find it, or finds other values, receives it
            through the object store. By default all machines do.
        timeout: Seconds that a client may take in one round. An actor that takes longer is killed and replaced. By
            default there is no limit.

    Raises:
        ConfigError: A number is out of range, or a file of `runtime_env` does not exist.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        threads: int = 1,
        gpus: float | None = None,
        runtime_env: dict[str, Any] | None = None,
        data_dir: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        require_trust("engine.address", address)
        require_trust("engine.runtime_env", runtime_env)
        require_trust("engine.data_dir", data_dir)
        check_positive("engine.", workers=workers, threads=threads)
        check_number("engine.gpus", gpus, "[0, inf)")
        check_number("engine.timeout", timeout, "(0, inf)")
        check_local_files(runtime_env or {})
        self.address, self.workers, self.threads, self.gpus = address, workers, threads, gpus
        self.runtime_env, self.data_dir, self.timeout = runtime_env, data_dir, timeout
        self.gpus_per_actor = 0.0
        self._started, self._reported = False, 0.0
        self._opening: dict[Any, str] = {}  # the outcome of opening the dataset, and the machine

    def size(self, worker: Worker) -> int:
        """Connect to the Ray cluster, and return the number of actors: `workers`, or as many as fit on the machines.

        With `workers`, machines may join later, as in clusters that add machines when they are needed.

        Raises:
            ConfigError: Ray is not installed, the cluster cannot be reached, or no machine has room for an actor.
        """
        ray = self.connect()
        if self.data_dir and self.data_source:
            self.data_source.check()
        self.gpus_per_actor = self.gpus if self.gpus is not None else float(worker.device.type == "cuda")
        if self.workers:
            return self.workers
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        places = sum(places_on(node, self.threads, self.gpus_per_actor) for node in nodes)
        if not places:
            needs = f"{self.threads} core(s)" + (f" and {self.gpus_per_actor:g} GPU(s)" if self.gpus_per_actor else "")
            raise ConfigError(f"engine: no machine of the Ray cluster has {needs} for a worker; set threads or gpus")
        return places

    def close(self) -> None:
        """End all actors, and the Ray cluster or connection if this engine opened it."""
        super().close()
        if self._started:
            import_ray().shutdown()
            self._started = False

    def connect(self) -> ModuleType:
        """Connect to the Ray cluster, or start one on this machine, and return the module `ray`."""
        ray = import_ray()
        if self._started and ray.is_initialized():
            return ray
        environment = self._check_environment(ray)
        if not ray.is_initialized():
            check_address(self.address)
            options = {"logging_level": "error", "log_to_driver": False, "include_dashboard": False}
            try:
                with keep_signal_handlers():
                    ray.init(self.address, runtime_env=environment, **options)
            except (Exception, SystemExit) as error:  # Ray exits if it finds no Ray cluster
                reason = " ".join(str(error).split())
                raise ConfigError(f"engine.address: no connection to Ray cluster {self.address}: {reason}") from error
            self._started = True
        return ray

    def _check_environment(self, ray: ModuleType) -> Any:
        """Check the runtime environment, and return it as Ray's object; None without one."""
        if self.runtime_env is None:
            return None
        if ray.is_initialized():
            raise ConfigError("engine.runtime_env: Ray is connected already. Give it to ray.init instead")
        try:
            return ray.runtime_env.RuntimeEnv(**self.runtime_env)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"engine.runtime_env: {one_line(error)}") from error

    def _start_worker(self) -> Actor:
        self._reported = time.monotonic()
        return Actor(self.threads, self.gpus_per_actor, self.timeout)

    def _store_experiment(self, worker: Worker) -> StoredExperiment:
        """Put the experiment into Ray's object store. With `data_dir`, machines begin to open the dataset."""
        ray = import_ray()
        if not self.data_dir or not self.data_source:
            return StoredExperiment(ray.put(serialize_worker(worker).parts))
        parts = DatasetParts(worker.data)
        arguments = SerializedValue((self.data_source, self.data_dir, parts.digests)).parts, sys.path
        here = ray.get_runtime_context().get_node_id()
        opened = {}
        for node in ray.nodes():
            if node["Alive"] and node["NodeID"] != here:
                outcome, opened[node["NodeID"]] = on_node(open_dataset, node["NodeID"], 2).remote(*arguments)
                self._opening[outcome] = node["NodeManagerAddress"]
        sent = [ray.put(SerializedValue(value).parts) for value in parts.values]
        return StoredExperiment(ray.put(serialize_worker(worker, parts).parts), opened, sent)

    def _new_storage(self) -> Callable[[SerializedValue], Any]:
        return lambda serialized: import_ray().put(serialized.parts)

    def _wait(self, seconds: float) -> Sequence[PoolWorker]:
        by_reference = {one.expected[0]: one for one in self.pool_workers if isinstance(one, Actor) and one.expected}
        references = list(by_reference)
        ready, _ = import_ray().wait(references, num_returns=1, timeout=min(seconds, SLICE))
        self._report_opened()
        if not ready:
            self._report_waiting()
            for one in by_reference.values():
                one.kill_if_overdue()
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
        needs = {"CPU": float(self.threads)} | ({"GPU": self.gpus_per_actor} if self.gpus_per_actor else {})
        each = " and ".join(f"{count:g} {kind}" for kind, count in needs.items())
        found = " and ".join(f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}s" for kind in needs)
        line = f"engine: 0 of {len(self.pool_workers)} workers have started. Each needs {each}; {found} are free."
        echo(line, to_stderr=True)

    def _report_opened(self) -> None:
        """Print which machines could not open the dataset, and why, as soon as it is known."""
        if not self._opening:
            return
        ray = import_ray()
        ready, _ = ray.wait(list(self._opening), num_returns=len(self._opening), timeout=0)
        for outcome in ready:
            machine = self._opening.pop(outcome)
            try:
                reason = ray.get(outcome)
            except ray.exceptions.RayError as error:
                reason = one_line(error)
            if reason:
                echo(f"engine.data_dir: machine {machine} receives the dataset instead: {reason}", to_stderr=True)


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
        timeout: Maximum number of seconds that an answer to a task may take; None for no limit.

    Attributes:
        expected: References to the answers to come.
        started: Whether the actor has answered a request.
        deadline: The time, by `time.monotonic()`, at which the next answer is overdue.
    """

    def __init__(self, threads: int, gpus: float, timeout: float | None = None) -> None:
        super().__init__()
        self.expected: list[Any] = []
        self.started, self.timeout, self.deadline = False, timeout, math.inf
        self._overdue = False
        actor = import_ray().remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(RemoteServer)
        self._actor = actor.remote(threads, {"devices": 1} if gpus else {}, sys.path)  # an actor sees only its GPUs

    def send(self, handle: Any, blocks: dict[int, Any] | None = None) -> None:
        """Send the Ray actor one request: a task, or the run's experiment (`Worker`) to load."""
        if isinstance(handle, StoredExperiment):
            answer = self._actor.load.remote(handle.parts, handle.opened, handle.sent)
        else:
            answer = self._actor.serve.remote(handle, blocks)
        self.expected.append(answer)
        if len(self.expected) == 1:
            self._restart_clock()

    def answer(self) -> Answer:
        """Return the Ray actor's next answer, copied from the object store."""
        ray = import_ray()
        try:
            parts = ray.get(self.expected.pop(0))
        except ray.exceptions.RayError as error:
            if self._overdue:
                raise WorkerLost(f"after {self.timeout:g} seconds without an answer (engine.timeout)") from error
            raise WorkerLost(f"with {type(error).__name__}: {' '.join(str(error).split())}") from error
        self.started = True
        self._restart_clock()
        return deserialize(parts, copy=True)

    def end(self) -> None:
        """Kill the Ray actor."""
        import_ray().kill(self._actor)

    def kill_if_overdue(self) -> None:
        """Kill the Ray actor if its answer is overdue. `answer` then raises an error that says so."""
        if self.deadline <= time.monotonic():
            self._overdue = True
            self.end()

    def _restart_clock(self) -> None:
        """Start to measure the time until the next answer. There is no limit until the experiment is loaded."""
        limited = self.timeout is not None and self.ready and self.expected
        self.deadline = time.monotonic() + (self.timeout or 0.0) if limited else math.inf


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


def places_on(node: dict[str, float], threads: int, gpus: float) -> int:
    """Return how many actors with these numbers of threads and GPUs fit on a machine of the Ray cluster."""
    rooms = [node.get("CPU", 0.0) // threads]
    if gpus:
        rooms.append(node.get("GPU", 0.0) // gpus if gpus >= 1 else node.get("GPU", 0.0) * (1 // gpus))
    return int(min(rooms))


def check_address(address: str | None) -> None:
    """Check that a server of HTTP/2, as Ray's are, answers at an address, because Ray itself waits for minutes.

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
            with socket.create_connection((place.hostname, place.port), CONNECT) as channel:
                if os.environ.get("RAY_USE_TLS", "0") == "0" and not speaks_http2(channel):
                    raise ValueError("another service")
    except (OSError, ValueError) as error:
        fix = "Correct the address, or start the cluster with `ray start --head`"
        raise ConfigError(f"{key}: no Ray cluster answers ({text}: {error}). {fix}") from error


def speaks_http2(channel: socket.socket) -> bool:
    """Return whether the server of a connection answers as one of HTTP/2."""
    channel.sendall(HTTP2)
    return channel.recv(4)[3:] == bytes([SETTINGS])


def check_local_files(runtime_env: Mapping[str, Any]) -> None:
    """Check that the files exist that a runtime environment sends to the machines. URIs are not checked.

    Raises:
        ConfigError: A file or folder does not exist.
    """
    for key in LOCAL_FILES:
        held = runtime_env.get(key)
        for path in held if isinstance(held, list) else [held]:
            if isinstance(path, str) and "://" not in path and not os.path.exists(path):
                raise ConfigError(f"engine.runtime_env.{key}: {path} does not exist. Correct the path")


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
