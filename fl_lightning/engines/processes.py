"""An engine that trains several clients at a time, in worker processes on this machine."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import connection, get_context, util
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, check_positive
from fl_lightning.core.lazy_import import skip_working_folder
from fl_lightning.core.round_progress import listen
from fl_lightning.core.temporary_folders import temporary_files
from fl_lightning.engines.pool import PoolEngine
from fl_lightning.engines.pool_worker import PoolWorker, WorkerLost
from fl_lightning.engines.serialization import SerializedValue, deserialize
from fl_lightning.engines.task_server import Answer, Request, Steps, TaskServer
from fl_lightning.engines.worker import Worker

STEPS = 1.0  # seconds between messages about the steps of a client
GRACE = 5.0  # seconds to wait for a process to end before it is killed
ALIGNMENT = 64  # bytes, as in torch: the alignment of a matrix can affect how a product is rounded


class ProcessesEngine(PoolEngine):
    """Trains several clients at a time in worker processes on this machine, which last for the whole run.

    On a CPU, results are identical to the sequential engine's with the same number of threads. Processes start in the
    first round, which takes some seconds, and end with the run, or with the process that started them. Tensors that a
    round's clients share are in shared memory once. If a process is killed, it is replaced and its client is trained
    again. For Linux and macOS.

    Args:
        workers: Number of processes. By default, one for each GPU, or as many as there are cores for their threads.
        threads: Torch's threads in each process.
        devices: Indices of the GPUs to use in turn, if clients train on GPUs; all by default. With more workers than
            GPUs, several workers share a GPU.
        timeout: Seconds that a client may take in one round. A process that takes longer is killed and replaced. By
            default there is no limit.
        retries: How many times a client is trained again if its process is killed or takes too long. Then it fails.
        held_megabytes: Memory in MiB for results that wait for a slower client with a lower id. While it is full, no
            other client starts. Each process can have one such result, even if they take more.

    Raises:
        ConfigError: A number is out of range, or `devices` is empty.
    """

    start_seconds = 60.0  # it imports torch

    def __init__(
        self,
        workers: int | None = None,
        threads: int = 1,
        devices: list[int] | None = None,
        timeout: float | None = None,
        retries: int = 2,
        held_megabytes: float = 256.0,
    ) -> None:
        super().__init__(timeout, retries, held_megabytes)
        check_positive("engine.", workers=workers)
        check_number("engine.threads", threads, "[1, 1024]")
        if devices is not None and not devices:
            raise ConfigError("engine.devices: no GPU is named; leave it out to use all, or set trainer.accelerator")
        self.workers, self.threads, self.devices = workers, threads, devices
        self._context = get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            self._context.set_forkserver_preload([__name__])
        self._places: list[int] = []
        # without this, Python and the worker processes wait for each other at exit
        self._at_exit = util.Finalize(self, end_all, args=(self.pool_workers,), exitpriority=1)

    def size(self, worker: Worker) -> int:
        """Return the number of worker processes: `workers`, or one per GPU, or as many as the CPU cores allow.

        Raises:
            ConfigError: A GPU in `devices` does not exist, or clients do not train on GPUs.
        """
        self._places = self._devices(worker)
        return self.workers or len(self._places) or max(1, usable_cores() // self.threads)

    def _devices(self, worker: Worker) -> list[int]:
        """Return the numbers of the GPUs that the processes share; none where clients train on another device."""
        device = worker.device
        if device.type != "cuda":
            if self.devices is not None:
                raise ConfigError(f"engine.devices: they are GPUs, and clients train on the {device.type}; remove them")
            return []
        if self.devices is None and isinstance(worker.training.trainer.get("devices"), list):
            return [device.index]  # trainer.devices names a GPU
        here = list(range(torch.cuda.device_count()))
        for number in self.devices or []:
            if number not in here:
                raise ConfigError(f"engine.devices: GPU {number} not found. Available: {here}.")
        return self.devices or here

    def _start_worker(self) -> Process:
        held = [process.device for process in self._processes]
        device = min(self._places, key=held.count) if self._places else None
        with temporary_files():  # those of multiprocessing
            return Process(self._context, self.threads, device)

    def _new_storage(self) -> Callable[[SerializedValue], Place]:
        return MemoryFile().append  # one file for all blocks of a round: a process may have few open files

    def _wait(self, seconds: float) -> Sequence[PoolWorker]:
        by_connection = {process.connection: process for process in self._processes}
        return [by_connection[each] for each in connection.wait(list(by_connection), seconds)]

    @property
    def _processes(self) -> list[Process]:
        """The worker processes. This engine has no other workers."""
        return [pool_worker for pool_worker in self.pool_workers if isinstance(pool_worker, Process)]


class Process(PoolWorker):
    """The main process's handle of a worker process on this machine, which communicates by shared memory.

    Args:
        context: The `multiprocessing` context that starts the process.
        threads: Number of torch's threads.
        device: Index of the process's GPU, or None.
    """

    def __init__(self, context: Any, threads: int, device: int | None) -> None:
        super().__init__()
        self.device = device
        self.connection, theirs = context.Pipe()
        trainer = {} if device is None else {"devices": [device]}
        self._process = context.Process(target=serve, args=(theirs, threads, trainer), name="fl-lightning", daemon=True)
        with skip_working_folder():
            self._process.start()
        theirs.close()

    def send(self, handle: Place, blocks: dict[int, Place] | None = None) -> None:
        """Send the worker process one request through shared memory: a task, or the experiment (`Worker`) to load."""
        spans = None if blocks is None else {number: block.spans for number, block in blocks.items()}
        files = {block.file.fd for block in (blocks or {}).values()}
        with suppress(BrokenPipeError, ConnectionResetError):  # `answer` reports the loss
            send(self.connection, (handle.spans, spans), handle.file.fd, *files)

    def answer(self) -> Answer | Steps:
        """Return the worker process's next answer, copied from shared memory, or the steps of its present client."""
        try:
            message, files = receive(self.connection)
        except (EOFError, OSError, RuntimeError):  # the process ended, possibly while it was sending
            raise WorkerLost(self._describe_end(), exited=(self._process.exitcode or 0) > 0) from None
        return message if isinstance(message, Steps) else deserialize(files[0].read(message), copy=True)

    def kill(self) -> None:
        """Kill the worker process, also if it is stopped."""
        self._process.kill()

    def describe(self) -> str:
        """Return the id of the worker process and, on Linux, whether it is stopped."""
        return f"process {self._process.pid}" + (", stopped" if is_stopped(self._process.pid) else "")

    def end(self) -> None:
        """End the worker process by closing its connection. Kill the process if it does not end in time."""
        self.connection.close()
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()

    def _describe_end(self) -> str:
        self._process.join(GRACE)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"with exit status {code}"
        likely = " (likely out of memory: fewer engine.workers need less)" if code == -signal.SIGKILL else ""
        return f"by {signal.Signals(-code).name}{likely}"


