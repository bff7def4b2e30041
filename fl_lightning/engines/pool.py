"""Scheduling of clients' tasks on several worker processes, and recovery when a worker process ends unexpectedly."""

from __future__ import annotations

import math
import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, NoReturn

from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.processor_time import add_worker_seconds
from fl_lightning.core.round_progress import report_steps
from fl_lightning.core.task import Result, Task, Tasks
from fl_lightning.core.terminal import echo
from fl_lightning.engines.base import Engine
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.lost_workers import LostWorkers
from fl_lightning.engines.pool_worker import PoolWorker, WorkerLost
from fl_lightning.engines.serialization import SerializedValue, SharedPositions, SharedTensorStore
from fl_lightning.engines.task_server import Answer, Steps, process_settings
from fl_lightning.engines.worker import Worker

QUEUED = 2  # tasks of a worker: the one it runs, and one to continue with while its result is processed
FETCHED = 2  # tasks per worker that are taken from the iterator at a time
POLL = 1.0  # seconds between checks for signals while no worker answers
SILENT = 60.0  # seconds without an answer after which a worker is reported
SLOWER = 5.0  # the report also waits for this multiple of the longest time until an answer
MEGABYTE = 1 << 20


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text."""


class ResultWindow:
    """Limits the memory of results that wait for a slower client: it decides which tasks may be sent to a worker.

    Args:
        order: Receives the results.
        limit: Bytes of the results that may wait.
        workers: Number of workers. Each can have a task or a result that waits, whatever its size.
    """

    def __init__(self, order: ClientOrder, limit: float, workers: int) -> None:
        self._order, self._limit, self._workers = order, limit, workers
        self._largest = 0

    def add(self, result: Result) -> None:
        """Receive the result of a task."""
        self._largest = max(self._largest, result.nbytes)
        self._order(result)

    def has_room(self, task: Task, running: int, idle: bool) -> bool:
        """Return whether a task may be sent to a worker: its result can wait, or need not wait for any other.

        A result is assumed to be as large as the largest so far or, at first, as the message to the client.

        Args:
            task: The task.
            running: Number of tasks that workers have.
            idle: Whether the worker has none of them.
        """
        if task.client == self._order.next_client or (idle and len(self._order) + running < self._workers):
            return True
        size = self._largest or (task.download.nbytes if task.upload else 0)
        return self._order.waiting_bytes + (running + 1) * size <= self._limit


class PoolEngine(Engine):
    """Base class of engines that run clients' tasks in several worker processes or actors.

    The largest tasks run first, tensors that tasks share are sent once, and tasks of lost workers are repeated. Workers
    are started when there are tasks for them, and kept from round to round.

    Args:
        timeout: Seconds that a client may take in one round. A worker that takes longer is killed and replaced. By
            default there is no limit.
        retries: How many times a client is trained again if its worker is lost or exceeds the time limit.
        held_megabytes: Memory in MiB for results that wait for a slower client with a lower id. While it is full, no
            other client starts. Each worker can have one such result, even if they take more.

    Attributes:
        pool_workers: The workers that have been started and are not lost.
        start_seconds: Minimum time limit until a worker is ready.

    Raises:
        ConfigError: A number is out of range.
    """

    start_seconds: float = math.inf

    def __init__(self, timeout: float | None = None, retries: int = 2, held_megabytes: float = 256.0) -> None:
        check_number("engine.timeout", timeout, "(0, inf)")
        check_number("engine.retries", retries, "[0, 1000]")
        check_number("engine.held_megabytes", held_megabytes, "[0, inf]")
        self.timeout, self.retries, self.held_megabytes = timeout, retries, held_megabytes
        self.pool_workers: list[PoolWorker] = []
        self._longest = 0.0
        self._loaded: Worker | None = None
        self._handle: Any = None
        self._lost = LostWorkers(retries)

    @abstractmethod
    def size(self, worker: Worker) -> int:
        """Return the number of worker processes or actors that the engine uses for a run.

        Raises:
            ConfigError: No worker can be started.
        """

    @abstractmethod
    def _start_worker(self) -> PoolWorker:
        """Start a worker process or actor, and return its handle."""

    @abstractmethod
    def _new_storage(self) -> Callable[[SerializedValue], Any]:
        """Return a function that stores a value where all workers can read it.

        That function returns a handle. The value stays stored as long as the handle exists.
        """

    @abstractmethod
    def _wait(self, seconds: float) -> Sequence[PoolWorker]:
        """Wait until at least one worker has answered or is lost, and return all such workers.

        If there is none after some `seconds`, the result is empty.
        """

    def check(self, worker: Worker) -> None:
        """Check that the run's experiment (`Worker`) can be serialized and that workers can be started.

        Raises:
            ConfigError: The object cannot be serialized, or no worker can be started.
        """
        self.size(worker)
        serialize_worker(worker)

    def run(self, worker: Worker, tasks: Tasks, done: ClientOrder) -> None:
        """Send tasks to the workers, at most two to each at a time, and pass on each result when it arrives.

        Raises:
            ConfigError: The workers cannot load the `Worker` object.
            WorkerLost: The workers end before they have loaded the `Worker` object.
        """
        size = self._load(worker)
        arriving, store = iter(tasks), SharedTensorStore(self._new_storage())
        window = ResultWindow(done, self.held_megabytes * MEGABYTE, size)
        waiting: list[Task] = []
        while True:
            if not waiting:
                waiting = list(islice(arriving, FETCHED * size))
                for task in waiting:
                    store.add(task)
            self.start_workers(min(size, len(waiting) + sum(bool(one.tasks) for one in self.pool_workers)))
            self.assign(waiting, store, lambda task: len(worker.data.shard(task.client).train), window)
            if not waiting and not any(one.tasks for one in self.pool_workers):
                return
            for pool_worker in self.wait_for_answers():
                result = self._receive(pool_worker, worker.shown)
                if pool_worker not in self.pool_workers:
                    waiting += pool_worker.tasks
                if result:
                    window.add(result)
            self._report_steps()

    def start(self, worker: Worker) -> None:
        """Start all workers, and wait until they have loaded the run's experiment (`Worker`).

        Raises:
            ConfigError: The workers cannot load the `Worker` object.
            WorkerLost: The workers end before they have loaded the `Worker` object.
        """
        size = self._load(worker)
        self.start_workers(size)
        while not all(pool_worker.ready for pool_worker in self.pool_workers):
            for pool_worker in self.wait_for_answers():
                self._receive(pool_worker, worker.shown)
            self.start_workers(size)

    def close(self) -> None:
        """Stop all worker processes or actors."""
        for pool_worker in self.pool_workers:
            pool_worker.end()
        self.pool_workers.clear()
        self._loaded = self._handle = None

    def _load(self, worker: Worker) -> int:
        """Send the run's experiment (`Worker`) to the processes or actors, and return how many of them to use.

        Workers that are still busy are ended. The others receive the object, unless they have it already.
        """
        self._lost = LostWorkers(self.retries)
        size = min(self.size(worker), len(worker.data.shards))
        for pool_worker in [pool_worker for pool_worker in self.pool_workers if pool_worker.tasks]:
            self._remove(pool_worker)
        if worker is not self._loaded:
            self._handle, self._loaded = self._store_experiment(worker), worker
            for pool_worker in self.pool_workers:
                pool_worker.ready = False
                self._send(pool_worker, self._handle)
        return size

    def wait_for_answers(self) -> Sequence[PoolWorker]:
        """Wait until at least one worker has answered or is lost, and return all such workers. A signal ends the wait.

        Workers that exceed the time limit are killed, and others that have not answered for long are reported.

        Raises:
            Interrupted: SIGINT or SIGTERM has arrived.
        """
        while True:
            left = min((self._deadline(one) for one in self.pool_workers), default=math.inf) - time.monotonic()
            answering = self._wait(max(0.0, min(POLL, left)))
            for pool_worker in self.pool_workers:
                if pool_worker not in answering and not pool_worker.overdue:
                    self._check_time(pool_worker)
            if answering:
                return answering
            self.check_interrupt()

    def _deadline(self, pool_worker: PoolWorker) -> float:
        """Return the value of `time.monotonic` at which a worker's next answer is overdue."""
        if self.timeout is None or pool_worker.overdue:
            return math.inf
        return pool_worker.since + (self.timeout if pool_worker.ready else max(self.timeout, self.start_seconds))

    def _check_time(self, pool_worker: PoolWorker) -> None:
        """Kill a worker that exceeds the time limit. Print a line about one that takes much longer than all others."""
        now = time.monotonic()
        if self._deadline(pool_worker) <= now:
            pool_worker.overdue = f"after {self.timeout:g} seconds without an answer (engine.timeout)"
            pool_worker.kill()
        elif pool_worker.report_at <= now:
            taken = now - pool_worker.since
            pool_worker.report_at = now + taken
            echo(f"engine: {self._describe_silence(pool_worker, taken)}", to_stderr=True)

    def _describe_silence(self, pool_worker: PoolWorker, seconds: float) -> str:
        number, described = self.pool_workers.index(pool_worker) + 1, pool_worker.describe()
        name = f"worker {number}" + (f" ({described})" if described else "")
        if not pool_worker.tasks:
            return f"{name} has not started after {seconds:.0f} s."
        task = pool_worker.tasks[0]
        others = f" The longest so far took {self._longest:.0f} s." if self._longest else ""
        fix = "" if self.timeout else " To limit this time, set engine.timeout."
        steps = f", step {pool_worker.steps.done}/{pool_worker.steps.total}" if pool_worker.steps else ""
        what = f"client {task.client}, round {task.round}{steps}"
        return f"{name} has not answered for {seconds:.0f} s: {what}.{others}{fix}"

    def _report_steps(self) -> None:
        """Report the steps of the clients that are being trained, as far as their workers have sent them."""
        if known := [one.steps for one in self.pool_workers if one.steps]:
            report_steps(sum(steps.done for steps in known), sum(steps.total for steps in known), len(known))

    def _send(self, pool_worker: PoolWorker, handle: Any, blocks: dict[int, Any] | None = None) -> None:
        pool_worker.pending += 1
        if pool_worker.pending == 1:
            self._restart_clock(pool_worker)
        pool_worker.send(handle, blocks)

    def _restart_clock(self, pool_worker: PoolWorker) -> None:
        pool_worker.since = time.monotonic() if pool_worker.pending else math.inf
        pool_worker.report_at = pool_worker.since + max(SILENT, SLOWER * self._longest)

    def _store_experiment(self, worker: Worker) -> Any:
        """Store the run's experiment (`Worker`) where all workers can read it, and return its handle."""
        return self._new_storage()(serialize_worker(worker))

    def start_workers(self, number: int) -> None:
        """Start workers until there are `number`, and send each the run's experiment (`Worker`)."""
        while len(self.pool_workers) < number:
            pool_worker = self._start_worker()
            self.pool_workers.append(pool_worker)
            self._send(pool_worker, self._handle)

    def _remove(self, pool_worker: PoolWorker) -> None:
        self.pool_workers.remove(pool_worker)
        pool_worker.end()

    def assign(
        self, waiting: list[Task], store: SharedTensorStore, work: Callable[[Task], int], window: ResultWindow
    ) -> None:
        """Assign waiting tasks, largest first, each to the worker whose queued tasks have the fewest samples.

        Args:
            waiting: The tasks. Those that are assigned are removed.
            store: The tensors that tasks share.
            work: Returns the number of samples of a task.
            window: Decides whether there is memory for the result of a task.
        """

        def load(pool_worker: PoolWorker) -> int:
            return sum(work(task) for task in pool_worker.tasks)

        waiting.sort(key=work)
        ready = [pool_worker for pool_worker in self.pool_workers if pool_worker.ready]
        while waiting and ready and len((pool_worker := min(ready, key=load)).tasks) < QUEUED:
            running, idle = sum(len(one.tasks) for one in self.pool_workers), not pool_worker.tasks
            last_first = reversed(range(len(waiting)))
            place = next((each for each in last_first if window.has_room(waiting[each], running, idle)), None)
            if place is None:
                return
            task = waiting.pop(place)
            serialized = SerializedValue(task, store)
            pool_worker.tasks.append(task)
            handle = self._new_storage()(serialized)
            self._send(pool_worker, handle, {block: store.handles[block] for block in serialized.blocks})

    def _receive(self, pool_worker: PoolWorker, shown: set[str]) -> Result | None:
        """Process a worker's answer, and return the result of a task, if any. A lost worker is removed.

        Raises:
            ConfigError: The worker cannot load the `Worker` object.
            WorkerLost: Too many workers ended before they had loaded the `Worker` object.
        """
        try:
            answer = pool_worker.answer()
        except WorkerLost as loss:
            self._remove(pool_worker)
            return self._lost.add(pool_worker, WorkerLost(pool_worker.overdue) if pool_worker.overdue else loss)
        if isinstance(answer, Steps):
            pool_worker.steps = answer
            self.check_interrupt()  # such messages could come faster than a wait for answers ends
            return None
        if answer.result:
            self._longest = max(self._longest, time.monotonic() - pool_worker.since)
        pool_worker.pending, pool_worker.steps = pool_worker.pending - 1, None
        self._restart_clock(pool_worker)
        show_warnings(answer, shown)
        if answer.refused:
            self._refuse(answer.refused)
        if answer.result is None:
            pool_worker.ready = True
            return None
        pool_worker.tasks.popleft()
        return finished_result(answer)

    def _refuse(self, why: str) -> NoReturn:
        """Raise an error because workers cannot load the experiment. Workers that are still loading it are removed."""
        for other in [other for other in self.pool_workers if not other.ready]:  # they would fail, too
            self._remove(other)
        fix = "define its classes and functions in a module that every worker can import"
        raise ConfigError(f"engine: a worker process could not load the experiment: {why}; {fix}")


