"""An engine that trains several clients at a time, in processes of this machine."""

from __future__ import annotations

import math
import mmap
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import connection, get_context, util
from multiprocessing.connection import Connection
from multiprocessing.reduction import recvfds, sendfds
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import ConfigError, check_number, check_positive
from fl_lightning.core.lazy import away_from_here
from fl_lightning.core.temporary import temporary_files
from fl_lightning.engines.pool import PoolEngine, PoolWorker, WorkerLost
from fl_lightning.engines.serialization import SerializedValue, SharedTensorStore, aligned, unpack
from fl_lightning.engines.task_server import Answer, LoadWorker, Request, RunTask, TaskServer
from fl_lightning.engines.worker import Worker

GRACE = 5.0  # seconds that a process has to end by itself
START = 60.0  # seconds that a process has to start, where `timeout` is less: it imports torch


class ProcessesEngine(PoolEngine):
    """Trains several clients at a time in processes of this machine, which last from round to round.

    On a CPU, the results are the sequential engine's to the byte, with the same number of threads. Processes start in
    the first round, which takes some seconds, and end with the run, or with the process that started them. Tensors that
    a round's clients share are in shared memory, once for all. If a process is killed, it is replaced and its client
    is trained again. A client at which three processes die has failed. For Linux and macOS.

    Args:
        workers: Number of processes. By default, one for each GPU, or as many as there are cores for their threads.
        threads: Torch's threads in each process.
        devices: Numbers of the GPUs to use in turn, if clients train on GPUs; all by default. With more workers than
            GPUs, several workers share one.
        timeout: Seconds that a client may take in one round. A process that takes longer is killed and replaced. By
            default there is no limit.

    Raises:
        ConfigError: A number is out of range, or there is no GPU in `devices`.
    """

    def __init__(
        self,
        workers: int | None = None,
        threads: int = 1,
        devices: list[int] | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        check_positive("engine.", workers=workers)
        check_number("engine.threads", threads, "[1, 1024]")
        check_number("engine.timeout", timeout, "(0, inf)")
        if devices is not None and not devices:
            raise ConfigError("engine.devices: no GPU is named; leave it out to use all, or set trainer.accelerator")
        self.workers, self.threads, self.devices, self.timeout = workers, threads, devices, timeout
        self._context = get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            self._context.set_forkserver_preload([__name__])
        self._places: list[int] = []
        # otherwise Python and its processes wait for each other at exit
        self._at_exit = util.Finalize(self, end_all, args=(self._pool_workers,), exitpriority=1)

    def size(self, worker: Worker) -> int:
        """Return the number of processes.

        Raises:
            ConfigError: There is no such GPU, or clients do not train on GPUs.
        """
        self._places = self._devices(worker)
        return self.workers or len(self._places) or max(1, usable_cores() // self.threads)

    def _devices(self, worker: Worker) -> list[int]:
        device = worker.device
        if device.type != "cuda":
            if self.devices is not None:
                raise ConfigError(
                    f"engine.devices: they are GPUs, and clients train on the {device.type}; leave them out"
                )
            return []
        if self.devices is None and isinstance(worker.trainer.get("devices"), list):
            return [device.index]  # the experiment names one
        here = list(range(torch.cuda.device_count()))
        for number in self.devices or []:
            if number not in here:
                raise ConfigError(f"engine.devices: there is no GPU {number}; there are {here}")
        return self.devices or here

    def _start_worker(self) -> Process:
        held = [pool_worker.device for pool_worker in self._pool_workers if isinstance(pool_worker, Process)]
        device = min(self._places, key=held.count) if self._places else None
        with temporary_files():  # of multiprocessing
            return Process(self._context, self.threads, device, self.timeout)

    def _put(self, serialized: SerializedValue) -> Place:
        return MemoryFile().append(serialized)

    def _new_store(self) -> SharedTensorStore:
        return SharedTensorStore(MemoryFile().append)  # one file for all blocks: open files are few

    def _wait(self) -> Sequence[PoolWorker]:
        by_connection = {
            pool_worker.connection: pool_worker
            for pool_worker in self._pool_workers
            if isinstance(pool_worker, Process)
        }
        while not (ready := connection.wait(list(by_connection), time_left(by_connection.values()))):
            for pool_worker in by_connection.values():
                pool_worker.kill_if_overdue()
        return [by_connection[one] for one in ready]


class Process(PoolWorker):
    """A worker that is a process of this machine.

    Args:
        context: The `multiprocessing` context that starts it.
        threads: Torch's threads.
        device: Number of its GPU, or None.
        timeout: Seconds for each answer, or None for no limit.
    """

    def __init__(self, context: Any, threads: int, device: int | None, timeout: float | None = None) -> None:
        super().__init__()
        self.device, self.timeout = device, timeout
        self._expected, self._since, self._overdue = 0, 0.0, False
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, threads), name="fl-lightning", daemon=True)
        with away_from_here():
            self._process.start()
        theirs.close()

    def load(self, handle: Place) -> None:
        """Send the worker object."""
        trainer = {} if self.device is None else {"devices": [self.device]}
        self._send(("load", handle.span, trainer), handle.file.fd)

    def send_task(self, serialized: SerializedValue, blocks: dict[int, Place]) -> None:
        """Send a task."""
        own = MemoryFile().append(serialized)
        files = {block.file.fd for block in blocks.values()}
        self._send(("run", own.span, {i: block.span for i, block in blocks.items()}), own.file.fd, *files)

    def answer(self) -> Answer:
        """Copy the answer into this process's own memory."""
        try:
            span, (fd,) = receive(self.connection)
        except (EOFError, OSError, RuntimeError):  # it ended while it was sending
            raise WorkerLost(self._end()) from None
        self._expected, self._since = self._expected - 1, time.monotonic()
        return unpack(MemoryFile(fd).read(span), copy=True)

    @property
    def time_left(self) -> float:
        """Return the seconds until the next answer is overdue."""
        if self.timeout is None or not self._expected:
            return math.inf
        return self._since + (self.timeout if self.ready else max(self.timeout, START)) - time.monotonic()

    def kill_if_overdue(self) -> None:
        """Kill the process if its answer is overdue; `answer` then reports that."""
        if self.time_left <= 0:
            self._overdue = True
            self._process.kill()

    def end(self) -> None:
        """Close the connection. The process ends when it notices, which is at once."""
        self.connection.close()
        self._process.join(GRACE)
        if self._process.is_alive():
            self._process.kill()

    def _send(self, message: Any, *fds: int) -> None:
        if not self._expected:
            self._since = time.monotonic()
        self._expected += 1
        with suppress(BrokenPipeError, ConnectionResetError):  # `answer` reports the loss
            send(self.connection, message, *fds)

    def _end(self) -> str:
        if self._overdue:
            return f"after {self.timeout:g} seconds without an answer (engine.timeout)"
        self._process.join(GRACE)
        code = self._process.exitcode
        if code is None or code >= 0:
            return f"with exit status {code}"
        likely = " (likely out of memory: fewer engine.workers need less)" if code == -signal.SIGKILL else ""
        return f"by {signal.Signals(-code).name}{likely}"


