"""Train several clients one after another in one `Trainer.fit`, during its single dummy batch."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import is_plain_sgd, step_function
from fl_lightning.core.task import Task
from fl_lightning.data.loaders import send
from fl_lightning.engines.base import Engine, Value
from fl_lightning.engines.trainer import (
    FOR_ALL,
    ClientTrainerView,
    LocalWork,
    obstacle_to_shared_fit,
    quiet_lightning,
    quiet_trainer,
)
from fl_lightning.engines.worker import Worker


class SharedFitEngine(Engine):
    """Base class of engines that train clients in this process, inside one `Trainer.fit` where possible."""

    _fit: SharedFit | None = None

    @abstractmethod
    def _can_share(self, worker: Worker) -> bool:
        """Return whether clients can be trained in one fit."""

    def in_one_fit(self, worker: Worker, work: Callable[[], Value]) -> Value:
        """Call `work`, a function that trains clients, in one `Trainer.fit` if possible. Return the value of `work`."""

        def run(fit: SharedFit) -> Value:
            self._fit = fit
            try:
                return work()
            finally:
                self._fit = None

        return work() if self._fit or not self._can_share(worker) else run_shared_fit(worker, run)


def can_share_fit(worker: Worker) -> bool:
    """Return whether clients can be trained in one shared `Trainer.fit` with the same results as in separate fits.

    That is not so if the trainer or the module has parts for one fit, such as callbacks, own hooks or a gradient
    scaler.
    """
    module, trainer = worker.modules.build(), worker.idle_trainer
    if type(module) is not ClientModule or module.trains_itself or obstacle_to_shared_fit(trainer):
        return False
    optimizer, schedules = configure_optimizer(module)
    return isinstance(optimizer, torch.optim.Optimizer) and all(isinstance(s, LRScheduler) for s in schedules)


def run_shared_fit(worker: Worker, work: Callable[[SharedFit], Value]) -> Value:
    """Call `work` inside one `Trainer.fit` that is shared by all clients trained in it, and return the value of `work`.

    Args:
        worker: The worker; `can_share_fit(worker)` is true.
        work: Runs any number of tasks. Its argument trains a client, as in `Worker.run`.
    """
    values: list[Value] = []
    errors: list[BaseException] = []

    def run(fit: SharedFit) -> None:
        try:
            values.append(work(fit))
        except BaseException as error:
            errors.append(error)  # Lightning would end the process for a KeyboardInterrupt

    trainer = quiet_trainer(worker.training.trainer | FOR_ALL, worker.shown)
    with quiet_lightning(worker.shown):
        trainer.fit(SharedFit(worker, run))
    for error in errors:
        raise error
    return values[0]


class SharedFit(L.LightningModule):
    """Trains clients one after another in one fit, with exactly the results of a separate `Trainer` per client.

    Starting a fit takes as long as ten steps of a small model, and Lightning's own loop looks for hooks and options in
    each step that a client's fit does not have.

    Args:
        worker: The worker; `can_share_fit(worker)` is true.
        work: Runs tasks. Its argument trains a client.
    """

    def __init__(self, worker: Worker, work: Callable[[SharedFit], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.worker, self.work = worker, work
        self._plain_sgd: Any = None, None, None
        precision = worker.idle_trainer.precision_plugin  # the base class's context does nothing, and takes time
        self.step_context = nullcontext if type(precision) is Precision else precision.train_step_context

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return no optimizer: each client builds its own."""
        return []

    def train_dataloader(self) -> Iterable[int]:
        """Return a loader of one dummy batch, so that Lightning calls `on_train_batch_end` once."""
        return range(1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        """Do nothing: clients train in `on_train_batch_end`, outside of the precision context of this hook."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Train all clients, by calling the function `work` that this object was created with."""
        self.work(self)

    def forward(self, module: ClientModule, task: Task) -> torch.optim.Optimizer:
        """Train one client's module inside the shared fit, and return the client's optimizer."""
        with own_settings():
            return self._fit(module, task)

    def _fit(self, module: ClientModule, task: Task) -> torch.optim.Optimizer:
        trainer, alone, clients = self.trainer, self.worker.idle_trainer, self.worker.client_data
        device = trainer.strategy.root_device
        if not module.shared_weights:  # newly built
            module.to(device).train()
        batches = clients.batches(task)
        work = LocalWork.under(alone, len(batches))
        module.trainer = own = ClientTrainerView(trainer, alone, work)  # type: ignore[assignment]
        vars(module)["log"] = ignore_log
        optimizer, schedules = self._optimizer_of(module)
        step = step_function(optimizer)
        module.on_fit_start()
        while own.current_epoch < work.epochs and not own.should_stop:
            module.on_train_epoch_start()
            for number, (x, y) in enumerate(islice(batches, work.steps_in(own.current_epoch))):
                if own.should_stop:
                    break
                x, y = send(x, device), send(y, device)
                backward = partial(self._backward, module, optimizer, (clients.ready_to_train(x), y), number)
                step(backward)
                own.global_step += 1
                if trainer.received_sigterm:
                    raise SIGTERMException
            module.on_train_epoch_end()
            for schedule in schedules:
                schedule.step()
            own.current_epoch += 1
        return optimizer

    def _optimizer_of(self, module: ClientModule) -> tuple[torch.optim.Optimizer, Sequence[Any]]:
        """Return a client's optimizer and schedulers. If it is plain SGD, the clients that use one module share it."""
        of_module, at_scale, optimizer = self._plain_sgd
        if module is of_module and module.lr_scale == at_scale:
            return optimizer, []
        optimizer, schedules = configure_optimizer(module)
        if module.shared_weights is not None and is_plain_sgd(optimizer):  # which has no state
            self._plain_sgd = module, module.lr_scale, optimizer
        return optimizer, schedules

    def _backward(
        self,
        module: ClientModule,
        optimizer: torch.optim.Optimizer,
        batch: tuple[Tensor, Tensor],
        number: int,
    ) -> Tensor:
        """Compute the loss of a batch and its gradients."""
        for group in optimizer.param_groups:  # before the forward, which then finds their memory free and in the cache
            for parameter in group["params"]:
                parameter.grad = None  # as `zero_grad` does, which takes time to record itself for the profiler
        with self.step_context():
            loss = module.training_step(batch, number)
        loss.backward()
        alone = self.worker.idle_trainer
        if alone.gradient_clip_val:
            self.clip_gradients(optimizer, alone.gradient_clip_val, alone.gradient_clip_algorithm)
        return loss


@contextmanager
def own_settings() -> Iterator[None]:
    """Context for a client's code that enables gradients. On exit, gradient mode and warning filters are restored."""
    with torch.enable_grad(), warnings.catch_warnings():
        yield


def configure_optimizer(module: ClientModule) -> tuple[torch.optim.Optimizer, Sequence[Any]]:
    """Return the optimizer and schedulers of one client."""
    made = module.configure_optimizers()
    return (made[0][0], made[1]) if isinstance(made, tuple) else (made, [])


def ignore_log(*args: Any, **options: Any) -> None:
    """Do nothing: replaces `log` of a client's module in a shared fit, which has no logger."""