# --- In the worker process -----------------------------------------------------------------------------------------


def serve(connection: Connection, threads: int, trainer: dict[str, Any]) -> None:
    """Main function of a worker process. The process ends when the main process closes the connection or dies.

    Only the main process handles SIGINT and SIGTERM. Tasks run outside of the main thread, so that Lightning installs
    no signal handlers either.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    requests: SimpleQueue[Request] = SimpleQueue()
    threading.Thread(target=work, args=(connection, threads, trainer, requests), daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            requests.put(next_request(connection))
    os._exit(0)


def work(connection: Connection, threads: int, trainer: dict[str, Any], requests: SimpleQueue[Request]) -> None:
    """Answer the main process's requests, in a thread of the worker process, until the process ends."""
    try:
        torch.set_num_threads(threads)
        with listen(StepSender(partial(send, connection))):
            TaskServer(trainer).serve(requests.get, partial(reply, connection))
    except ConnectionError:
        os._exit(0)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)  # also if a client's code exits


class StepSender:
    """Sends the steps of a client in training to the main process, once a second. Nothing is sent of short clients.

    Args:
        send: Sends a message.
    """

    def __init__(self, send: Callable[[Steps], object]) -> None:
        self._send, self._next = send, 0.0

    def on_steps(self, done: int, total: int, clients: int) -> None:
        """Send the steps if the last message and the client's first step were at least `STEPS` seconds ago."""
        now = time.monotonic()
        if done > 1 and now < self._next:
            return
        self._next = now + STEPS
        if done > 1:
            self._send(Steps(done, total))

    def on_client(self) -> None:
        """Do nothing: the answer to a task says that the client has finished."""

    on_waiting = on_client

    def on_evaluated(self, done: int, total: int) -> None:
        """Do nothing: the main process counts the answers."""


