"""The training of several clients together. Their weights are rows of stacked tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.fit import ClientTrainerView, own_settings
from fl_lightning.client.local_work import LocalWork
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.client.schedules import OptionTable, WarmupCosine
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.round_progress import report_steps
from fl_lightning.core.seeding import RandomStates
from fl_lightning.core.state_dicts import stack
from fl_lightning.core.task import Task, failed_result
from fl_lightning.data.lazy import LazySamples
from fl_lightning.data.loaders import send
from fl_lightning.engines.stacked_client import Client
from fl_lightning.engines.stacked_optimizer import BlockOptimizer
from fl_lightning.engines.stacked_slots import StackedSlots
from fl_lightning.engines.stacked_step import StackedStep, as_rows
from fl_lightning.engines.step_contents import (
    ClientStep,
    StepContents,
    StepOutput,
    contents,
    difference,
    tensors_of,
    versions,
)
from fl_lightning.engines.unread_result import UnreadResult, unread_result
from fl_lightning.engines.worker import Worker


@dataclass
class StackedBatch:
    """The batches of several clients for one step, all of the same size.

    Args:
        rows: Ascending rows of their clients.
        x: The inputs, `(n, B, ...)`.
        y: The labels, `(n, B)`.
    """

    rows: list[int]
    x: Tensor
    y: Tensor


class StackedFit:
    """Trains several clients together as one batched model, each as a `Trainer` of its own would train it.

    The clients' weights and buffers are rows of stacked tensors. A step runs all clients that are in it as one batched
    model on views of the stacks, and one optimizer over the stacks then steps their rows.

    `start` the clients one by one, in the order of `in_rows`, then `train` them, and `finish` each.

    Args:
        worker: The worker.
        trainer: The trainer of the fit that all clients share.
        slots: Slots for the clients' modules, or None if their modules cannot be reset.

    Attributes:
        clients: The clients that have been started. Client i has row i of the stacks.
        kinds: The steps of the groups of clients whose steps differ only in the values of tensors.
        alike_slots: The slots, if all clients differ only in the weights of their backbones.
        draws: Whether training may draw random numbers.
    """

    def __init__(self, worker: Worker, trainer: L.Trainer, slots: StackedSlots | None) -> None:
        self.worker, self.trainer, self.slots = worker, trainer, slots
        self.alone, self.data, self.device = worker.idle_trainer, worker.data.data, worker.device
        self.clients: list[Client] = []
        self.kinds: list[StackedStep] = []
        self.epoch = 0
        self.alike_slots = slots if slots and differ_in_weights_only(worker) else None
        self.reads = isinstance(self.data.x_train, LazySamples)
        self.draws = not self.alike_slots or self.alike_slots.draws or self.data.augment is not None

    def start(self, task: Task) -> None:
        """Build a client's module, start its fit, and give the client the next row of the stacked weights.

        If this fails, the row is for the next client.
        """
        slot = self.slots.slot(len(self.clients)) if self.slots else None
        module = self.worker.modules.receive(task, slot=slot)
        if slot is None:  # newly built
            module.to(self.device).train()
        tensors = self.clients[0].tensors if self.alike_slots and self.clients else dict(tensors_of(module.backbone))
        batches = self.worker.client_data.batches(task)
        work = LocalWork.under(self.alone, len(batches), task.max_steps)
        module.trainer = progress = ClientTrainerView(self.trainer, self.alone, work)  # type: ignore[assignment]
        with own_settings():
            module.on_fit_start()
        only_copied = self.worker.algorithm.plain_exchange and not task.evaluates
        random_states = RandomStates(self.device) if self.draws or not only_copied else None  # which takes time
        self.clients.append(Client(task, slot, module, tensors, batches, work, progress, random_states))

    def train(self) -> None:
        """Train the clients that were added with `start`. The error of a client that fails is stored, not raised.

        Raises:
            ConfigError: The clients' steps cannot be stacked.
        """
        if not self.clients:
            return
        done, total = 0, sum(client.work.steps for client in self.clients)
        with own_settings():
            self._prepare()
            for epoch in range(self.epochs):
                self._begin_epoch(epoch)
                for batch in self._batches():
                    self._step(batch)
                    done += len(batch.rows)
                    report_steps(done, total, len(self.clients))
                    if self.trainer.received_sigterm:
                        raise SIGTERMException
                self._end_epoch()

    def finish(self, row: int) -> UnreadResult:
        """Return the result of a client after its training."""
        client, worker = self.clients[row], self.worker
        if client.slot:
            client.slot.check_weights()
        if not client.error:
            with client.turn():
                state = self.blocks.state_of(row) if worker.keeps_optimizer else {}
                return worker.finish(client.task, client.module, state)
        assert client.error
        return unread_result(client.task, failed_result(client.task, client.error))

    # --- Epochs ---

    def _prepare(self) -> None:
        """Stack the clients' weights, and build one optimizer for all clients, with their learning-rate schedules."""
        first, modules = self.clients[0].module, [client.module for client in self.clients]
        self.epochs = max(client.work.epochs for client in self.clients)
        self.observes = any(piece.observes for module in modules for piece in module.pieces())
        self.hooked = any(overrides_epoch_hooks(module) for module in modules)
        self.checks_each_step = self.observes or self.data.augment is not None  # which draw random numbers in between
        with torch.no_grad():
            self.stacks = self.slots.stacks if self.slots else stack([client.tensors for client in self.clients])
        states = [module.optimizer_state for module in modules]
        self.blocks = BlockOptimizer(first, self.stacks, states, self._option_tables())

    def _option_tables(self) -> list[OptionTable] | None:
        """Return each client's optimizer options after each step of its learning-rate scheduler, if there is one."""
        if self.clients[0].module.scheduler_factory is None:
            return None
        tables: dict[int, OptionTable] = {}  # by number of steps, if the schedule depends on it
        chosen = []
        for client in self.clients:
            module = client.module
            optimizer = module.optimizer_for(module.backbone.parameters())
            schedule = module.schedule_for(optimizer)
            depends = isinstance(schedule, WarmupCosine) or module.context.schedule_starts.rounds > 1
            length = client.work.length(module.lr_scheduler_interval) if depends else 0
            chosen.append(tables.setdefault(length, OptionTable(optimizer, schedule)))
        return chosen

    def _begin_epoch(self, epoch: int) -> None:
        """Begin an epoch: call the active clients' epoch-start hooks, and group clients that train as one batch.

        Clients are grouped in the first epoch, and again after hooks, which may have changed the clients' steps.
        """
        self.epoch = epoch
        self.begun = [client for client in self.clients if client.steps_in(self.epoch)]
        if self.hooked:
            for client in self.begun:
                with client.turn():
                    client.module.on_train_epoch_start()
        if self.hooked or not self.epoch:
            self._group()

    def _end_epoch(self) -> None:
        """Call `on_train_epoch_end` of the active clients' modules.

        Raises:
            ConfigError: A step has changed what it may only read.
        """
        if not self.checks_each_step and (self.hooked or self.epoch == self.epochs - 1):
            for step_of_all in self.kinds:
                step_of_all.verify()
        for client in self.begun:
            if not client.error:
                with client.turn() if self.hooked else client.catch_failure():
                    client.module.on_train_epoch_end()
                client.progress.current_epoch += 1

    def _group(self) -> None:
        """Group the clients so that each group can be trained as one batched model."""
        if self.alike_slots:
            step = self.alike_slots.step()
            step.random_states = self._random_states(range(len(self.clients))) if self.draws else {}
            step.watch()
            self.kinds = [step]
        else:
            self._stack()
            self._group_by_module()

    def _stack(self) -> None:
        """Move the clients' weights and buffers to the rows of the stacked tensors.

        Raises:
            ConfigError: A hook has replaced a parameter or buffer.
        """
        for row, client in enumerate(self.clients):
            if path := difference(client.tensors, dict(tensors_of(client.module.backbone))):
                raise ConfigError(f"a hook puts something else in the place of {path!r}")
            for name, rows in self.stacks.items():
                own, place = client.tensors[name], rows[row]
                if own.data_ptr() != place.data_ptr():
                    own.data = place.copy_(own.detach())

    def _group_by_module(self) -> None:
        """Group this epoch's clients by module. The modules of a group differ only in the values of tensors."""
        kinds: list[tuple[dict[str, Any], dict[int, StepContents]]] = []
        for row, client in enumerate(self.clients):
            if client.steps_in(self.epoch):
                step = StepContents(ClientStep(client.module))
                shape = step.shape()
                for other, steps in kinds:
                    if difference(shape, other) is None:
                        steps[row] = step
                        break
                else:
                    kinds.append((shape, {row: step}))
        self.kinds = [StackedStep(steps, self.device, self._random_states(steps)) for _, steps in kinds]

    def _random_states(self, rows: Iterable[int]) -> dict[int, RandomStates]:
        """Return the stored random states of some clients. Clients without random states are left out.

        `rows` and the keys of the result are the clients' rows in the stacked tensors.
        """
        return {row: state for row in rows if (state := self.clients[row].random_states)}

    # --- Steps ---

    def _batches(self) -> Iterator[StackedBatch]:
        """Yield the current epoch's batches, of several clients at a time. Each client's batches keep their order.

        A step takes all clients whose next batch has the largest size among the waiting ones: first full batches, then
        incomplete last batches, size by size.
        """
        stored: Any = self.clients[0].batches
        passes = [islice(client.batches.indices(), client.steps_in(self.epoch)) for client in self.clients]
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
            x = (
                stored.x.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)
                if self.reads
                else stored.x[chosen]
            )
            yield StackedBatch(arrived, x, stored.y[chosen])

    def _step(self, batch: StackedBatch) -> None:
        """Run one training step for each client that has samples in `batch`."""
        x, y = send(batch.x, self.device), send(batch.y, self.device)
        x, parts = self._prepared(batch.rows, x), []
        with self.alone.precision_plugin.train_step_context():
            for step_of_all in self.kinds:
                chosen = [i for i, row in enumerate(batch.rows) if row in step_of_all.numbers]
                if chosen:
                    own, rows = as_rows(chosen, self.device), [batch.rows[i] for i in chosen]
                    parts.append(self._forward(step_of_all, StackedBatch(rows, x[own], y[own])))
        for *_, loss in parts:  # outside of the precision context, as in a client's own fit
            loss.sum().backward()
        for rows, tensors, _ in parts:  # only now: this writes buffers to the tensor that all weights are views of
            self._set_gradients(rows, tensors)
        by_step = self.clients[0].module.lr_scheduler_interval == "step"
        self.blocks.step([client.progress.global_step if by_step else self.epoch for client in self.clients])
        for row in batch.rows:
            self.clients[row].progress.global_step += 1

    def _prepared(self, rows: list[int], x: Tensor) -> Tensor:
        """Return the network's inputs for several clients' batches, augmented with each client's own random numbers."""
        convert, shape = self.alone.precision_plugin.convert_input, x.shape[:2]
        x = convert(x)
        if self.data.augments_stored:
            x = self._augmented(rows, x)
        x = self.data.prepare(x.flatten(0, 1)).unflatten(0, shape)
        if not self.data.augments_stored:
            x = self._augmented(rows, x)
        return convert(x)

    def _augmented(self, rows: list[int], x: Tensor) -> Tensor:
        """Return several clients' batches with random changes, for which each client has its own random numbers."""
        if not (augment := self.data.augment):
            return x
        augmented = []
        for row, own in zip(rows, x, strict=True):
            with self.clients[row].drawing():
                augmented.append(augment(own))
        return torch.stack(augmented)

    def _forward(self, step_of_all: StackedStep, batch: StackedBatch) -> tuple[list[int], Tensors, Tensor]:
        """Compute the training loss of each client in `batch`.

        Returns:
            The clients' rows, the weights and buffers that the step used, and the loss of each client.
        """
        rows, tensors = batch.rows, self._of(batch.rows)
        if self.checks_each_step:
            step_of_all.watch()
        output = step_of_all(tensors, rows, batch.x, batch.y)
        self._record(rows, output)
        if self.checks_each_step:
            step_of_all.verify()
        if self.observes:
            self._observe(output, batch)
        return rows, tensors, output.loss

    def _of(self, rows: list[int]) -> Tensors:
        """Return the weights and buffers of some clients, by name, stacked with one row per client.

        Trainable weights are views of the stacked tensors if the rows are consecutive. All other tensors are copies.
        """
        own, first = as_rows(rows, self.device), self.clients[rows[0]].tensors
        return {
            name: value[own].detach().requires_grad_() if first[name].requires_grad else value[own].clone()
            for name, value in self.stacks.items()
        }

    def _set_gradients(self, rows: list[int], tensors: Tensors) -> None:
        """Clip some clients' gradients, pass them to the optimizer, and store these clients' new buffers.

        Args:
            rows: The rows of the clients in the stacked tensors.
            tensors: The weights, with gradients, and the buffers of these clients after the backward pass.
        """
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
            self.clients[row].module.loss_record.add_values(names, own)

    def _observe(self, output: StepOutput, batch: StackedBatch) -> None:
        """Let each client's module observe the outputs of a step, for example to update class prototypes.

        If this changes the `knowledge` of a module, the clients are grouped again.
        """
        changed = False
        for i, row in enumerate(batch.rows):
            module = self.clients[row].module
            features = None if output.features is None else output.features[i]
            step = Step(output.logits[i], batch.y[i], features, batch.x[i], module.backbone)
            held = contents(module.knowledge)
            written = versions(held)
            with self.clients[row].drawing():
                for piece in filter(attrgetter("observes"), module.pieces()):
                    piece.observe(step, self.epoch)
            now = contents(module.knowledge)
            changed |= difference(held, now) is not None or versions(now) != written
        if changed:
            self._group_by_module()


