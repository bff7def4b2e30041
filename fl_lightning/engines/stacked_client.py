"""One of the clients that are trained together as one batched model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from fl_lightning.client.fit import ClientTrainerView
from fl_lightning.client.local_work import LocalWork
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Tensors
from fl_lightning.core.seeding import RandomStates
from fl_lightning.core.task import Task, is_interrupt
from fl_lightning.data.loaders import Batches
from fl_lightning.engines.client_slot import ClientSlot


@dataclass(eq=False)
class Client:
    """One of the clients that are trained together.

    Args:
        task: Its task.
        slot: The slot of its module, or None if the module was built for the task.
        module: Its module.
        tensors: The backbone's parameters and buffers by name.
        batches: Its training batches.
        work: Its number of steps.
        progress: The trainer that its module sees.
        random_states: Its random states, or None if it draws no random numbers.
        error: The error that ended its training, if any.
    """

    task: Task
    slot: ClientSlot | None
    module: ClientModule
    tensors: Tensors
    batches: Batches
    work: LocalWork
    progress: ClientTrainerView
    random_states: RandomStates | None
    error: BaseException | None = None

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps of the client in an epoch; 0 if it has failed or was stopped."""
        return 0 if self.error or self.progress.should_stop else self.work.steps_in(epoch)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context that uses the client's own random states, and stores an error instead of raising it."""
        with self.catch_failure(), self.drawing():
            yield

    def drawing(self) -> AbstractContextManager[None]:
        """Return a context manager in which random numbers come from the client's own random states."""
        return self.random_states.drawing() if self.random_states else nullcontext()

    @contextmanager
    def catch_failure(self) -> Iterator[None]:
        """Context that stores an error as the client's failure instead of raising it."""
        try:
            yield
        except BaseException as error:
            if is_interrupt(error):
                raise
            self.error = error
