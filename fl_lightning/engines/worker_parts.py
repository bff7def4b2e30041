"""The parts that all clients of a run share: the network, the data, the trainer, and the objects built from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from typing_extensions import Self

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.protocols import ComparesGroups, SharesNetwork
from fl_lightning.client.lightning_model import has_optimizer
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.client.module import ClientModule
from fl_lightning.compression import Compressor
from fl_lightning.compression.codec import Codec
from fl_lightning.core.errors import blame
from fl_lightning.core.fixed_tensors import (
    fixed_tensors,
    set_to_eval_mode,
    share,
    shared_memory,
    shared_tensors,
    use_memory,
)
from fl_lightning.core.message import Tensors
from fl_lightning.core.seeding import Stream, seed_everything
from fl_lightning.data import FederatedData
from fl_lightning.data.federated_data import sha256
from fl_lightning.data.lazy import first_samples
from fl_lightning.engines.checks import blame_network, check_tensors
from fl_lightning.engines.client_data import ClientData
from fl_lightning.engines.device import prefers_channels_last
from fl_lightning.engines.module_factory import ModuleFactory
from fl_lightning.engines.scorer import Scorer
from fl_lightning.engines.trainer import quiet_trainer
from fl_lightning.models import Mixed, NetworkFactory
from fl_lightning.models.mixed import networks_of
from fl_lightning.models.wrapped import build_network, initialise_lazy_layers


@dataclass
class WorkerParts:
    """The model, data and options that all tasks of a run share, and what is built from them when it is first needed.

    Args:
        seed: The run's seed.
        algorithm: The method.
        model: Builds the backbone.
        data: The dataset and the samples of each client.
        training: The options of local training.
        metrics: Metrics in addition to those of the objective, as `Evaluation.metrics` names them.
        positive_class: Of two classes, the one that binary metrics count as positive.
        own_machine: Whether this is a client's own machine. With `dp_sgd`, noise and batches are then random instead of
            seeded, and training losses are not sent.
        compression: Compresses the clients' updates.
        download_compression: Compresses the weights that clients receive.
        group: With a `Mixed`, the number of this worker's network. The run's worker has the first one, and builds a
            further worker for each of the others.

    Attributes:
        mapped: Fixed tensors of each group's network in memory that a run's processes share; empty in the main process.
    """

    seed: int
    algorithm: Algorithm
    model: NetworkFactory | Mixed
    data: FederatedData
    training: LocalTraining = LocalTraining()
    metrics: Sequence[str | dict[str, Any]] = ()
    positive_class: int = 1
    own_machine: bool = False
    compression: Compressor | None = None
    download_compression: Compressor | None = None
    group: int = 0
    mapped: dict[int, Tensors] = field(default_factory=dict, init=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return the constructor arguments for pickling, and the fixed tensors, which all processes then share.

        The receiving process builds everything else again.
        """
        mapped = {each.group: shared_memory(each.template) for each in self.groups}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init} | {"mapped": mapped}

    def for_client(self, client: int) -> Self:
        """Return the worker that runs a client's tasks: that of the client's group in a `Mixed`, otherwise this one."""
        return self.of_group(self.model.group_of(client, self.seed)) if isinstance(self.model, Mixed) else self

    def of_group(self, group: int) -> Self:
        """Return the worker of a group of clients in a `Mixed`. It is built when it is first needed."""
        if group not in self._groups:
            self._groups[group] = self._further_worker(group)
        return self._groups[group]

    @property
    def groups(self) -> list[Self]:
        """The workers of all groups of clients in a `Mixed`, otherwise this one alone."""
        return [self.of_group(number) for number in range(len(networks_of(self.model)))]

    def architecture_of(self, client: int) -> str | None:
        """Return the name of a client's architecture in a `Mixed`; None if all clients have the same network."""
        if not isinstance(self.model, Mixed) or len(self.model.models) == 1:
            return None
        return self.model.names[self.model.group_of(client, self.seed)]

    @cached_property
    def _groups(self) -> dict[int, Self]:
        return {self.group: self}

    def _further_worker(self, group: int) -> Self:
        """Return a worker for another group, which uses this one's trainer and its copy of the data on the device."""
        other = replace(self, group=group, algorithm=copy.copy(self.algorithm))
        if isinstance(other.algorithm, ComparesGroups):
            other.algorithm.start_group(self.template.backbone)
        other.mapped, other.idle_trainer, other.shown = self.mapped, self.idle_trainer, self.shown
        other.codec = self.codec
        other.algorithm.fixed = frozenset(other.fixed)
        data, template, images = self.client_data, other.template, other.uses_channels_last
        other.client_data = replace(
            data, algorithm=other.algorithm, template=template, channels_last=images, other=data
        )
        return other

    @cached_property
    def codec(self) -> Codec:
        """The object that compresses and restores the messages of all clients."""
        buffers = self.algorithm.aggregator.buffers
        how = (self.compression, self.download_compression)
        return Codec(self.seed, *how, lambda client: self.for_client(client).exchanged, buffers)

    @cached_property
    def exchanged(self) -> Tensors:
        """The entries of the network, with initial weights, that clients and server exchange."""
        entries = self.template.backbone.state_dict()
        return {name: entries[name] for name in self.algorithm.shared_names(self.template.backbone)}

    @property
    def fixed(self) -> Tensors:
        """The frozen parameters and buffers of frozen layers, the same on all clients with this network."""
        return shared_tensors(self.template.backbone)

    @cached_property
    def fixed_digest(self) -> str:
        """SHA-256 of all fixed tensors of a client's module, or an empty string if it has none.

        They are not in checkpoints, and each client's own machine reads its own, so this is how changes are found.
        """
        tensors = shared_memory(self.template).values()
        return sha256(tensors) if tensors else ""

    @cached_property
    def template(self) -> ClientModule:
        """LightningModule with the run's initial weights. Each task trains a copy of it."""
        seed_everything(self.seed, Stream.INITIAL_WEIGHTS, *[self.group] * (self.group > 0))
        with blame_network(self.model, self.group):
            backbone = self._build_network(self.factory)
        shared = {}
        if isinstance(self.algorithm, SharesNetwork) and self.algorithm.shared_model:
            with blame("algorithm.shared_model"):
                shared = {"shared": self._build_network(self.algorithm.shared_model)}
        optimizer = self.training.optimizer or (None if has_optimizer(backbone) else torch.optim.SGD)
        module = self.algorithm.client_module(backbone, optimizer, self.training.lr_scheduler, **shared)
        module.objective = self.data.objective
        module.lr_scheduler_interval = self.training.lr_scheduler_interval
        module.lr_factors = dict(self.training.lr_factors or {})
        module.mixing = self.training.mixing
        use_memory(module, self.mapped.get(self.group, {}))
        return module

    @property
    def factory(self) -> Callable[..., nn.Module]:
        """The function that builds the network."""
        return networks_of(self.model)[self.group]

    def _build_network(self, factory: NetworkFactory) -> nn.Module:
        loaded = self.data.data
        network = build_network(factory, loaded.in_shape, loaded.num_classes)
        initialise_lazy_layers(network, loaded.prepare(first_samples(loaded.x_train, 2)))
        check_tensors(network)
        if str(self.training.trainer.get("precision")) in ("64", "64-true"):
            network.double()  # as in training, so that the server's weights have one type from the start
        share(network, fixed_tensors(network))
        set_to_eval_mode(network)
        return network

    @property
    def client_callbacks(self) -> Sequence[Callback]:
        """Lightning callbacks for the clients' training. Each `Trainer.fit` gets copies of them."""
        return self.training.client_callbacks or ()

    @cached_property
    def idle_trainer(self) -> L.Trainer:
        """A trainer that is never fitted; it provides the device and the precision."""
        return quiet_trainer(self.training.trainer, self.shown, self.client_callbacks)

    @property
    def device(self) -> torch.device:
        """The device on which clients are trained."""
        return self.idle_trainer.strategy.root_device

    @cached_property
    def uses_channels_last(self) -> bool:
        """Whether images are stored in channels-last memory format."""
        if self.training.channels_last is not None:
            return self.training.channels_last
        return prefers_channels_last(self.template.backbone, self.device, str(self.idle_trainer.precision))

    @cached_property
    def shown(self) -> set[str]:
        """Set of warning texts that this process has shown while training clients, to show each text only once."""
        return set()

    @cached_property
    def client_data(self) -> ClientData:
        """The object that provides batches of each client's samples for training and evaluation."""
        return ClientData(
            self.data,
            self.seed,
            self.algorithm,
            self.template,
            self.idle_trainer,
            self.training,
            channels_last=self.uses_channels_last,
        )

    @cached_property
    def modules(self) -> ModuleFactory:
        """Factory that builds the LightningModule that a client trains."""
        return ModuleFactory(
            self.template,
            self.algorithm,
            self.client_data,
            self.idle_trainer,
            self.seed,
            compile=self.training.compile,
            codec=self.codec,
        )

    @cached_property
    def scorer(self) -> Scorer:
        """The object that evaluates models on the global test set and on clients' test splits."""
        return Scorer(self.client_data, self.metrics, self.positive_class)

    @property
    def keeps_optimizer(self) -> bool:
        """Whether clients' optimizer states are kept between rounds."""
        return (self.training.optimizer_state or self.algorithm.optimizer_state) == "kept"