def differ_in_weights_only(worker: Worker) -> bool:
    """Return whether clients run the same training step in every round, only with different network weights.

    Loss terms, shared knowledge and class weights are further tensors, and a method may change a module before its
    training.
    """
    algorithm, module = worker.algorithm, worker.template
    if worker.training.class_weights is not None:
        return False
    unchanged = algorithm.plain_exchange and type(algorithm).prepare is Algorithm.prepare
    return unchanged and type(module) is ClientModule and not (len(module.loss_terms) or len(module.knowledge))


def in_rows(worker: Worker, tasks: Sequence[Task]) -> list[Task]:
    """Sort tasks in the order of their clients' rows in the stacked tensors: those with the most samples first.

    Clients with the most steps then come first, so that active clients stay consecutive rows, which are views of the
    stacks. Clients with equal numbers of samples are neighbours, because their batches always have the same size.
    """
    return sorted(tasks, key=lambda task: (-worker.client_data.sample_count(task.client), task.client))


def overrides_epoch_hooks(module: ClientModule) -> bool:
    """Return whether a client's module or a loss term overrides a hook at the start or end of an epoch."""
    kind, hooks = type(module), ("on_train_epoch_start", "on_train_epoch_end")
    if any(getattr(kind, hook) is not getattr(ClientModule, hook) for hook in hooks):
        return True
    return any(type(term).begin_epoch is not LossTerm.begin_epoch for term in module.terms())


def clip(gradients: Tensors, bound: float, by: str) -> None:
    """Clip each client's gradient in place, as Lightning does.

    Args:
        gradients: The gradients by parameter name, `(n, ...)`.
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
