"""The LightningModule that trains several clients together. The clients' weights are rows of stacked tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any

import lightning as L
import torch
from torch import Tensor

from fl_lightning.client.module import ClientModule, LossTerm, Step
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.seeding import RandomStates
from fl_lightning.core.state_dicts import at_least_float32
from fl_lightning.core.task import Task, is_interrupt
from fl_lightning.data import LoadedData
from fl_lightning.data.loaders import Batches
from fl_lightning.engines.stacked_optimizer import BlockOptimizer
from fl_lightning.engines.stacked_step import (
    ClientStep,
    StackedStep,
    StepContents,
    StepOutput,
    as_rows,
    contents,
    difference,
    tensors_of,
    versions,
)
from fl_lightning.engines.trainer import ClientTrainerView, LocalWork
from fl_lightning.engines.worker import Worker


@dataclass(eq=False)
class Client:
    """One of the clients that are trained together.

    Args:
        task: Its task.
        module: Its module at the start of the task, on the training device.
        batches: Its training batches.
        random_states: Its random states.
        work: Its number of steps.
        error: The error that ended its training, if any.

    Attributes:
        progress: The trainer of its module, once the fit has begun.
    """

    task: Task
    module: ClientModule
    batches: Batches
    random_states: RandomStates
    work: LocalWork
    error: BaseException | None = None
    progress: ClientTrainerView = field(init=False)

    @classmethod
    def start(cls, worker: Worker, task: Task) -> Client:
        """Return the client of a task with its module, batches and random states, ready to start its fit."""
        module = worker.modules.receive(task)
        random_states = RandomStates(worker.device)
        batches = worker.client_data.batches(task)
        if worker.device.type != "cpu":  # modules are built on the CPU, and `to` takes time
            module.to(worker.device)
        return cls(task, module.train(), batches, random_states, LocalWork.under(worker.idle_trainer, len(batches)))

    def steps_in(self, epoch: int) -> int:
        """Return the number of steps of the client in an epoch; 0 if it has failed or was stopped."""
        return 0 if self.error or self.progress.should_stop else self.work.steps_in(epoch)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Context with the client's own random states. An error in it becomes the client's failure."""
        with self.catch_failure(), self.random_states.drawing():
            yield

    @contextmanager
    def catch_failure(self) -> Iterator[None]:
        """Context in which an error becomes the client's failure."""
        try:
            yield
        except BaseException as error:
            if is_interrupt(error):
                raise
            self.error = error


@dataclass
class StackedBatch:
    """The batches of several clients for one step, all of the same size.

    Args:
        rows: Ascending rows of their clients.
        x: `(n, B, ...)`.
        y: `(n, B)`.
    """

    rows: list[int]
    x: Tensor
    y: Tensor

    def to(self, device: torch.device, **options: Any) -> StackedBatch:
        """Return the batches on a device."""
        return StackedBatch(self.rows, self.x.to(device, **options), self.y.to(device, **options))


