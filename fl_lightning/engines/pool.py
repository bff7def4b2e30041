"""Scheduling of tasks on several workers, and recovery when a worker is lost."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.task import Result, Task, failed
from fl_lightning.engines.base import Engine
from fl_lightning.engines.serialization import SerializedValue, SharedTensorStore
from fl_lightning.engines.task_server import Answer, ProcessSettings
from fl_lightning.engines.worker import Worker

AT_HAND = 2  # tasks of a member: the one it is at, and one to go on with while its result is being dealt with
TAKEN = 2  # tasks taken at a time, times members
TRIES = 3  # members that a client may take with it


class WorkerLost(FLError):
    """A worker was lost during a task. The message says how it ended."""

    exit_code = 1


class RemoteTraceback(Exception):
    """The traceback of an error in another process, as text."""


class PoolWorker(ABC):
    """One worker of a pool, as the engine sees it. It answers requests in order.

    Attributes:
        ready: Whether it has the worker object.
        tasks: What it was given and has not answered yet, in order.
    """

    def __init__(self) -> None:
        self.ready = False
        self.tasks: deque[Task] = deque()

    @abstractmethod
    def load(self, handle: Any) -> None:
        """Send the worker object, which is stored under a handle."""

    @abstractmethod
    def give(self, parcel: SerializedValue, blocks: dict[int, Any]) -> None:
        """Send a task, and the handles of the blocks of shared tensors that it needs."""

    @abstractmethod
    def answer(self) -> Answer:
        """Return the next answer.

        Raises:
            WorkerLost: It will not answer any more.
        """

    @abstractmethod
    def end(self) -> None:
        """Stop the worker at once."""


class PoolEngine(Engine):
    """Distributes tasks to workers: the largest first, common tensors once per round, tasks of a lost worker again.

    Members are hired when there is work for them, and kept from round to round.
    """

    def __init__(self) -> None:
        self._members: list[PoolWorker] = []
        self._loaded: Worker | None = None
        self._handle: Any = None

    @abstractmethod
    def size(self, worker: Worker) -> int:
        """Return the number of workers for a worker object.

        Raises:
            ConfigError: They cannot be had.
        """

    @abstractmethod
    def _start_worker(self) -> PoolWorker:
        """Start a worker."""

    @abstractmethod
    def _put(self, parcel: SerializedValue) -> Any:
        """Store a serialized value where every worker can read it, as long as its handle exists."""

    @abstractmethod
    def _wait(self) -> Sequence[PoolWorker]:
        """Wait until workers have answered or are lost, and return them."""

    def _shelf(self) -> SharedTensorStore:
        """Return a new store for the shared tensors of a round."""
        return SharedTensorStore(self._put)

    def check(self, worker: Worker) -> None:
        """Check that the worker object can be serialized and that workers can be started.

        Raises:
            ConfigError: It cannot, or there are none.
        """
        self.size(worker)
        packed(worker)

    def run(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[Result]:
        """Yield results as they arrive. Each worker has a few tasks queued.

        Raises:
            ConfigError: The members cannot take in the worker object.
            WorkerLost: They end before they have.
        """
        size = self._size(worker)
        self._load(worker)
        arriving, shelf, losses = iter(tasks), self._shelf(), LostWorkers()
        waiting: list[Task] = []
        while True:
            if not waiting:
                waiting = list(islice(arriving, TAKEN * size))
                for task in waiting:
                    shelf.look(task)
            self._fill(min(size, len(waiting) + sum(bool(member.tasks) for member in self._members)))
            self._deal(waiting, shelf, lambda task: len(worker.data.shards[task.client].train))
            if not waiting and not any(member.tasks for member in self._members):
                return
            for member in self._wait():
                result = self._outcome(member, worker.shown, losses)
                if member not in self._members:
                    waiting += member.tasks
                if result:
                    yield result

    def start(self, worker: Worker) -> None:
        """Start all workers, and wait until they have loaded the worker object.

        Raises:
            ConfigError: They cannot take it in.
            WorkerLost: They end before they have.
        """
        self._load(worker)
        losses = LostWorkers()
        while True:
            self._fill(self._size(worker))
            if all(member.ready for member in self._members):
                return
            for member in self._wait():
                self._outcome(member, worker.shown, losses)

    def close(self) -> None:
        """Stop all workers."""
        for member in self._members:
            member.end()
        self._members.clear()
        self._loaded = self._handle = None

    def _size(self, worker: Worker) -> int:
        return min(self.size(worker), len(worker.data.shards))

    def _load(self, worker: Worker) -> None:
        """Make workers use a worker object, and drop the tasks of an interrupted round."""
        for member in [member for member in self._members if member.tasks]:
            self._dismiss(member)
        if worker is self._loaded:
            return
        self._handle, self._loaded = self._put(packed(worker)), worker
        for member in self._members:
            member.ready = False
            member.load(self._handle)

    def _fill(self, number: int) -> None:
        while len(self._members) < number:
            member = self._start_worker()
            self._members.append(member)
            member.load(self._handle)

    def _dismiss(self, member: PoolWorker) -> None:
        self._members.remove(member)
        member.end()

    def _deal(self, waiting: list[Task], shelf: SharedTensorStore, work: Callable[[Task], int]) -> None:
        """Give the largest task to the worker with the least to do, until all queues are full."""

        def load(member: PoolWorker) -> int:
            return sum(work(task) for task in member.tasks)

        waiting.sort(key=work)
        ready = [member for member in self._members if member.ready]
        while waiting and ready and len((member := min(ready, key=load)).tasks) < AT_HAND:
            task = waiting.pop()
            parcel = SerializedValue(task, shelf)
            member.tasks.append(task)
            member.give(parcel, {block: shelf.handles[block] for block in parcel.blocks})

    def _outcome(self, member: PoolWorker, heard: set[str], losses: LostWorkers) -> Result | None:
        """Return the result in a worker's answer, if any. A lost worker is removed; its tasks are tried again."""
        try:
            return self._answered(member, heard)
        except WorkerLost as loss:
            self._dismiss(member)
            return losses.count(member, loss)

    def _answered(self, member: PoolWorker, heard: set[str]) -> Result | None:
        answer = member.answer()
        for text, category, file, line in answer.warnings:
            if text not in heard:  # each member has heard by itself
                heard.add(text)
                warnings.warn_explicit(text, category, file, line)
        if answer.refused:
            for other in [other for other in self._members if not other.ready]:  # who would yet answer the same
                self._dismiss(other)
            raise ConfigError(
                f"engine: a worker process could not take in the experiment: {answer.refused}; "
                f"define what it is made of in a module that every worker can import"
            )
        if answer.result is None:
            member.ready = True
            return None
        member.tasks.popleft()
        if answer.trace:
            assert answer.result.failure
            answer.result.failure.__cause__ = RemoteTraceback(answer.trace)
        return answer.result


