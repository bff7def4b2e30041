"""FedNova: clients' changes are divided by their number of effective steps before they are averaged.

Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, Eq. 8 and Section 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.algorithms.global_model.fedprox import Proximal
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.module import ClientModule
from fl_lightning.client.sgd import check_equal_steps, check_one_rate, sgd_groups
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State, parameter_names


def effective_steps(
    steps: int, lr: float, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, mu: float = 0.0
) -> float:
    """Return a client's number of effective SGD steps, `||a_k||₁`. Momentum and a proximal term change this number.

    A client's change of weights is `-η Σ_i a_i g_i` for its gradients `g_i`. `||a_k||₁` is the sum of the `a_i`: the
    number of steps for plain SGD, and `[τ - ρ (1 - ρ^τ) / (1 - ρ)] / (1 - ρ)` with momentum `ρ`.

    Args:
        steps: τ, the number of local steps.
        lr: η, the learning rate.
        momentum: ρ of SGD.
        dampening: SGD's dampening.
        nesterov: Whether the momentum is Nesterov's.
        mu: μ of a proximal term.
    """
    position = velocity = 0.0  # of SGD on a gradient of 1, in units of the learning rate
    for step in range(steps):
        gradient = 1 + mu * lr * position
        velocity = momentum * velocity + (1 - dampening if step else 1) * gradient
        position -= gradient + momentum * velocity if nesterov else velocity
    return -position


@dataclass
class NormalizedMeans:
    """Two weighted means of a round's uploads: one of the parameters, one of all other state dict entries.

    `n_k` are the clients' numbers of samples.

    Attributes:
        parameters: Mean of the parameters with weights `n_k / ||a_k||₁`.
        others: Mean of all other entries with weights `n_k`.
        samples: `Σ n_k`.
        steps: `Σ n_k ||a_k||₁`.
        samples_per_step: `Σ n_k / ||a_k||₁`.
    """

    parameters: RunningMean
    others: RunningMean
    samples: float = 0.0
    steps: float = 0.0
    samples_per_step: float = 0.0


class NormalizedAveraging(Aggregator):
    """Average the clients' changes, each divided by the client's number of effective steps (Eq. 8).

    The next model is `x - τ_eff Σ p_k d_k`, with the normalized changes `d_k = (x - y_k) / ||a_k||₁` and
    `τ_eff = Σ p_k ||a_k||₁`. BatchNorm's statistics are averaged as in FedAvg.
    """

    only_in = "FedNova"

    def begin(self, round: Round) -> NormalizedMeans:
        """Return two empty means: of the uploaded parameters, and of other entries such as BatchNorm's statistics."""
        return NormalizedMeans(RunningMean(), RunningMean())

    def fold(self, folded: NormalizedMeans, upload: Upload) -> None:
        """Add an upload to the two means.

        The weight of a client's parameters is its number of samples divided by its number of effective steps. The
        weight of its other entries is its number of samples.
        """
        model, n, steps = upload.message.section("model"), upload.n_samples, upload.message.numbers["effective_steps"]
        names = set(parameter_names(model, self.buffers))
        weight = n / steps if steps else 0.0  # a client without steps does not move the model
        folded.parameters.add({name: value for name, value in model.items() if name in names}, weight)
        folded.others.add({name: value for name, value in model.items() if name not in names}, n)
        folded.samples, folded.steps = folded.samples + n, folded.steps + n * steps
        folded.samples_per_step += weight

    def finish(self, folded: NormalizedMeans, round: Round, knowledge: State) -> State:
        """Return the next model, `x - τ_eff Σ p_k d_k` (Eq. 8): a step along the clients' mean normalized change."""
        scale = folded.steps / folded.samples * folded.samples_per_step / folded.samples
        model, old = folded.others.value(), round.before["model"]
        for name, mean in folded.parameters.value().items():
            start = old[name].double()
            model[name] = (start + scale * (mean.double() - start)).to(mean.dtype)
        return {"model": {name: model[name] for name in old}}


class EqualSteps(ClientModule):
    """A client's module whose steps must all be alike: SGD with one constant learning rate and one momentum."""

    def check_fit(self) -> None:
        """Raise an error if the number of effective steps cannot be computed for the settings of the fit."""
        check_equal_steps(self, "FedNova")
        check_one_rate(self, "FedNova")
        if len({(group["lr"], group["momentum"]) for group in sgd_groups(self, "FedNova")}) > 1:
            raise ConfigError("optimizer: FedNova needs one learning rate and one momentum for all parameters.")


class FedNova(Algorithm):
    """FedAvg for clients with unequal numbers of steps: their changes are normalized before they are averaged.

    If all participants take equally many steps, this is FedAvg except rounding. It needs SGD; momentum is allowed.

    Bytes a round, each participant: down `model`, up `model + 16`.

    Args:
        mu: μ of FedProx's term, 0 or more, which the normalization takes into account.
    """

    mu: float = 0.0
    aggregator: Aggregator = field(init=False)

    module_class = EqualSteps
    search_space: ClassVar = {"mu": {"values": [0.0, 0.001, 0.01, 0.1]}}  # FedAvg's and FedProx's clients

    def own_terms(self) -> list[LossTerm]:
        """Return the proximal term of FedProx."""
        return [Proximal(self.mu)]

    def own_aggregator(self) -> Aggregator:
        """Return the mean of the normalized changes."""
        return NormalizedAveraging()

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the trained weights and the number of effective steps, `||a_k||₁`."""
        message = super().upload(module, batches, n_samples, num_classes)
        group, *_ = sgd_groups(module, "FedNova")
        options = {name: group[name] for name in ("lr", "momentum", "dampening", "nesterov")}
        length = effective_steps(module.steps, mu=self.mu, **options)
        return message.plus(effective_steps=length)
