"""`RobustRule`: the common part of all robust rules, and `RobustMean`, to which a round's models are added."""

from __future__ import annotations

import math
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.robust.vectors import Vectors
from fl_lightning.core.arguments import PartMixin
from fl_lightning.core.errors import ConfigError, TooFewClients, check_number
from fl_lightning.core.flat_tensors import Tensors
from fl_lightning.core.message import Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, parameter_names

Tolerated = int | float
"""f, the number of attackers to tolerate: a number of clients, or a share below 1 of a round's clients, rounded up."""

CENTRE = "centre"
"""The section of the state with the last aggregated update, from which `CenteredClipping` clips."""


def check_tolerated(f: Tolerated | None) -> None:
    """Check the option `f` of a rule.

    Raises:
        ConfigError: It is below 0, or above 1 and not whole.
    """
    check_number("algorithm.aggregator.f", f, "[0, inf)")
    if f is None or (f >= 1 and f != int(f)):
        fix = "Give a number of clients, such as 2, or a share of them below 1, such as 0.2"
        raise ConfigError(f"algorithm.aggregator.f: {f} is neither. {fix}.")


def tolerated(f: Tolerated | None, clients: int) -> int:
    """Return f for a round of some clients: a share of them below 1 is rounded up. None is 0.

    Example:
        >>> tolerated(0.2, 11), tolerated(2, 11)
        (3, 2)
    """
    f = f or 0
    return int(f) if f >= 1 else math.ceil(f * clients - 1e-9)  # 0.07 x 100 is above 7


