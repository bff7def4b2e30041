"""Runs one client's task: load the tensors from the server, train with Lightning, evaluate, and return the upload.

If clients have different networks (`Mixed`), each group of clients with the same one has a `Worker` of its own.
A `Task` and a `Worker` are picklable and complete, so that an engine can run them in any process on any machine and
get the same bytes.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import lightning as L
import torch
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.algorithms.base import Batches
from fl_lightning.client.dp_sgd import PrivateGradients, obstacle_to_vmap
from fl_lightning.client.fit import ClientTrainerView, configure_optimizer
from fl_lightning.client.fit import fit as fit_locally
from fl_lightning.client.hidden import HiddenSamples
from fl_lightning.client.lightning_model import ModelHooks
from fl_lightning.client.local_work import LocalWork
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import optimizer_tensors
from fl_lightning.client.private_random import PrivateRandom
from fl_lightning.client.weights import to_cpu
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Tensors
from fl_lightning.core.seeding import RandomStates, Stream, derive
from fl_lightning.core.state_dicts import State
from fl_lightning.core.task import Result, Task, failed_result
from fl_lightning.data.loaders import ClientDataModule
from fl_lightning.engines.checks import check_shapes, unchanged_fixed_tensors
from fl_lightning.engines.client_callbacks import StepReports, logged_metrics
from fl_lightning.engines.trainer import inference, obstacle_to_loop, quiet_lightning, quiet_trainer
from fl_lightning.engines.unread_result import UnreadResult, read_together, unread_result
from fl_lightning.engines.worker_parts import WorkerParts


@dataclass
class Worker(WorkerParts):
    """Runs the tasks of a run's clients: `run` runs one client's task. The arguments are those of `WorkerParts`.

    Attributes:
        has_fitted: Whether a client has trained in this process.
    """

    has_fitted: bool = field(default=False, init=False)

    def run(self, task: Task) -> Result:
        """Run a client's task and return its result. A `Trainer` of its own trains the client.

        An error becomes part of the result, with client, round and cause.
        """
        return next(read_together([self.for_client(task.client).start(task)]))

    def start(self, task: Task, trainer: L.Trainer | None = None) -> UnreadResult:
        """Run a client's task, and return a result whose losses can be read from the training device later.

        This avoids waiting for the device after each task. Otherwise it works as `run`.

        Args:
            task: The task.
            trainer: The round's trainer, if the local loop trains the client; `can_loop` is true. By default a
                `Trainer` of its own trains it, except with `dp_sgd`, which only the local loop applies.
        """
        trainer = trainer or (self.idle_trainer if self.training.dp_sgd else None)
        try:
            slot = self.modules.intact_slot() if trainer else None
            module = self.modules.receive(task, slot)
            optimizer, logged = None, dict[str, float]()
            first_fit, self.has_fitted = task.fit and not self.has_fitted, task.fit or self.has_fitted
            with unchanged_fixed_tensors(module.backbone) if first_fit else nullcontext():
                if task.fit and trainer:
                    optimizer = self.loop(module, task, trainer)
                elif task.fit:
                    optimizer, logged = self.fit(module, task)
            if slot:
                slot.check_weights()
            module.weight_memory.spent = spent = self.algorithm.plain_exchange and not task.evaluates
            state = optimizer_tensors(optimizer) if optimizer and self.keeps_optimizer else {}
            result = self.finish(task, module, state, logged)
            if slot and spent and (task.keep_upload or self.device.type != "cpu"):  # a GPU's are read later
                slot.give_away()
            return result
        except BaseException as error:
            return unread_result(task, failed_result(task, error))

    @cached_property
    def can_loop(self) -> bool:
        """Whether the local loop can train clients with the same results as `Trainer` fits of their own.

        That is not so if the trainer or the module has parts for one fit, such as callbacks, own hooks or a gradient
        scaler, or if the model or the optimizer cannot be built: the client's own fit then says why.
        """
        try:
            module = self.modules.build()
            if type(module) is not ClientModule or module.trains_itself or obstacle_to_loop(self.idle_trainer):
                return False
            optimizer, schedules = configure_optimizer(module)
        except Exception:
            return False
        return isinstance(optimizer, torch.optim.Optimizer) and all(isinstance(s, LRScheduler) for s in schedules)

    def loop(self, module: ClientModule, task: Task, trainer: L.Trainer) -> torch.optim.Optimizer:
        """Train a client's module by the local loop, inside the round's `Trainer.fit`, and return its optimizer."""
        if not module.weight_memory.flat:  # newly built
            module.to(self.device).train()
        data, options = self.client_data, self.idle_trainer
        if self.training.dp_sgd:
            batches = data.poisson_batches(task, secret=self.own_machine)
            gradients = self.private_gradients(task, batches.expected)
            return fit_locally(module, batches, data.ready_to_train, options, trainer, gradients)
        return fit_locally(module, data.batches(task), data.ready_to_train, options, trainer)

    def private_gradients(self, task: Task, expected: int) -> PrivateGradients:
        """Return the object that computes the noisy gradients of a client's fit.

        Args:
            task: The client's task.
            expected: The expected number of samples in a batch.
        """
        options = self.training.dp_sgd
        assert options
        assert options.noise is not None
        seed = None if self.own_machine else derive(self.seed, Stream.PRIVACY, task.round, task.client)
        random = PrivateRandom(self.device, seed)
        return PrivateGradients(options.clip, options.noise, expected, random, self.obstacle_to_vmap is None)

    @cached_property
    def obstacle_to_vmap(self) -> str | None:
        """Why the gradients of single samples (`dp_sgd`) are computed one by one; None if `torch.vmap` batches them."""
        states = RandomStates(self.device)
        try:
            module = self.modules.build().to(self.device).train()
            module.trainer = cast(L.Trainer, ClientTrainerView(self.idle_trainer, self.idle_trainer, LocalWork(1, 1)))
            for term in module.terms():
                term.begin(module)
            batch = next(iter(self.client_data.ordered_batches(None, one_width=False)))
            return obstacle_to_vmap(module, batch, self.idle_trainer.precision_plugin.train_step_context)
        finally:
            states.restore()

    def fit(self, module: ClientModule, task: Task) -> tuple[torch.optim.Optimizer, dict[str, float]]:
        """Train a client's module with a new `Trainer`. Return its optimizer, and the metrics that callbacks logged."""
        batches = self.client_data.batches(task)
        module.train()
        callbacks = [*self.client_callbacks, *([ModelHooks()] if module.trains_itself else [])]
        options = self.training.trainer
        if task.max_steps is not None:
            own = options.get("max_steps", -1)
            options = {**options, "max_steps": task.max_steps if own == -1 else min(own, task.max_steps)}
        trainer = quiet_trainer(options, self.shown, callbacks)
        trainer.callbacks.append(StepReports(LocalWork.under(trainer, len(batches)).steps))  # type: ignore[attr-defined]
        with quiet_lightning(self.shown):
            trainer.fit(module, datamodule=ClientDataModule(batches, self.client_data.ready_to_train))
        if self.client_callbacks and not module.train_losses():
            raise ConfigError("the fit was over before its first step, ended by one of client_callbacks")
        for name, parameter in module.backbone.named_parameters():
            if parameter.requires_grad and name in self.fixed:
                what = f"{name!r} is frozen when the model is built, so it is not sent, but unfrozen in the fit"
                raise ConfigError(f"model: {what}. Build it trainable, and freeze it in on_fit_start.")
        return trainer.optimizers[0], logged_metrics(trainer, module.train_losses())

    def finish(
        self, task: Task, module: ClientModule, optimizer_state: Tensors, logged: dict[str, float] | None = None
    ) -> UnreadResult:
        """Build the result of a task: the upload, client state, losses and scores.

        The task has trained the module before, unless it is a task without training.

        Args:
            task: The task.
            module: The client's module, trained.
            optimizer_state: The final state of the client's optimizer if it is kept, as `optimizer_tensors` gives it.
            logged: Metrics that callbacks logged in the client's fit.
        """
        private = self.training.dp_sgd is not None
        batches: Any = HiddenSamples() if private else self.client_data.training_batches(task.client)
        upload, memory, local, on_global, success = None, task.memory, None, None, None
        untrained = task.evaluate and not task.fit and self.algorithm.is_untrained(module, memory)
        runs_module = task.evaluates or module.knowledge or not self.algorithm.plain_exchange
        if (runs_module or self.compression) and task.fit:
            module.loss_record.settle()  # a NaN is reported as such, not as an error that it causes here
        with inference(module, self.idle_trainer) if runs_module else torch.no_grad():
            if task.upload:
                upload, memory = self._upload(task, module, optimizer_state, batches)
            if task.evaluates:
                self.algorithm.personalize(module, batches)
            if task.evaluate:
                (local,) = self.scorer.local_scores(module, [task.client])
                success = self.attack_success(module)
            if task.evaluate_globally:
                on_global = self.scorer.score(module)
        result = Result(task.client, task.download.nbytes, upload, memory, {}, logged or {}, local, on_global)
        result = replace(result, untrained=untrained, attack_success=success)
        sends_losses = task.fit and not (private and self.own_machine)
        return unread_result(task, result, module.loss_record if sends_losses else None)

    def _upload(
        self, task: Task, module: ClientModule, optimizer_state: Tensors, batches: Batches
    ) -> tuple[Message, State]:
        """Return a client's upload, compressed if asked, and the state that it keeps until its next round."""
        if module.weight_memory.flat is None:
            check_shapes(module.backbone, self.template.backbone.state_dict())
        samples, classes = self.client_data.sample_count(task.client), self.data.data.num_classes
        upload = self.algorithm.upload(module, batches, samples, classes)
        memory = self.algorithm.remember(module, upload)
        if optimizer_state:
            memory = memory | to_cpu({"optimizer": optimizer_state})
        memory = memory if self.device.type == "cpu" else on_cpu(memory)
        received = self.codec.restore_download(task.download, task.client).section("model")
        upload, residual = self.codec.compress_upload(upload, received, task.memory, task.round, task.client)
        return upload, memory | residual

    def attack_success(self, module: ClientModule) -> float | None:
        """Return the success rate of an attack on a client's model; None without an attack or with a global model."""
        return None if self.algorithm.one_model else self.scorer.success_rate(module)


def on_cpu(memory: State) -> State:
    """Return a client state on the CPU, so that only clients in training use GPU memory."""
    return {name: {key: value.cpu() for key, value in tensors.items()} for name, tensors in memory.items()}
