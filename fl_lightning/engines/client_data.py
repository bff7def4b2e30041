"""The samples of each client, as batches on the training device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.client.local_work import LocalWork
from fl_lightning.client.private_random import PrivateRandom
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs, map_inputs
from fl_lightning.core.seeding import Stream, derive, generator
from fl_lightning.core.task import Task
from fl_lightning.data import FederatedData, LoadedData
from fl_lightning.data.lazy import Samples
from fl_lightning.data.loaders import Batches, PoissonBatches, ReadyBatches, send
from fl_lightning.engines.device import channels_last, resident
from fl_lightning.models.layers import BATCH_NORMS

MOST_OUTPUTS = 1 << 28
"""Largest number of outputs of a batch outside of training: 1 GiB in float32."""


class PrivateWork(NamedTuple):
    """The sampling rate and the number of steps of a client's fit with `dp_sgd`, on which its epsilon depends.

    Attributes:
        rate: The probability q that a step uses a sample.
        steps: Number of steps.
    """

    rate: float
    steps: int


@dataclass
class ClientData:
    """The samples of each client, as batches.

    Args:
        data: The dataset and the samples of each client.
        seed: The run's seed.
        algorithm: The method, which may hold out validation samples or drop incomplete batches.
        template: A client module. BatchNorm in it needs two samples per batch.
        trainer: Provides the device and the precision.
        training: The options of local training.
        channels_last: Whether images are in channels-last memory format.
        other: The samples for another network, whose copies on the training device are used.
    """

    data: FederatedData
    seed: int
    algorithm: Algorithm
    template: nn.Module
    trainer: L.Trainer
    training: LocalTraining
    channels_last: bool = False
    other: ClientData | None = None

    @property
    def batch_size(self) -> int:
        """Samples per training batch."""
        return self.training.batch_size

    @property
    def device(self) -> torch.device:
        """The device on which clients are trained."""
        return self.trainer.strategy.root_device

    @cached_property
    def min_batch(self) -> int:
        """Minimum size of an epoch's last batch. A smaller batch is dropped.

        It is `batch_size` if the algorithm needs full batches, 2 if the network has BatchNorm layers, and 1 otherwise.
        """
        if self.algorithm.drop_last:
            return self.batch_size
        return 2 if any(isinstance(module, BATCH_NORMS) for module in self.template.modules()) else 1

    @cached_property
    def eval_batch_size(self) -> int:
        """Number of samples per batch outside of training: fewer on a CPU, so that activations fit into its cache.

        Fewer samples, too, if their outputs are large, such as logits of each token for each word of a vocabulary.
        """
        data = self.data.data
        outputs = math.prod(self.data.objective.output_shape(data.y_train[:1], data.num_classes))
        return max(1, min(128 if self.device.type == "cpu" else 512, MOST_OUTPUTS // outputs))

    def split(self, client: int) -> tuple[Tensor, Tensor]:
        """Return the indices of a client's training samples, and of those held out for validation, both ascending.

        Raises:
            ConfigError: The samples are on the client's machine.
        """
        self._refuse_remote(client)
        index = self.data.shard(client).train
        back = len(index) - self.sample_count(client)
        if not back:
            return index, index[:0]
        order = torch.from_numpy(generator(self.seed, Stream.VALIDATION, client).permutation(len(index)))
        return index[order[back:].sort().values], index[order[:back].sort().values]

    def sample_count(self, client: int) -> int:
        """Return the number of training samples of a client, `N_k`."""
        return self.algorithm.training_samples(len(self.data.shard(client).train))

    def strata(self, client: int) -> Tensor:
        """Return the number of a client's training samples of each class. Without classes, all samples are one group.

        `Objective.strata` defines the groups.
        """
        self._refuse_remote(client)
        counts = self._strata[client].clone()  # a copy or file of a view would contain the whole table
        if self.algorithm.validation:
            strata = self.data.objective.strata(self.data.data.y_train[self.split(client)[1]])
            counts -= torch.bincount(strata, minlength=len(counts))
        return counts

    @cached_property
    def _strata(self) -> Tensor:
        """Number of samples by client and class, `(K, C)`, including those that are used for validation."""
        return torch.from_numpy(self.data.all_class_counts())

    def loss_weights(self, client: int) -> Tensor | None:
        """Return the weights of the classes in a client's training loss, `(C,)`; None if they are not weighted."""
        if self.training.class_weights is None:
            return None
        loaded = self.data.data
        if self.training.class_weights == "balanced":
            weights = self.data.objective.balanced_weights(loaded.y_train[self.split(client)[0]], loaded.num_classes)
        else:
            weights = torch.tensor(self.training.class_weights)
        return weights.to(self.device, torch.float32)

    def _frequencies(self, index: Tensor) -> Tensor:
        """Return a sampling weight for each sample of a client, `(n,)`, so that each class is drawn equally often."""
        strata = self.data.objective.strata(self.data.data.y_train[index])
        return 1 / torch.bincount(strata)[strata].double()

    def batches(self, task: Task) -> Batches:
        """Return a client's training batches for a task, in a random order that depends on the task's round.

        `ready_to_train` prepares and augments each batch.

        Raises:
            ConfigError: The client has too few samples for a batch.
        """
        data, index = self._stored, self.split(task.client)[0]
        seed = derive(self.seed, Stream.BATCHES, task.round, task.client)
        options: dict[str, Any] = {"token_labels": True} if self.data.objective.token_labels else {}
        if self.training.batch_sampler == "balanced":
            options["frequencies"] = self._frequencies(index)
        batches = data.cut(data.x_train, data.y_train, index, self.batch_size, seed, self.min_batch, **options)
        if not len(batches):
            of, fix = "a model with BatchNorm", "a model without it"
            if self.algorithm.drop_last:
                of, fix = "a method that drops incomplete ones (algorithm.preset)", "a smaller batch_size"
            raise ConfigError(
                f"{len(index)} training sample(s) make no batch for {of}, "
                f"which needs {self.min_batch}; use {fix}, or a larger scenario.partition.min_samples"
            )
        return batches

    def poisson_batches(self, task: Task, secret: bool = False) -> PoissonBatches:
        """Return a client's training batches for private training, with Poisson sampling (`dp_sgd`).

        Args:
            task: The client's task.
            secret: Whether the sampling is random, instead of derived from the seed, which the server knows.
        """
        data, seed = self._stored, derive(self.seed, Stream.BATCHES, task.round, task.client)
        random = PrivateRandom(torch.device("cpu"), None if secret else seed)
        index = self.split(task.client)[0]
        return PoissonBatches(data.x_train, data.y_train, index, self.batch_size, random.uniform, seed)

    def private_work(self, client: int) -> PrivateWork:
        """Return how often a client's fit with Poisson batches uses each of its samples."""
        n = max(1, self.sample_count(client))
        steps = LocalWork.under(self.trainer, math.ceil(n / self.batch_size)).steps
        return PrivateWork(min(self.batch_size, n) / n, steps)

    def training_batches(self, client: int) -> ReadyBatches:
        """Return a client's training data in fixed order, prepared but not augmented, on the training device.

        All batches of texts have one width, because some methods concatenate them.
        """
        return self._prepared(self._stored.x_train, self._stored.y_train, lambda: self.split(client)[0], True)

    def own_test_batches(self, client: int) -> ReadyBatches:
        """Return a client's own test split as prepared batches on the training device."""
        self._refuse_remote(client)
        return self.ordered_batches(self.data.shard(client).test)

    def test_batches(self) -> ReadyBatches:
        """Return the global test set as prepared batches on the training device."""
        return self._prepared(self._stored.x_test, self._stored.y_test, lambda: None)

    def prepared_batches(self, x: Samples, y: Tensor) -> ReadyBatches:
        """Return stored samples as prepared batches on the training device, in their order."""
        return self._prepared(x, y, lambda: None)

    def ordered_batches(self, index: Tensor | None, one_width: bool = True) -> ReadyBatches:
        """Return training samples, in the order of `index`, as prepared batches on the training device.

        Args:
            index: Indices of the training samples, in the order of the batches; None selects all training samples.
            one_width: Whether all batches of texts have one width, so that they can be concatenated.
        """
        return self._prepared(self._stored.x_train, self._stored.y_train, lambda: index, one_width)

    def prepare(self, x: Tensor | Inputs) -> Any:
        """Convert a stored batch to the network's input."""
        x = self.data.data.prepare(x)
        return map_inputs(channels_last, x) if self.channels_last else x

    def ready_to_train(self, x: Tensor | Inputs) -> Any:
        """Convert and augment the inputs of a batch for a training step. They are already on the training device."""
        convert = self.trainer.precision_plugin.convert_input
        x, augment = convert(x), self.data.data.augment  # `Trainer.fit` also converts a batch first
        if augment and self.data.data.augments_stored:
            return convert(self.prepare(augment(x)))
        x = self.prepare(x)
        return convert(augment(x) if augment else x)

    def _refuse_remote(self, client: int) -> None:
        if self.data.is_remote:
            raise ConfigError(f"client {client}: its data are on its own machine. Only FlowerEngine computes with them")

    @cached_property
    def _stored(self) -> LoadedData:
        """The dataset from which batches are taken, on the training device if it fits there."""
        return self.other._stored if self.other else resident(self.data.data, self.device)

    def _prepared(
        self, x: Samples, y: Tensor, index: Callable[[], Tensor | None], one_width: bool = False
    ) -> ReadyBatches:
        def ready(x: Any, y: Tensor) -> tuple[Any, Tensor]:
            convert = self.trainer.precision_plugin.convert_input
            return convert(self.prepare(send(x, self.device))), send(y, self.device)

        options: dict[str, Any] = {"token_labels": self.data.objective.token_labels, "one_width": one_width}
        return ReadyBatches(lambda: Batches(x, y, index(), self.eval_batch_size, **options), ready)