class RobustRule(PartMixin):
    """Mixin of aggregators that replace the mean of the clients' models by a robust rule.

    A rule is applied to two vectors of each client: its parameters, and its floating-point buffers (BatchNorm's
    statistics). So neither can hide an attack on the other, and large statistics do not outweigh the parameters. Of
    integer entries (`num_batches_tracked`), the largest is kept after `extremes` of the largest are left out.

    Attributes:
        f: Number of attackers that the rule assumes, or their share. Rules without this option do not need it.
        needs: a and b of the smallest number of models, `a f + b`.
        weighting: How clients weigh: most rules take all as equal, because a client can send any number of samples.
    """

    section = "algorithm.aggregator"
    is_mean = True
    buffers = frozenset[str]()
    weighting = "uniform"
    f: Tolerated | None = field(default=None, init=False)
    needs = (0, 1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.needs[0]:
            check_tolerated(self.f)

    def combine(self, vectors: Vectors, round: Round) -> Tensors:
        """Return the robust mean of the vectors, as a state dict of float64 entries.

        Args:
            vectors: The clients' vectors.
            round: The round, for its random numbers.
        """
        raise NotImplementedError

    def shortage(self, count: int, clients: int | None = None) -> str | None:
        """Return why a number of models is too small for the rule, or None if it is large enough.

        Args:
            count: Number of models.
            clients: Number of clients, of which `f` can be a share. By default that of the models.
        """
        clients = count if clients is None else clients
        (factor, more), f = self.needs, tolerated(self.f, clients)
        if count >= factor * f + more:
            return None
        name = type(self).__name__
        if self.f is None:
            return f"{name} needs at least {more} models a round, not {count}"
        given = f"{f}, {self.f:g} of {clients} clients," if 0 < self.f < 1 else f
        needed = f"{factor * f + more} models a round ({factor}f + {more})"
        return f"{name} with f {given} needs at least {needed}, not {count}"

    def require_uploads(self, count: int) -> None:
        """Check before round 1 that a round has enough clients.

        Raises:
            ConfigError: It does not.
        """
        if reason := self.shortage(count):
            fix = "Decrease f, or increase clients_per_round (n_com without a server)"
            raise ConfigError(f"algorithm.aggregator: {reason}. {fix}.")

    def extremes(self, count: int) -> int:
        """Return how many of the largest values of an integer entry are left out, of `count` clients' values.

        By default f. Rules without f leave out all above the (upper) median.
        """
        return (count - 1) // 2 if self.f is None else min(tolerated(self.f, count), count - 1)

    def begin(self, round: Round) -> RobustMean:
        """Return an empty robust mean."""
        return RobustMean(self, round, round.before.get("model", {}), round.before.get(CENTRE, {}))

    def fold(self, folded: RobustMean, upload: Upload) -> None:
        """Keep an uploaded model, and the weights that the clients received."""
        if upload.received is not None:
            folded.origin = upload.received
        folded.add(upload.message.section("model"), upload.n_samples if self.weighting == "samples" else 1)

    def finish(self, folded: RobustMean, round: Round, knowledge: State) -> State:
        """Return the robust mean of the round's models as the next model, and the state of the rule, if any."""
        model = folded.value()
        return {"model": model} | self.next_state(model, folded.origin)

    def next_state(self, model: Tensors, origin: Tensors) -> State:
        """Return the sections of the state that the rule keeps until the next round.

        Args:
            model: The new model.
            origin: The weights that the clients received.
        """
        return {}


class PreAggregator(RobustRule):
    """Mixin of rules that average groups of models, and apply another rule, `inner`, to the averages.

    Args:
        inner: The robust rule; by default one of the class `default_rule`.

    Raises:
        ConfigError: `inner` is no robust rule, or weights clients, which are not alike after averaging.
    """

    inner: Aggregator | None = None

    default_rule: ClassVar[type[Aggregator]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.inner = self.inner or self.default_rule()
        name, key = type(self).__name__, "algorithm.aggregator.inner"
        if not isinstance(self.inner, RobustRule):
            raise ConfigError(f"{key}: {type(self.inner).__name__} is no robust rule. Give {name} one, such as Median.")
        if (weighting := self.inner.weighting) != "uniform":
            raise ConfigError(f"{key}.weighting: {weighting} has no effect within {name}. Set it to uniform.")
        self.rule: RobustRule = self.inner

    def next_state(self, model: Tensors, origin: Tensors) -> State:
        """Return the inner rule's state for the next round."""
        return self.rule.next_state(model, origin)


class RobustMean:
    """Robust mean of state dicts that arrive one at a time. It is used like `RunningMean`, but keeps all of them.

    Args:
        rule: The rule.
        round: The round, for its number and random numbers.
        origin: The weights from which updates are measured. Missing entries are 0.
        centre: The state of `CenteredClipping`.
    """

    def __init__(self, rule: RobustRule, round: Round, origin: Tensors, centre: Tensors) -> None:
        self.rule, self.round, self.origin, self.centre = rule, round, origin, centre
        self._states: list[Tensors] = []
        self._weights: list[float] = []

    @property
    def count(self) -> int:
        """Number of state dicts that were added."""
        return len(self._states)

    def add(self, state: Tensors, weight: float) -> None:
        """Add a state dict. Only some rules use its weight.

        Raises:
            ValueError: The entries differ from those of the state dicts added before.
        """
        if self._states and state.keys() != self._states[0].keys():
            odd = sorted(state.keys() ^ self._states[0].keys())[0]
            raise ValueError(f"state dicts of different models: {odd!r} is in one of them only")
        self._states.append(state)
        self._weights.append(weight)

    def value(self) -> Tensors:
        """Return the robust mean of the state dicts added so far.

        Raises:
            TooFewClients: Too few were added for the rule.
        """
        if reason := self.rule.shortage(self.count):
            fix = "Decrease algorithm.aggregator.f, or increase clients_per_round and min_clients"
            raise TooFewClients(f"round {self.round.number}: {reason}. {fix}.")
        first = self._states[0]
        parameters = parameter_names(first, self.rule.buffers)
        statistics = [name for name, v in first.items() if v.is_floating_point() and name not in set(parameters)]
        means: Tensors = {}
        for names in filter(None, (parameters, statistics)):
            means |= self.rule.combine(self._vectors(names), self.round)
        return {name: means[name].to(v.dtype) if name in means else self._integer(name) for name, v in first.items()}

    def _vectors(self, names: list[str]) -> Vectors:
        weights = torch.tensor(self._weights, dtype=torch.float64)
        return Vectors(self._states, names, self.origin, self.centre, weights)

    def _integer(self, name: str) -> Tensor:
        values = torch.stack([state[name] for state in self._states])
        return values.sort(dim=0, descending=True).values[self.rule.extremes(len(values))].clone()


def find_rule(aggregator: Aggregator) -> RobustRule | None:
    """Return the outermost robust rule of an aggregator and the aggregators within it, or None."""
    return next((one for one in aggregator.chain() if isinstance(one, RobustRule)), None)
