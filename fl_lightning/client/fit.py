"""The local loop: one client's training in a round, with precision, clipping and device of a Lightning `Trainer`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from fl_lightning.client.local_work import LocalWork
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import step_function
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.round_progress import report_steps
from fl_lightning.data.loaders import Batches, PoissonBatches, send

CLIENT_OPTIONS = {
    "accumulate_grad_batches",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "max_epochs",
    "max_steps",
    "precision",
    "precision_plugin",
}
"""Attributes of a `Trainer` that hold options of a client's training, not of the round."""

GradientFunction = Callable[[ClientModule, torch.optim.Optimizer, Any, int, L.Trainer], Tensor]
"""Computes the gradients of a step, as `compute_gradients` does, and returns the loss."""


def fit(
    module: ClientModule,
    batches: Batches | PoissonBatches,
    prepare: Callable[[Tensor | Inputs], Tensor | Inputs],
    options: L.Trainer,
    trainer: L.Trainer,
    gradients: GradientFunction | None = None,
) -> torch.optim.Optimizer:
    """Train a client's module, with exactly the result of a `Trainer.fit` of its own, and return its optimizer.

    Starting a fit takes as long as ten steps of a small model, and Lightning's own loop looks for hooks and options in
    each step that a client's fit does not have.

    Args:
        module: The client's module on the training device, in train mode. Its class is `ClientModule`.
        batches: The client's training batches.
        prepare: Makes the network's inputs from those of a batch, on the device.
        options: A trainer with the options of the client's training: precision, clipping, epochs, steps.
        trainer: The trainer of the round, in which this client is a batch.
        gradients: Computes the gradients of each step. By default `compute_gradients`.
    """
    compute = gradients or compute_gradients
    device = options.strategy.root_device
    work = LocalWork.under(options, len(batches), module.context.max_steps)
    module.trainer = own = ClientTrainerView(trainer, options, work)  # type: ignore[assignment]
    vars(module)["log"] = ignore_log
    with own_settings():
        optimizer, schedules = configure_optimizer(module)
        take_step = step_function(optimizer)
        module.on_fit_start()
        while own.current_epoch < work.epochs and not own.should_stop:
            module.on_train_epoch_start()
            for number, (x, y) in enumerate(islice(batches, work.steps_in(own.current_epoch))):
                if own.should_stop:
                    break
                x, y = send(x, device), send(y, device)
                x = prepare(x) if len(y) else x  # nothing to prepare in an empty Poisson batch
                take_step(partial(compute, module, optimizer, (x, y), number, options))
                own.global_step += 1
                report_steps(own.global_step, work.steps)
                for schedule in schedules:
                    module.step_schedule(schedule, "step")
                if trainer.received_sigterm:
                    raise SIGTERMException
            module.on_train_epoch_end()
            for schedule in schedules:
                module.step_schedule(schedule, "epoch")
            own.current_epoch += 1
    return optimizer


def compute_gradients(
    module: ClientModule, optimizer: torch.optim.Optimizer, batch: Any, number: int, options: L.Trainer
) -> Tensor:
    """Compute the loss of a batch and its gradients, clipped if the options say so, and return the loss.

    Args:
        module: The client's module.
        optimizer: Its optimizer.
        batch: The batch on the device.
        number: The batch's number in the epoch.
        options: A trainer with the options of the client's training.
    """
    for group in optimizer.param_groups:  # before the forward, which then finds their memory free and in the cache
        for parameter in group["params"]:
            parameter.grad = None  # as `zero_grad` does, which takes time to record itself for the profiler
    precision = options.precision_plugin
    with nullcontext() if type(precision) is Precision else precision.train_step_context():  # which takes time
        loss = module.training_step(batch, number)
    loss.backward()
    if options.gradient_clip_val:
        module.clip_gradients(optimizer)
    return loss


class ClientTrainerView:
    """Stand-in for the `trainer` of a client's module, if the client is a batch of the round's `Trainer.fit`.

    Progress and options such as `max_epochs` are those of the client. The rest is the round's trainer's.

    Args:
        trainer: The round's trainer.
        options: A trainer with the client's own options.
        work: The number of steps of the client.
    """

    def __init__(self, trainer: L.Trainer, options: L.Trainer, work: LocalWork) -> None:
        self.trainer, self.options, self.work = trainer, options, work
        self.current_epoch = self.global_step = 0
        self.should_stop = False
        self.num_training_batches, self.estimated_stepping_batches = work.per_epoch, work.steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.options if name in CLIENT_OPTIONS else self.trainer, name)


@contextmanager
def own_settings() -> Iterator[None]:
    """Context for a client's code that enables gradients. On exit, gradient mode and warning filters are restored."""
    with torch.enable_grad(), warnings.catch_warnings():
        yield


def configure_optimizer(module: ClientModule) -> tuple[torch.optim.Optimizer, Sequence[Any]]:
    """Return the optimizer and schedulers of one client."""
    made = module.configure_optimizers()
    if not isinstance(made, tuple):
        return made, []
    (optimizer,), schedules = made
    return optimizer, [config["scheduler"] for config in schedules]


def ignore_log(*args: Any, **options: Any) -> None:
    """Do nothing: replaces `log` of a client's module in the local loop, which has no logger."""
