"""Optional protocols for methods and aggregators, which follow one by defining its methods; they inherit nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Size, Tensor, nn

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.client_sampling import ClientSampler
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import OptimizerFactory, SchedulerFactory
from fl_lightning.core.message import Tensors
from fl_lightning.core.state_dicts import State
from fl_lightning.models import ModelFactory, NetworkFactory


@runtime_checkable
class Calibrates(Protocol):
    """A method that adjusts the global model to all clients' data before the model is evaluated, exported or saved.

    Training continues with the model as it was before.
    """

    def statistics(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Client: return statistics of its data, such as class means, for `calibrate`.

        Args:
            module: The global model, in eval mode, without gradients.
            batches: The client's training data in fixed order, without augmentation.
            num_classes: Number of classes, `C`.
        """
        ...

    def calibrate(self, module: ClientModule, statistics: Iterable[Tensors]) -> None:
        """Server: adjust the global model in place.

        Args:
            module: The global model, in eval mode, without gradients.
            statistics: The statistics of every client, in ascending client id. They arrive one at a time.
        """
        ...


@runtime_checkable
class ComparesGroups(Protocol):
    """A method that looks at the network of the first group in a `Mixed`, before that of another group is built."""

    def start_group(self, first: nn.Module) -> None:
        """Look at the first network. It is called on a copy of the method for each other group.

        Args:
            first: The network of the first group.
        """
        ...


@runtime_checkable
class SlicesModel(Protocol):
    """A method whose clients can exchange weights of other shapes than the global model's, such as slices of them."""

    def start_slices(self, shapes: Sequence[Mapping[str, Size]], groups: Sequence[int]) -> None:
        """Store the shapes of the clients' weights before round 1. Called only if clients have different networks.

        Args:
            shapes: The shapes of the weights that are sent, by name, of each network. The first is the global model's.
            groups: The number of each client's network, those of held-out clients last.

        Raises:
            ConfigError: The method cannot exchange weights of these shapes.
        """
        ...


@runtime_checkable
class SizesCohort(Protocol):
    """A method that chooses the number of participants of each round."""

    def cohort(self, state: State, participants: int, clients: int) -> int:
        """Server: return the number of clients that take part in the next round.

        Args:
            state: The state after the previous round.
            participants: `clients_per_round` of the experiment.
            clients: Number of clients of the experiment.
        """
        ...


@runtime_checkable
class SharesNetwork(Protocol):
    """A method whose clients share a network beside their own one, which is the experiment's `model`.

    Attributes:
        shared_model: Builds the shared network; by default it is a copy of the client's own.
    """

    shared_model: ModelFactory | NetworkFactory | None

    def client_module(
        self,
        backbone: nn.Module,
        optimizer: OptimizerFactory | None = None,
        lr_scheduler: SchedulerFactory | None = None,
        shared: nn.Module | None = None,
    ) -> ClientModule:
        """Return a client's LightningModule around its own network, `backbone`, and the shared one."""
        ...


@dataclass(frozen=True)
class RunPlan:
    """The options of a run that an aggregator gets before round 1, see `StartsRun`.

    Args:
        algorithm: The method.
        sampler: Chooses the participants of a round. It is started.
        clients_per_round: The number of participants that the sampler is asked for.
        rounds: Number of rounds.
        seed: The run's seed.
        is_remote: Whether the clients' data are on their own machines. Otherwise the run is a simulation.
    """

    algorithm: Algorithm
    sampler: ClientSampler
    clients_per_round: int
    rounds: int
    seed: int
    is_remote: bool


@runtime_checkable
class StartsRun(Protocol):
    """An aggregator that depends on options of the run, which it gets before round 1."""

    def start_run(self, plan: RunPlan) -> None:
        """Check the options of the run, and compute from them what the rounds need.

        Raises:
            ConfigError: The aggregator does not work with them.
        """
        ...
