"""One round as one `Trainer.fit`: a batch is a client, and its training step trains that client."""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler

from fl_lightning.core.errors import ConfigError, FLError, blame
from fl_lightning.core.task import Task, Tasks
from fl_lightning.engines.base import Engine
from fl_lightning.engines.client_order import ClientOrder
from fl_lightning.engines.trainer import quiet_lightning, quiet_trainer
from fl_lightning.engines.unread_result import ResultReader, UnreadResult
from fl_lightning.engines.worker import Worker

ROUND_OPTIONS: dict[str, Any] = {
    "accumulate_grad_batches": 1,
    "gradient_clip_algorithm": None,
    "gradient_clip_val": None,
    "limit_train_batches": 1.0,
    "max_epochs": 0,
    "max_steps": -1,
    "precision": "32-true",
}
"""Options of the round's `Trainer` that differ from those of the clients' training, which the local loop applies."""


class RoundFit(L.LightningModule):
    """The module of a round's `Trainer.fit`. It has no weights: each training step trains one client, or a group.

    A batch holds the ids of its clients. The task of a batch is made in its training step, and its results are passed
    on at the end of the batch, before the next task is made.

    Args:
        batches: The batches of the epoch.
        run_batch: Trains the clients of a batch, and returns their results.
        reader: Receives the results.
    """

    def __init__(
        self, batches: Sequence[Any], run_batch: Callable[[Any], Iterable[UnreadResult]], reader: ResultReader
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.batches, self.run_batch, self.reader = batches, run_batch, reader
        self.trained: Iterable[UnreadResult] = ()
        self.finished = 0

    def configure_optimizers(self) -> list[Any]:
        """Return no optimizer: each client builds its own."""
        return []

    def train_dataloader(self) -> RoundLoader:
        """Return the loader of the round's batches."""
        return RoundLoader(self.batches)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Train the clients of a batch."""
        self.trained = self.run_batch(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Pass on the results of the batch's clients."""
        for unread in self.trained:
            self.reader.add(unread)
        self.trained = ()
        self.finished += 1

    def on_train_epoch_end(self) -> None:
        """Pass on the results that are still on the device."""
        self.reader.flush()


class RoundLoader:
    """Loader of a round's batches. Its length is the number of batches that callbacks, such as progress bars, see."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


class RoundEngine(Engine):
    """Base class of the engines that train a round's clients in this process, in one `Trainer.fit`.

    Args:
        callbacks: Lightning callbacks of the round's `Trainer`, for which an epoch is a round and a batch is a client.
        profiler: Lightning profiler of the round's `Trainer`.

    Raises:
        ConfigError: The profiler has no file.

    Attributes:
        local_loop: Whether the local loop may train clients. Otherwise each client has a `Trainer.fit` of its own.
    """

    local_loop: bool = True

    def __init__(self, callbacks: list[Callback] | None = None, profiler: Profiler | None = None) -> None:
        if profiler and profiler.filename is None:
            raise ConfigError("engine.profiler: its table would not be shown. Set its dirpath and its filename.")
        self.callbacks, self.profiler = callbacks, profiler
        self._trainer: L.Trainer | None = None
        self._worker: Worker | None = None

    def check(self, worker: Worker) -> None:
        """Check, by building the round's trainer, that it takes the callbacks.

        Raises:
            ConfigError: It does not.
        """
        with blame("engine.callbacks"):
            self.trainer_for(worker)

    def trainer_for(self, worker: Worker) -> L.Trainer:
        """Return the trainer that serves all rounds of a run."""
        if self._trainer is None or self._worker is not worker:
            options = worker.training.trainer | ROUND_OPTIONS | {"callbacks": self.callbacks, "profiler": self.profiler}
            self._trainer, self._worker = quiet_trainer(options, worker.shown), worker
        return self._trainer

    def run(self, worker: Worker, tasks: Tasks, done: ClientOrder) -> None:
        """Run the tasks in order: those that train in one `Trainer.fit`, others one after another.

        On a CPU, the task of a batch is made only when `done` has received the results of the batch before.

        Raises:
            FLError: A callback has stopped the trainer before the last batch.
        """
        reader, arriving = ResultReader(worker.device, done), iter(tasks)
        if tasks.fit:
            run_batch = partial(self.run_batch, worker, arriving)
            self._fit_round(worker, RoundFit(self.batches(worker, tasks.clients), run_batch, reader))
            return
        for task in arriving:
            reader.add(self.run_alone(worker, task))
        reader.flush()

    @abstractmethod
    def batches(self, worker: Worker, clients: Sequence[int]) -> Sequence[Any]:
        """Return the batches of a round: ids of clients, or lists of ids."""

    @abstractmethod
    def run_batch(self, worker: Worker, arriving: Iterator[Task], batch: Any) -> Iterable[UnreadResult]:
        """Take the tasks of a batch from the iterator, train its clients, and return their results."""

    def run_alone(self, worker: Worker, task: Task) -> UnreadResult:
        """Run one task, by the local loop if it can train the client, and return its result."""
        own = worker.for_client(task.client)
        loops = self.local_loop and own.can_loop
        result = own.start(task, self.trainer_for(worker) if loops else None)
        if task.fit and not loops:
            gc.collect()  # a used Trainer is a cycle that holds its model
        return result

    def _fit_round(self, worker: Worker, module: RoundFit) -> None:
        """Train a round's clients in one epoch of a `Trainer.fit`.

        A `KeyboardInterrupt` is raised as such. Lightning would replace it by an exception that ends the process.
        """
        trainer, count = self.trainer_for(worker), len(module.batches)
        trainer.fit_loop.max_epochs = trainer.current_epoch + 1
        interrupt = None
        try:
            with quiet_lightning(worker.shown):
                trainer.fit(module)
        except BaseException as error:
            if not isinstance(error.__context__, KeyboardInterrupt):
                raise
            interrupt = error.__context__
        if interrupt:  # not raised above, where it would get the replacement as its context
            raise interrupt
        if module.finished < count:
            what = f"a callback stopped the round after {module.finished} of {count} batches of clients"
            raise FLError(f"engine.callbacks: {what}")

    def close(self) -> None:
        """Release the trainer."""
        self._trainer = self._worker = None