def show_warnings(answer: Answer, shown: set[str]) -> None:
    """Show the warnings of a worker's answer that are not in `shown`, and add them to it. Each worker sends them."""
    for text, category, file, line in answer.warnings:
        if text not in shown:
            shown.add(text)
            warnings.warn_explicit(text, category, file, line)


def finished_result(answer: Answer) -> Result:
    """Return the result of a worker's answer. Its processor time is counted, and a failure gets the worker's trace."""
    assert answer.result
    add_worker_seconds(answer.processor_seconds)
    if answer.trace:
        assert answer.result.failure
        answer.result.failure.__cause__ = RemoteTraceback(answer.trace)
    return answer.result


def serialize_worker(worker: Worker, left_out: SharedPositions | None = None) -> SerializedValue:
    """Serialize an experiment (`Worker`: model, data and options), with this process's torch and warning settings.

    Args:
        worker: The experiment.
        left_out: The positions of objects that are stored elsewhere.

    Raises:
        ConfigError: The object cannot be pickled.
    """
    try:
        return SerializedValue((worker, process_settings()), left_out)
    except Exception as error:  # __reduce__ may raise anything
        raise ConfigError(
            f"engine: the experiment cannot be sent to another process: {one_line(error)}; "
            f"use the sequential engine, or define it in a module"
        ) from error
