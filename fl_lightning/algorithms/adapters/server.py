"""The part of an aggregator that computes with the products of the clients' factors: it keeps them during a round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.adapters.low_rank import (
    AdapterLayer,
    adapter_layers,
    belongs_to_a,
    belongs_to_b,
    stack_factors,
)
from fl_lightning.algorithms.adapters.ranks import cut_ranks, rank_of
from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.core.arguments import PartMixin
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State, weighted_mean


@dataclass
class Factors:
    """The adapters that clients uploaded in a round, and the weighted mean of all their other entries.

    The adapters are kept until the end of the round, because the server computes with their products. They are small.

    Args:
        uniform: Whether clients weigh equally, and not by their numbers of samples.
    """

    uniform: bool
    others: RunningMean = field(default_factory=RunningMean)
    adapters: list[Tensors] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, upload: Upload) -> None:
        """Add an upload."""
        model, weight = upload.message.section("model"), 1 if self.uniform else upload.n_samples
        adapters = {name: value for name, value in model.items() if belongs_to_a(name) or belongs_to_b(name)}
        self.others.add({name: value for name, value in model.items() if name not in adapters}, weight)
        self.adapters.append(adapters)
        self.weights.append(weight)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the factors."""
        return next(iter(self.adapters[0].values())).dtype

    def means(self) -> Tensors:
        """Return the weighted means of the factors, each by itself."""
        return weighted_mean(self.adapters, self.weights)

    def stacked(self, layer: AdapterLayer) -> tuple[Tensor, Tensor]:
        """Return a layer's factors whose product is the weighted mean of the clients' products (`stack_factors`)."""
        return stack_factors([(one[layer.b], one[layer.a]) for one in self.adapters], self.weights)


class KeepsFactors(PartMixin):
    """Mixin of aggregators that keep the clients' factors until the end of the round, and average the rest.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        ranks: Rank of each client's adapters by its id; the list repeats. By default that of the model.

    Attributes:
        layers: The layers with adapters. `find_layers` sets them.
    """

    weighting: Weighting = "samples"
    ranks: Sequence[int] = ()

    layers: tuple[AdapterLayer, ...] = field(default=(), init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sends_one_model = not self.ranks

    def find_layers(self, backbone: nn.Module) -> None:
        """Store the layers of the network that have adapters, and check the clients' ranks.

        Raises:
            ConfigError: There is no such layer, or a rank is below 1 or above that of the network's adapters.
        """
        self.layers = adapter_layers(backbone)
        largest = max(len(backbone.get_parameter(layer.a)) for layer in self.layers)
        for rank in self.ranks:
            if not 1 <= rank <= largest:
                fix = "Set the largest rank in the model, such as --model.adapter.r"
                raise ConfigError(f"algorithm.ranks: {rank} is not between 1 and {largest}, the adapters' rank. {fix}.")

    def model_for(self, state: State, client: int) -> Tensors:
        """Return the shared model, with adapters of the client's rank."""
        return cut_ranks(state["model"], rank_of(self.ranks, client))

    def begin(self, round: Round) -> Factors:
        """Return an empty set of factors.

        Raises:
            ConfigError: `find_layers` was not called, so that the factors would have no effect.
        """
        if not self.layers:
            fix = "Call its find_layers(backbone) in the initial_state of your method."
            raise ConfigError(f"algorithm.aggregator: {type(self).__name__} does not know the adapters. {fix}")
        return Factors(self.weighting == "uniform")

    def fold(self, folded: Factors, upload: Upload) -> None:
        """Keep a client's factors, and add its other entries to their mean."""
        folded.add(upload)