class StackedFit(L.LightningModule):
    """Trains several clients together as one batched model, each as a `Trainer` of its own would train it.

    The clients' weights and buffers are rows of stacked tensors. A step runs all clients that are in it as one batched
    model on views of the stacks, and one optimizer over the stacks then steps their rows.

    Args:
        clients: The clients, at least one.
        data: The dataset.
        alone: A trainer with each client's own options.
    """

    def __init__(self, clients: Sequence[Client], data: LoadedData, alone: L.Trainer) -> None:
        super().__init__()
        self.automatic_optimization = False
        # Clients with most steps first, so that active clients stay consecutive rows, which are views of the stacks.
        # Clients with equal numbers of samples are neighbours, because their batches always have the same size.
        self.clients = sorted(clients, key=lambda c: (-c.work.per_epoch, -len(c.batches.index), c.task.client))
        self.data, self.alone = data, alone
        tensors = [dict(tensors_of(client.module.backbone)) for client in self.clients]
        self.stacks = {name: torch.stack([own[name].detach() for own in tensors]) for name in tensors[0]}
        self.tensors: list[Tensors] = []  # rows of the stacks, for each client
        self.begun: list[Client] = []  # clients that take part in the current epoch
        self.parts: list[tuple[list[int], Tensors, Tensor]] = []  # rows, tensors and losses of the current step
        self.kinds: list[tuple[StackedStep, dict[int, int]]] = []
        self.observes = any(piece.observes for client in clients for piece in client.module.pieces())
        self.hooked = any(overrides_epoch_hooks(client.module) for client in clients)

    def configure_optimizers(self) -> Any:
        """Build one optimizer with separate state for each client's parameters, and one scheduler."""
        first, started = self.clients[0].module, [client.module.optimizer_state for client in self.clients]
        self.blocks = BlockOptimizer(first, self.stacks, started)
        optimizer = self.blocks.optimizer
        return optimizer if first.scheduler_factory is None else ([optimizer], [first.scheduler_factory(optimizer)])

    def optimizer_states(self) -> dict[int, Tensors]:
        """Return the final optimizer state of each client, by client id."""
        return {client.task.client: self.blocks.state_of(row) for row, client in enumerate(self.clients)}

    # --- Hooks of the clients' modules ---

    def train_dataloader(self) -> StackedBatches:
        """Return the loader of the clients' batches."""
        return StackedBatches(self)

    def on_fit_start(self) -> None:
        """Call `on_fit_start` of each client's module."""
        for client in self.clients:
            client.module.trainer = client.progress = ClientTrainerView(self.trainer, self.alone, client.work)  # type: ignore[assignment]
            with client.turn():
                client.module.on_fit_start()

    def on_train_epoch_start(self) -> None:
        """Call the active clients' `on_train_epoch_start`. Group clients again if that may have changed them."""
        self.begun = [client for client in self.clients if client.steps_in(self.current_epoch)]
        if self.hooked:
            for client in self.begun:
                with client.turn():
                    client.module.on_train_epoch_start()
        if self.hooked or not self.current_epoch:
            self._stack()
            self._look()

    def on_train_epoch_end(self) -> None:
        """Call `on_train_epoch_end` of the active clients' modules, and step the learning-rate scheduler.

        Raises:
            ConfigError: A step has changed what it may only read.
        """
        if not self.observes:
            for step_of_all, _ in self.kinds:
                step_of_all.verify()
        for client in self.begun:
            if not client.error:
                with client.turn() if self.hooked else client.catch_failure():
                    client.module.on_train_epoch_end()
                client.progress.current_epoch += 1
        if scheduler := self.lr_schedulers():
            scheduler.step()  # type: ignore[union-attr]

    def _stack(self) -> None:
        """Replace the clients' weights and buffers by rows of the stacked tensors.

        Raises:
            ConfigError: A hook has replaced a parameter or buffer.
        """
        before, self.tensors = self.tensors, [dict(tensors_of(client.module.backbone)) for client in self.clients]
        for earlier, own in zip(before, self.tensors, strict=False):  # none before the first epoch
            if path := difference(earlier, own):
                raise ConfigError(f"a hook puts something else in the place of {path!r}")
        for name, stack in self.stacks.items():
            for own, place in zip(self.tensors, stack.unbind(), strict=True):
                if own[name].data_ptr() != place.data_ptr():
                    place.copy_(own[name].detach())
                    own[name].data = place

    def _look(self) -> None:
        """Group the clients that can be stacked with each other in their current state."""
        kinds: list[tuple[dict[str, Any], list[int], list[StepContents]]] = []
        for row, client in enumerate(self.clients):
            if client.steps_in(self.current_epoch):
                step = StepContents(ClientStep(client.module))
                shape = step.shape()
                for other, rows, steps in kinds:
                    if difference(shape, other) is None:
                        rows.append(row)
                        steps.append(step)
                        break
                else:
                    kinds.append((shape, [row], [step]))
        self.kinds = [
            (
                StackedStep(steps, [self.clients[row].random_states for row in rows]),
                {row: i for i, row in enumerate(rows)},
            )
            for _, rows, steps in kinds
        ]

    # --- Steps ---

    def on_after_batch_transfer(self, batch: StackedBatch, dataloader_idx: int) -> StackedBatch:
        """Prepare all batches at once; augment each client's batch with its own random numbers."""
        x = self.data.prepare(batch.x.flatten(0, 1)).unflatten(0, batch.x.shape[:2])
        if augment := self.data.augment:
            augmented = []
            for row, own in zip(batch.rows, x, strict=True):
                with self.clients[row].random_states.drawing():
                    augmented.append(augment(own))
            x = torch.stack(augmented)
        return StackedBatch(batch.rows, self.trainer.precision_plugin.convert_input(x), batch.y)

    def training_step(self, batch: StackedBatch, batch_idx: int) -> None:
        """Compute the losses of the clients in a batch, group by group."""
        self.parts = []
        for step_of_all, places in self.kinds:
            chosen = [i for i, row in enumerate(batch.rows) if row in places]
            if chosen:
                own = as_rows(chosen, batch.x.device)
                rows, x, y = [batch.rows[i] for i in chosen], batch.x[own], batch.y[own]
                tensors = self._of(rows)
                output = step_of_all(tensors, [places[row] for row in rows], x, y)
                self.parts.append((rows, tensors, output.loss))
                self._record(rows, output)
                if self.observes:
                    step_of_all.verify()
                    self._observe(rows, output, x, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compute gradients and step the optimizer, outside of the precision context as in a client's own fit."""
        optimizer = self.trainer.optimizers[0]
        for rows, tensors, loss in self.parts:
            self.manual_backward(loss.sum())
            self._set_gradients(rows, tensors)
            for row in rows:
                self.clients[row].progress.global_step += 1
        optimizer.step()
        optimizer.zero_grad()

    def _of(self, rows: list[int]) -> Tensors:
        """Return the stacked weights of some clients, as views if the rows are consecutive, and copies of buffers."""
        own, first = as_rows(rows, self.trainer.strategy.root_device), self.tensors[rows[0]]
        return {
            name: value[own].detach().requires_grad_() if first[name].requires_grad else value[own].clone()
            for name, value in self.stacks.items()
        }

    def _set_gradients(self, rows: list[int], tensors: Tensors) -> None:
        """Clip and set the gradients of the clients in these rows, and store the buffers that the step updated."""
        gradients = {name: value.grad for name, value in tensors.items() if value.grad is not None}
        clip(gradients, self.alone.gradient_clip_val or 0.0, self.alone.gradient_clip_algorithm or "norm")
        self.blocks.set_gradients(rows, gradients)
        for name, value in tensors.items():
            if not value.requires_grad:
                self.stacks[name][as_rows(rows, value.device)] = value

    def _record(self, rows: list[int], output: StepOutput) -> None:
        """Record the losses of a step in each client's module."""
        names = list(output.losses)
        values = torch.stack([at_least_float32(value.detach()) for value in output.losses.values()], dim=1)
        for row, own in zip(rows, values.unbind(), strict=True):
            self.clients[row].module.record(names, own)

    def _observe(self, rows: list[int], output: StepOutput, x: Tensor, y: Tensor) -> None:
        """Pass the step's outputs to `observe` of the clients' shared knowledge. Group clients again if it changed."""
        changed = False
        for i, row in enumerate(rows):
            module = self.clients[row].module
            features = None if output.features is None else output.features[i]
            step = Step(output.logits[i], y[i], features, x[i], module.backbone)
            held = contents(module.knowledge)
            written = versions(held)
            with self.clients[row].random_states.drawing():
                for piece in filter(attrgetter("observes"), module.pieces()):
                    piece.observe(step, self.current_epoch)
            now = contents(module.knowledge)
            changed |= difference(held, now) is not None or versions(now) != written
        if changed:
            self._look()


class StackedBatches:
    """One epoch of all clients' batches. Batches of the same size are stacked, larger sizes first.

    Each client's batches keep their order. A step takes all clients whose next batch has the largest size among the
    waiting ones: first full batches, then incomplete last batches, size by size.

    Args:
        fit: The fit. Its epoch determines the number of steps of each client.
    """

    def __init__(self, fit: StackedFit) -> None:
        self.fit = fit

    def __iter__(self) -> Iterator[StackedBatch]:
        epoch = self.fit.current_epoch
        stored = self.fit.clients[0].batches
        passes = [islice(client.batches.indices(), client.steps_in(epoch)) for client in self.fit.clients]
        waiting: dict[int, Tensor] = {}
        arrived = list(range(len(passes)))
        while True:
            for row in arrived:
                waiting.pop(row, None)
                if (index := next(passes[row], None)) is not None:
                    waiting[row] = index
            if not waiting:
                return
            sizes = {row: len(index) for row, index in sorted(waiting.items())}
            largest = max(sizes.values())
            arrived = [row for row in sizes if sizes[row] == largest]
            chosen = torch.stack([waiting[row] for row in arrived])
            yield StackedBatch(arrived, stored.x[chosen], stored.y[chosen])


def overrides_epoch_hooks(module: ClientModule) -> bool:
    """Return whether a client's module or a loss term overrides a hook at the start or end of an epoch."""
    kind, hooks = type(module), ("on_train_epoch_start", "on_train_epoch_end")
    if any(getattr(kind, hook) is not getattr(ClientModule, hook) for hook in hooks):
        return True
    return any(type(term).begin_epoch is not LossTerm.begin_epoch for term in module.terms())


def clip(gradients: Tensors, bound: float, by: str) -> None:
    """Clip each client's gradient in place, as Lightning does.

    Args:
        gradients: By parameter, `(n, ...)`.
        bound: The largest norm or value; 0 or less clips nothing.
        by: `norm` of all of a client's gradients together, or `value`.
    """
    if bound <= 0 or not gradients:
        return
    if by == "value":
        for gradient in gradients.values():
            gradient.clamp_(-bound, bound)
        return
    norms = torch.stack([torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()])
    factors = (bound / (torch.linalg.vector_norm(norms, dim=0) + 1e-6)).clamp(max=1.0)
    for gradient in gradients.values():
        gradient.mul_(factors.to(gradient.dtype).view(-1, *[1] * (gradient.ndim - 1)))