class LostWorkers:
    """Workers lost in one call of `run`, and the tasks that were running."""

    def __init__(self) -> None:
        self._by_client: Counter[int] = Counter()
        self._unready = 0

    def count(self, member: PoolWorker, loss: WorkerLost) -> Result | None:
        """Count a lost worker. Return the failure of the task it was running if that task is not tried again.

        Raises:
            WorkerLost: So many were lost before they had begun that there is no use in more.
        """
        if not member.ready:
            self._unready += 1
            if self._unready == TRIES:
                raise WorkerLost(
                    f"engine: {TRIES} workers ended before they could begin, the last of them {loss}; a script that "
                    f'runs an experiment with this engine must do so under `if __name__ == "__main__":`'
                )
        if not member.tasks:
            return None
        client = member.tasks[0].client
        self._by_client[client] += 1
        if self._by_client[client] < TRIES:
            return None
        died = WorkerLost(f"{TRIES} worker processes died at it, the last of them {loss}")
        return failed(member.tasks.popleft(), died)


def packed(worker: Worker) -> SerializedValue:
    """The serialized form of a worker object.

    Raises:
        ConfigError: It cannot be sent to another process.
    """
    try:
        return SerializedValue((worker, ProcessSettings.here()))
    except Exception as error:  # whatever a stranger's __reduce__ raises
        raise ConfigError(
            f"engine: the experiment cannot be sent to another process: {one_line(error)}; "
            f"use the sequential engine, or define it in a module"
        ) from error
