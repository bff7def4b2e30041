"""FedBuff: asynchronous rounds, whose updates are added to the current model, weighted by their staleness.

Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: "Federated Learning with Buffered Asynchronous Aggregation",
AISTATS 2022, Algorithm 1.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from fl_lightning.algorithms.aggregators import Aggregator, ServerStep
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, parameter_names


def staleness_weight(staleness: int, exponent: float) -> float:
    """Return the weight of an update, `s(τ) = (1 + τ)^-a`.

    Args:
        staleness: τ, the number of server steps since the client got its model.
        exponent: a; the paper uses 1/2.
    """
    return float((1 + staleness) ** -exponent)


class Folded(NamedTuple):
    """A round in progress: the server's model, and what the inner aggregator folds uploads into."""

    current: Tensors
    inner: Any


class BufferedUpdates(ServerStep):
    """FedBuff's server: `w + η_s / K Σ_k s(τ_k) Δ_k`, with `Δ_k` the update of a client since it got its model.

    All clients have the same weight, whatever their number of samples. BatchNorm's statistics are averaged.

    Args:
        server_lr: Server learning rate η_s, above 0.
        exponent: a of the weights `s(τ) = (1 + τ)^-a`; 0 or more.
        inner: Computes the mean of the weighted updates instead, such as a robust rule.
    """

    accepts_stale = True

    def __init__(self, server_lr: float = 1.0, exponent: float = 0.5, inner: Aggregator | None = None) -> None:
        super().__init__(server_lr, "uniform", inner)
        check_number("algorithm.exponent", exponent, "[0, inf)", "the paper uses 0.5, and 0 is without weights")
        self.exponent = exponent

    def begin(self, round: Round) -> Folded:
        """Return the server's model, and an empty mean."""
        return Folded(round.before["model"], self.inner.begin(round))

    def fold(self, folded: Folded, upload: Upload) -> None:
        """Add the model that the server's becomes by a client's weighted update, `w + s(τ) Δ`, to the mean."""
        model, received, current = dict(upload.message.section("model")), upload.received, folded.current
        weight = staleness_weight(upload.staleness, self.exponent)
        if received is not None:
            for name in parameter_names(model, self.buffers):
                update = model[name].double() - received[name].double()
                model[name] = (current[name].double() + weight * update).to(model[name].dtype)
        message = Message.pack(upload.message.sections | {"model": model}, **upload.message.numbers)
        self.inner.fold(folded.inner, Upload(upload.client, message, current))

    def finish(self, folded: Folded, round: Round, knowledge: State) -> State:
        """Return the server's model after the step."""
        return super().finish(folded.inner, round, knowledge)


class FedBuff(Algorithm):
    """FedBuff: the server takes a step when the next K updates have arrived, however old their models are.

    It needs a `clock` and `round_policy: Buffered`, with K as `clients_per_round`. If all clients are equally fast, or
    without these options, it is FedAvg with `weighting: uniform`.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        server_lr: Server learning rate η_s.
        exponent: a; an update that is τ rounds old has the weight `(1 + τ)^-a`.
        aggregator: Computes the mean of the weighted updates instead, such as a robust rule.
    """

    server_lr: float = number(1.0, "(0, inf)", "1 adds the mean of the updates")
    exponent: float = number(0.5, "[0, inf)", "the paper uses 0.5, and 0 is without weights")

    corrects_aggregator = True
    search_space: ClassVar = {"server_lr": {"values": [0.1, 0.3, 1.0]}}

    def own_aggregator(self) -> Aggregator:
        """Return the server that adds weighted updates."""
        return BufferedUpdates(self.server_lr, self.exponent, self.aggregator)