def next_request(connection: Connection) -> Request:
    """Wait for the next request of the main process, such as a task, and return the request."""
    (spans, blocks), files = receive(connection)
    return Request(files[0].read(spans), None if blocks is None else partial(read_block, files[-1], blocks))


def reply(connection: Connection, serialized: SerializedValue) -> None:
    """Send a worker process's serialized answer to the main process through shared memory."""
    place = MemoryFile().append(serialized)
    send(connection, place.spans, place.file.fd)


def read_block(file: MemoryFile, blocks: dict[int, list[Span]], block: int) -> list[Tensor]:
    """Return the tensors in one block of a `SharedTensorStore`, as views of shared memory."""
    return deserialize(file.read(blocks[block]))


# --- Shared memory and messages --------------------------------------------------------------------------------------

Span = tuple[int, int]
"""A range of bytes in a file: the first byte, and the byte after the last."""


class Place(NamedTuple):
    """The location of a serialized value in shared memory: the file, and the byte range of each part of the value."""

    file: MemoryFile
    spans: list[Span]


class MemoryFile:
    """Shared memory in a file without a name, which disappears when the last process that uses it ends.

    Args:
        fd: Descriptor of a file that another process sent. By default, a new file is created.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = new_file() if fd is None else fd
        self._end = 0

    def append(self, serialized: SerializedValue) -> Place:
        """Append a serialized value to the file, and return the value's location."""
        spans = []
        for part in serialized.parts:
            start = -(-self._end // ALIGNMENT) * ALIGNMENT
            self._end = start + len(part)
            spans.append((start, self._end))
        os.ftruncate(self.fd, self._end)
        memory = np.frombuffer(mmap.mmap(self.fd, self._end), np.uint8)
        for (start, end), part in zip(spans, serialized.parts, strict=True):
            memory[start:end] = part
        return Place(self, spans)

    def read(self, spans: list[Span]) -> list[np.ndarray]:
        """Return the bytes in these ranges as arrays without copying. Writes to the arrays do not change the file."""
        memory = np.frombuffer(mmap.mmap(self.fd, spans[-1][1], access=mmap.ACCESS_COPY), np.uint8)
        return [memory[start:end] for start, end in spans]

    def __del__(self) -> None:
        os.close(self.fd)


def new_file() -> int:
    """Return the descriptor of a new file without a name, in memory on Linux and on disk on other systems."""
    if sys.platform == "linux":
        return os.memfd_create("fl-lightning")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def send(connection: Connection, message: Any, *fds: int) -> None:
    """Send a small message and the descriptors of open files to another process."""
    connection.send((message, len(fds)))
    if not fds:
        return
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        sendfds(channel, list(fds))


def receive(connection: Connection) -> tuple[Any, list[MemoryFile]]:
    """Wait for a message from another process's `send`. Return it with the memory files that were sent along."""
    message, number = connection.recv()
    if not number:
        return message, []
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        return message, [MemoryFile(fd) for fd in recvfds(channel, number)]


def end_all(pool_workers: list[PoolWorker]) -> None:
    """End the worker processes of an engine that was not closed. Called when Python exits."""
    for pool_worker in pool_workers:
        pool_worker.end()


def is_stopped(pid: int | None) -> bool:
    """Return whether a process is stopped by a signal such as SIGSTOP. False if the system does not say it in /proc."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state == "T"


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
