"""Build client modules: with initial weights, with given weights, or as a client has them when a round begins."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import lightning as L
import torch

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.schedules import ScheduleStarts
from fl_lightning.client.weights import WeightMemory, load_weights, loads_plainly
from fl_lightning.compression.codec import Codec
from fl_lightning.core.fixed_tensors import copy_network, share, shared_tensors
from fl_lightning.core.message import Tensors
from fl_lightning.core.seeding import Stream, seed_everything
from fl_lightning.core.task import Task
from fl_lightning.engines.client_data import ClientData
from fl_lightning.engines.client_slot import ClientSlot, can_reset
from fl_lightning.engines.device import DeviceCopies, compile_backbone, has_doubles
from fl_lightning.engines.module_copier import ModuleCopier
from fl_lightning.engines.trainer import inference


class ModuleFactory:
    """Builds the modules that clients train, in the trainer's precision.

    Args:
        template: The client module with the run's initial weights; each module is a copy of it.
        algorithm: The method.
        clients: The samples of each client.
        trainer: Provides the device and the precision.
        seed: The run's seed.
        compile: Whether backbones are compiled, once for all clients and rounds.
        codec: Restores compressed downloads.
    """

    def __init__(
        self,
        template: ClientModule,
        algorithm: Algorithm,
        clients: ClientData,
        trainer: L.Trainer,
        seed: int,
        compile: bool = False,
        codec: Codec | None = None,
    ) -> None:
        self.template, self.algorithm, self.clients, self.trainer = template, algorithm, clients, trainer
        self.seed, self.compile, self.codec = seed, compile, codec or Codec()
        loads = algorithm.plain_exchange
        device = trainer.strategy.root_device
        self._built_on = device if loads else torch.device("cpu")
        self._overwrites = loads and loads_plainly(template.backbone)  # nothing reads the initial weights before
        averages = algorithm.only_averages and not self.codec.upload
        self._uploads_stay = averages and has_doubles(device)  # they are averaged there
        self._send = DeviceCopies(device)
        self._schedule_starts = ScheduleStarts(clients.training.lr_scheduler_rounds)

    def build(self, blank: Iterable[str] = ()) -> ClientModule:
        """Build a client module with the run's initial weights.

        Args:
            blank: Entries of the network that will be overwritten, and need no weights.
        """
        module = self._copier.build(f"backbone.{name}" for name in blank)
        if self.compile:
            compile_backbone(module.backbone)
        return module

    def build_shared(self, weights: Tensors) -> ClientModule:
        """Build a client module with the run's initial weights, and load these shared weights into it."""
        module = self.build()
        load_weights(module.backbone, weights)
        return module

    def new_slot(self) -> ClientSlot | None:
        """Build a client module that can be reset for each client; None if that is not possible."""
        module = self.build().to(self.trainer.strategy.root_device)
        shared = self.algorithm.shared_names(module.backbone)
        return ClientSlot(module, shared) if can_reset(module, shared) else None

    def receive(self, task: Task, slot: ClientSlot | None = None) -> ClientModule:
        """Load the server's message into a client's module, and return the module, ready to start the task.

        The global random states are seeded for the client and the round.

        Args:
            task: The task.
            slot: Holds the module of an earlier client, which is reset. By default a new module is built.
        """
        download = self.codec.restore_download(task.download, task.client)
        download = self._send(download) if self._built_on.type != "cpu" else download
        overwritten = download.section("model") if self._overwrites else {}
        # before seeding: compilation and copying may use random numbers
        module = slot.reset(overwritten.keys()) if slot else self.build(overwritten)
        seed_everything(self.seed, Stream.TRAINING, task.round, task.client)
        module.context = FitContext(
            task.round,
            task.lr_scale,
            self.clients.batch_size,
            task.new_client,
            class_counts=None if self.clients.training.dp_sgd else self.clients.strata(task.client),
            class_weights=self.clients.loss_weights(task.client),
            logs_losses=False,  # the engine reads them after the fit
            max_steps=task.max_steps,
            schedule_starts=self._schedule_starts,
        )
        module.optimizer_state = task.memory.get("optimizer", {})
        module.weight_memory = WeightMemory(slot.weights if slot else None, stays=self._uploads_stay)
        self.algorithm.receive(module, download, task.memory)
        if task.round and type(self.algorithm).prepare is not Algorithm.prepare:
            self._prepare(module, task)
        return module

    def personalize(self, task: Task) -> ClientModule:
        """Build a client's module for evaluation. The algorithm personalizes it with the client's training data."""
        module = self.receive(task)
        with inference(module, self.trainer):
            self.algorithm.personalize(module, self.clients.training_batches(task.client))
        return module

    def intact_slot(self) -> ClientSlot | None:
        """Return the reusable client module (`ClientSlot`); None if modules of this run cannot be reset.

        If the module is no longer intact (see `ClientSlot.is_intact`), a new one is built.
        """
        if self._slot and not self._slot.is_intact:
            del self._slot
        return self._slot

    @cached_property
    def _slot(self) -> ClientSlot | None:
        """The `ClientSlot` whose module is reset for each client; None if a new module must be built for each."""
        return self.new_slot()

    @cached_property
    def _copier(self) -> ModuleCopier[ClientModule]:
        module = self.trainer.precision_plugin.convert_module(copy_network(self.template))
        assert isinstance(module, ClientModule)
        module = module.to(self._built_on)
        share(module, shared_tensors(self.template))  # again, because conversion makes new tensors
        return ModuleCopier(module)

    def _prepare(self, module: ClientModule, task: Task) -> None:
        seed_everything(self.seed, Stream.PREPARATION, task.round, task.client)
        train, validation = (self.clients.ordered_batches(index) for index in self.clients.split(task.client))
        with inference(module, self.trainer), torch.enable_grad():
            self.algorithm.prepare(module, train, validation)
        module.train()
        seed_everything(self.seed, Stream.TRAINING, task.round, task.client)
