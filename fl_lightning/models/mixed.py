"""Clients with different networks: `Mixed`, and `ResizedFeatures`, which gives all of them features of one size."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn

from fl_lightning.core.arguments import ArgumentsMixin
from fl_lightning.core.errors import ConfigError, check_positive
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.models.base import Backbone, ModelFactory, NetworkFactory, options_with_head, with_encoder
from fl_lightning.models.wrapped import build_network, constructor_of


class Mixed(ArgumentsMixin):
    """Several networks in place of one: each client has one of them.

    The clients with the same network are a group. Methods that exchange no weights, such as FedProto, train all groups
    together. In a config:

        model:
          class_path: Mixed
          init_args:
            models: [CNN, LeNet, MobileNetV2]
            feature_dim: 128

    Args:
        models: The networks, each given as for `model`: the name of a class, or a `class_path` with its `init_args`.
        assign: Which client has which network: `round_robin` (client k has network k modulo their number), `random`
            (drawn for each client with the run's seed), or a list with the number of a network, from 0, for each
            client. The clients that `scenario.held_out_clients` takes out come last.
        feature_dim: Size of the features of all networks, see `ResizedFeatures`. By default networks stay as they are.

    Raises:
        ConfigError: There are no networks, `assign` is unknown or names another number, or `feature_dim` is below 1.

    Example:
        >>> from fl_lightning import CNN, MLP
        >>> mixed = Mixed([MLP, CNN], assign=[0, 0, 1])
        >>> " ".join(mixed.names[mixed.group_of(client, seed=0)] for client in range(3))
        'MLP MLP CNN'
    """

    def __init__(
        self,
        models: list[ModelFactory | NetworkFactory],
        assign: Literal["round_robin", "random"] | list[int] = "round_robin",
        feature_dim: int | None = None,
    ) -> None:
        if not models:
            raise ConfigError("model.models: the list is empty. Name at least one network.")
        if isinstance(assign, str) and assign not in ("round_robin", "random"):
            raise ConfigError(f"model.assign: {assign!r} is not round_robin, random or a list of numbers.")
        check_positive("model.", feature_dim=feature_dim)
        self.models, self.assign, self.feature_dim = list(models), assign, feature_dim
        for number in assign if not isinstance(assign, str) else ():
            if not 0 <= number < len(models):
                raise ConfigError(f"model.assign: {number} is no network. They are numbered 0 to {len(models) - 1}.")

    @property
    def factories(self) -> list[Callable[..., nn.Module]]:
        """The factories of the groups' networks, which have features of the size `feature_dim` if it is set."""
        if self.feature_dim is None:
            return list(self.models)
        return [partial(ResizedFeatures, model=model, feature_dim=self.feature_dim) for model in self.models]

    @property
    def names(self) -> list[str]:
        """The name of each group's architecture: that of its class, with the number of the network if it repeats."""
        names = [architecture(model) for model in self.models]
        count = Counter(names)
        return [name if count[name] == 1 else f"{name}_{number}" for number, name in enumerate(names)]

    def group_of(self, client: int, seed: int) -> int:
        """Return the number of a client's network.

        Args:
            client: The client's id.
            seed: The run's seed.
        """
        if self.assign == "round_robin":
            return client % len(self.models)
        if self.assign == "random":
            return int(generator(seed, Stream.NETWORKS, client).integers(len(self.models)))
        return self.assign[client]

    def check_clients(self, clients: int) -> None:
        """Raise an error if `assign` is a list of another length than the number of clients, with held-out ones.

        Raises:
            ConfigError: The length differs.
        """
        if not isinstance(self.assign, str) and len(self.assign) != clients:
            what = f"{len(self.assign)} numbers for {clients} clients, with those held out"
            raise ConfigError(f"model.assign: {what}. Give one for each, or use round_robin.")


class ResizedFeatures(Backbone):
    """A network's encoder, a linear layer to features of a chosen size, and one linear layer as the head.

    So networks with different encoders have features and heads of the same size. No ReLU follows the added layer, as
    none follows the projection of `Head`. HtFLlib, the field's library for clients with different networks, resizes
    features by average pooling (`nn.AdaptiveAvgPool1d`) instead, which has no weights but mixes unrelated features.

    Args:
        in_shape: Shape of one input.
        num_classes: Number of classes, `C`.
        model: The network, given as for `model`. Its own head and predictor are left out.
        feature_dim: Size `d` of a feature.

    Raises:
        ConfigError: The network does not name its head, or `feature_dim` is below 1.
    """

    def __init__(
        self, in_shape: tuple[int, ...], num_classes: int, model: ModelFactory | NetworkFactory, feature_dim: int
    ) -> None:
        check_positive("model.", feature_dim=feature_dim)
        network = build_network(model, in_shape, num_classes)
        if not isinstance(network, Backbone):
            what = f"feature_dim replaces the head, and {type(network).__name__} does not name its head"
            raise ConfigError(f"model: {what}. Did you mean {options_with_head(network)}?")
        encoder = nn.Sequential(with_encoder(network).encoder, nn.Linear(network.feature_dim, feature_dim))
        super().__init__(encoder, nn.Linear(feature_dim, num_classes), feature_dim)


def architecture(factory: Any) -> str:
    """Return the name of the network that a factory builds: that of its class, or of the module in a `FromModule`."""
    called = constructor_of(factory)
    keywords = factory.keywords if isinstance(factory, partial) else {}
    if "module" in keywords:
        return str(keywords["module"]).rpartition(".")[2]
    if isinstance(called, partial):
        return architecture(called.func)
    return called.__name__ if inspect.isclass(called) or inspect.isroutine(called) else type(called).__name__


def networks_of(model: Any) -> Sequence[Callable[..., nn.Module]]:
    """Return the factories of the networks of a config's `model`: those of a `Mixed`, or the only one."""
    return model.factories if isinstance(model, Mixed) else [model]
