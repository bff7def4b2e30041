"""The engine that trains a round's clients as one batched model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from fl_lightning.client.lightning_model import class_name
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError, check_number, one_line
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.seeding import RandomStates
from fl_lightning.core.task import Task, failed_result, is_interrupt
from fl_lightning.data.lazy import LazySamples
from fl_lightning.engines.round_fit import RoundEngine
from fl_lightning.engines.stacked_fit import StackedFit, in_rows
from fl_lightning.engines.stacked_slots import StackedSlots
from fl_lightning.engines.stacked_step import StackedStep
from fl_lightning.engines.step_contents import ClientStep, StepContents, difference, tensors_of
from fl_lightning.engines.trainer import obstacle_to_loop, quiet_lightning
from fl_lightning.engines.unread_result import UnreadResult, unread_result
from fl_lightning.engines.worker import Worker
from fl_lightning.models.mixed import networks_of

OPTIMIZERS = ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
"""Optimizers of torch that handle each parameter separately and skip those without a gradient."""

MAX_TENSOR = 1 << 25
"""Bytes below which a stacked tensor must stay on a CPU. Linux takes larger ones back in each step, which is slow."""

HOOKS = ("check_fit", "on_fit_start", "on_train_epoch_start", "on_train_epoch_end", "loss_names", "networks")
"""Parts of `ClientModule` that are used for each client separately or before round 1, and so may be overridden."""


class StackedEngine(RoundEngine):
    """Trains several clients at once, as one batched model. A group of clients is a batch of the round's `Trainer.fit`.

    Use it for small models, whose steps take more time in Python than in arithmetic, and for GPUs that one client does
    not keep busy. The results are the sequential engine's except for rounding. Each client has its own batches, random
    numbers, losses, optimizer state and BatchNorm statistics. If a client fails, the others continue. A step takes the
    clients whose next batches have the same size.

    It needs loss terms that change nothing, an optimizer of `OPTIMIZERS` and a model that `torch.vmap` can batch.
    Others are refused before round 1. If a problem appears later, clients are trained one after another, with a
    warning.

    Args:
        clients: Maximum number of clients that are stacked. Memory use grows with it. On a CPU, fewer are stacked if
            a weight of all of them would take 32 MiB. Results may depend on it by rounding.
        callbacks: Lightning callbacks of the round's `Trainer`, for which an epoch is a round and a batch is a group of
            clients.
        profiler: Lightning profiler of the round's `Trainer`, such as `SimpleProfiler`, with a file.

    Raises:
        ConfigError: `clients` is below 2.
    """

    def __init__(
        self, clients: int = 64, callbacks: list[Callback] | None = None, profiler: Profiler | None = None
    ) -> None:
        super().__init__(callbacks, profiler)
        check_number("engine.clients", clients, "[2, inf)", "use SequentialEngine for one client at a time")
        self.clients = clients
        self._slots: StackedSlots | None = None

    def check(self, worker: Worker) -> None:
        """Check that clients can be trained as one batched model, by trying a training step of two clients.

        Raises:
            ConfigError: Something cannot be stacked; the message says what and why.
        """
        super().check(worker)
        refuse_options(worker)
        clients = [worker.modules.build().train() for _ in range(2)]
        check_module(clients[0])
        for client in clients:
            begin_fit(worker, client)
        x, y = next(iter(worker.client_data.test_batches()))
        with worker.idle_trainer.precision_plugin.forward_context():
            check_steps(clients, x[:8], y[:8])

    def batches(self, worker: Worker, clients: Sequence[int]) -> list[list[int]]:
        """Return the ids of the clients in groups of at most `self.clients`: each group is a batch."""
        size = self._group_size(worker)
        return [list(clients[start : start + size]) for start in range(0, len(clients), size)]

    def run_batch(self, worker: Worker, arriving: Iterator[Task], batch: list[int]) -> Iterator[UnreadResult]:
        """Train the clients of a group together, and return an iterator over their results."""
        tasks = list(islice(arriving, len(batch)))
        return self._run_together(worker, tasks) if len(tasks) > 1 else self._run_one_by_one(worker, tasks)

    def _group_size(self, worker: Worker) -> int:
        """Return the maximum number of tasks in a group."""
        largest = max(parameter.nbytes for parameter in worker.template.backbone.parameters())
        fitting = (MAX_TENSOR - 1) // largest if worker.device.type == "cpu" else self.clients
        return min(self.clients, max(2, fitting), len(worker.data.shards))

    def close(self) -> None:
        """Release the trainer and the client modules."""
        super().close()
        self._slots = None

    def _run_one_by_one(self, worker: Worker, tasks: Iterable[Task]) -> Iterator[UnreadResult]:
        return (self.run_alone(worker, task) for task in tasks)

    def _run_together(self, worker: Worker, tasks: Sequence[Task]) -> Iterator[UnreadResult]:
        """Train the clients of several tasks of one round together, and return an iterator over their results."""
        fit = StackedFit(worker, self.trainer_for(worker), self._slots_for(worker, len(tasks)))
        failed = []
        for task in in_rows(worker, tasks):
            try:
                fit.start(task)
            except BaseException as error:
                failed.append(unread_result(task, failed_result(task, error)))
        try:
            fit.train()
        except BaseException as error:  # of no client in particular: one by one, each client reports its own error
            if is_interrupt(error):
                raise
            warnings.warn(f"StackedEngine: trained one after another: {first_sentence(error)}", stacklevel=2)
            return chain(failed, self._run_one_by_one(worker, [client.task for client in fit.clients]))
        rows = sorted(range(len(fit.clients)), key=lambda row: fit.clients[row].task.client)
        return chain(failed, map(fit.finish, rows))

    def _slots_for(self, worker: Worker, count: int) -> StackedSlots | None:
        """Return reusable client modules, if possible those of earlier rounds; None if modules cannot be reset."""
        if self._slots is None or self._slots.modules is not worker.modules or self._slots.count < count:
            first = worker.modules.new_slot()
            self._slots = StackedSlots(worker.modules, first, count) if first else None
        return self._slots


# --- Refusals ------------------------------------------------------------------------------------------------------


def refusal(what: str, why: str) -> ConfigError:
    """Return the error that says what cannot be trained as part of a batched model, and why."""
    return ConfigError(f"engine: StackedEngine cannot stack {what} ({why}); use SequentialEngine")


def refuse_options(worker: Worker) -> None:
    """Raise an error for options of a run with which clients cannot be trained as one batched model."""
    if odd := obstacle_to_loop(worker.idle_trainer):
        raise refusal(*odd)
    if worker.training.compile:
        raise refusal("compile", "a step of many clients is not the step that was compiled")
    if len(networks_of(worker.model)) > 1:
        raise refusal("several networks", "all clients of a batched model have the same")
    if worker.training.dp_sgd:
        raise refusal("dp_sgd", "gradients of single samples are clipped, not of a client's batch")
    if worker.training.mixing:
        raise refusal("mixup and cutmix", "each client draws its own mixtures")
    inputs = worker.data.data.x_train
    if isinstance(inputs, Inputs):
        raise refusal("several inputs", "its batches are one tensor")
    if isinstance(inputs, LazySamples) and inputs.draws:
        raise refusal("lazily read samples with random transforms", "each client's numbers are drawn as it reads")


def begin_fit(worker: Worker, client: ClientModule) -> None:
    """Begin the fit of a newly built client module, with initial shared knowledge."""
    classes = worker.data.data.num_classes
    client.context = FitContext(class_counts=torch.ones(worker.data.objective.stratum_count(classes)))
    client.trainer = worker.idle_trainer
    for piece in client.pieces():
        piece.load(piece.initial(classes))
    client.to(worker.device)
    with quiet_lightning(worker.shown):
        client.on_fit_start()
        client.on_train_epoch_start()


def check_module(module: ClientModule) -> None:
    """Check that a client module, its optimizer and its scheduler can be part of a batched model.

    A module cannot if it has training code of its own.
    """
    kind, find = type(module), inspect.getattr_static
    for name in dir(ClientModule):
        if not name.startswith("__") and name not in HOOKS and find(kind, name) is not find(ClientModule, name):
            raise refusal(kind.__name__, f"it has a {name} of its own")
    if module.trains_itself:
        raise refusal(class_name(module.backbone), "it is a LightningModule with a training step of its own")
    optimizer = module.optimizer_for(module.backbone.parameters())
    if type(optimizer) not in [getattr(torch.optim, name) for name in OPTIMIZERS]:
        raise refusal(f"optimizer {type(optimizer).__name__}", f"only torch's {', '.join(OPTIMIZERS)}")
    if module.scheduler_factory:
        schedule = module.scheduler_factory(optimizer)
        if not isinstance(schedule, LRScheduler):
            raise refusal(f"lr_scheduler {type(schedule).__name__}", "it is not stepped as those of torch are")


def check_steps(clients: Sequence[ClientModule], x: Tensor, y: Tensor) -> None:
    """Check that backbone and loss terms can train several clients in one call. An error names the part that cannot."""
    backbone = clients[0].backbone
    for part in backbone.modules():
        if isinstance(part, nn.RNNBase):
            raise refusal(type(backbone).__name__, f"torch.vmap cannot batch {type(part).__name__}, a recurrent layer")
    terms = [list(client.terms()) for client in clients]
    for number in range(-1, len(terms[0])):
        what = type(backbone).__name__ if number < 0 else f"loss term {terms[0][number].name!r}"
        for client, all_terms in zip(clients, terms, strict=True):
            client.loss_terms = nn.ModuleList(all_terms[max(number, 0) : number + 1])
        try:
            try_step(clients, x, y)
        except Exception as error:
            raise refusal(what, first_sentence(error)) from error


def try_step(clients: Sequence[ClientModule], x: Tensor, y: Tensor) -> None:
    """Try a training step of newly built clients as one batched model. Raise an error if it fails."""
    steps = [StepContents(ClientStep(client)) for client in clients]
    shapes = [step.shape() for step in steps]
    if path := difference(*shapes):
        kind = type(shapes[0].get(path)).__name__
        raise ConfigError(f"{path.removeprefix('client.')!r}, of type {kind}, is not the same for two new clients")
    random_states = {row: RandomStates(x.device) for row in range(len(clients))}
    step_of_all = StackedStep(dict(enumerate(steps)), x.device, random_states)
    tensors = [dict(tensors_of(client.backbone)) for client in clients]
    stacked = {
        name: torch.stack([one[name].detach() for one in tensors]).requires_grad_(value.requires_grad)
        for name, value in tensors[0].items()
    }
    copies = torch.stack([x] * len(clients)), torch.stack([y] * len(clients))
    step_of_all(stacked, list(range(len(clients))), *copies).loss.sum().backward()
    step_of_all.verify()


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message."""
    text = one_line(error) or type(error).__name__
    return text.split(". ")[0].rstrip(".")