def time_left(processes: Iterable[Process]) -> float | None:
    """Return the seconds until the first of some processes is overdue, or None if none has a limit."""
    least = min(process.time_left for process in processes)
    return None if least == math.inf else max(least, 0.0)


# --- In the worker process -----------------------------------------------------------------------------------------


def serve(connection: Connection, threads: int) -> None:
    """Run a worker process. It ends as soon as the connection is closed or the other side dies.

    Only the main process handles SIGINT and SIGTERM. Tasks run outside of the main thread, so that Lightning installs
    no signal handlers either.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=work, args=(connection, threads), daemon=True).start()
    hung_up = select.poll()
    hung_up.register(connection.fileno(), 0)
    hung_up.poll()
    os._exit(0)


def work(connection: Connection, threads: int) -> None:
    """Answer requests until the connection is closed."""
    try:
        torch.set_num_threads(threads)
        TaskServer().serve(partial(next_request, connection), partial(reply, connection))
    except (EOFError, ConnectionError):
        os._exit(0)
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(1)  # also if a client's code exits


def next_request(connection: Connection) -> Request:
    """Return the next request."""
    (what, span, rest), fds = receive(connection)
    files = [MemoryFile(fd) for fd in fds]
    source = files[0].read(span)
    return LoadWorker(source, rest) if what == "load" else RunTask(source, partial(read_block, files[-1], rest))


def reply(connection: Connection, serialized: SerializedValue) -> None:
    """Send an answer."""
    place = MemoryFile().append(serialized)
    send(connection, place.span, place.file.fd)


def read_block(file: MemoryFile, spans: dict[int, tuple[int, int]], block: int) -> list[Tensor]:
    """Return the tensors of one block of shared tensors, without copying."""
    return unpack(file.read(spans[block]))


# --- Shared memory and messages --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The place of a serialized value: file, first byte, number of bytes."""

    file: MemoryFile
    span: tuple[int, int]


class MemoryFile:
    """Memory that other processes can map. It has no name, so nothing is left behind when the last process ends.

    Args:
        fd: A file that another process sent. By default, a new one.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = new_file() if fd is None else fd
        self._end = 0

    def append(self, serialized: SerializedValue) -> Place:
        """Append a serialized value."""
        start, self._end = self._end, self._end + aligned(serialized.nbytes)
        os.ftruncate(self.fd, self._end)
        memory = np.frombuffer(mmap.mmap(self.fd, self._end), np.uint8)
        serialized.write(torch.from_numpy(memory[start : start + serialized.nbytes]))
        return Place(self, (start, serialized.nbytes))

    def read(self, span: tuple[int, int]) -> np.ndarray:
        """Return some of the bytes without copying. Other processes do not see writes to them."""
        start, nbytes = span
        return np.frombuffer(mmap.mmap(self.fd, start + nbytes, access=mmap.ACCESS_COPY), np.uint8)[start:]

    def __del__(self) -> None:
        os.close(self.fd)


def new_file() -> int:
    """Return an empty file without a name, in memory where the system supports it, otherwise on disk."""
    if sys.platform == "linux":
        return os.memfd_create("fl-lightning")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def send(connection: Connection, message: Any, *fds: int) -> None:
    """Send a small message and open files."""
    connection.send((message, len(fds)))
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        sendfds(channel, list(fds))


def receive(connection: Connection) -> tuple[Any, list[int]]:
    """Receive what `send` sent."""
    message, number = connection.recv()
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        return message, recvfds(channel, number)


def end_all(pool_workers: list[PoolWorker]) -> None:
    """End worker processes whose engine was not closed."""
    for pool_worker in pool_workers:
        pool_worker.end()


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
