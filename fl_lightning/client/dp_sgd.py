"""DP-SGD: training steps that are differentially private for each sample of a client.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: "Deep Learning with Differential Privacy", CCS 2016,
Algorithm 1. A step takes each sample with probability q (`PoissonBatches`), computes the gradient of each of them,
clips it to the norm C, and releases

    g = (Σ_i g_i min(1, C / |g_i|) + N(0, z² C² I)) / (q n)

The denominator is the expected batch size, not the actual one, which would reveal whether a sample is in the batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fl_lightning.client.hidden import HiddenSamples
from fl_lightning.client.losses import total_loss
from fl_lightning.client.module import ClientModule, LossTerm, Step, objective_weight
from fl_lightning.client.private_random import PrivateRandom
from fl_lightning.client.weights import trainable_parameters
from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.inputs import Inputs

MAX_BYTES = 1 << 28
"""Bytes of the gradients of single samples that are in memory at a time."""

Gradients = dict[str, Tensor]
"""Gradients by name of the parameter: `(...)`, or those of several samples, `(B, ...)`."""


@dataclass(frozen=True)
class DPSGD:
    """Options of DP-SGD.

    Args:
        clip: C, the norm to which the gradient of each sample is clipped, above 0. Infinity (`.inf`) clips nothing,
            for comparisons without noise.
        noise: z, the standard deviation of the noise, relative to `clip`, 0 or more. 0 gives no privacy.
        epsilon: Instead of `noise`: choose the smallest noise with which each client's epsilon is at most this number
            after it has taken part in all rounds.
        delta: δ of the guarantee, in (0, 1). It should be smaller than 1 / n of the largest client.

    Raises:
        ConfigError: An option is out of range, both or none of `noise` and `epsilon` are given, or there is noise
            without a clipping norm.
    """

    clip: float = 1.0
    noise: float | None = None
    epsilon: float | None = None
    delta: float = 1e-5

    def __post_init__(self) -> None:
        if self.clip != float("inf"):
            check_number("dp_sgd.clip", self.clip, "(0, inf)", "the gradient of a sample is clipped to this norm")
        check_number("dp_sgd.noise", self.noise, "[0, inf)")
        check_number("dp_sgd.epsilon", self.epsilon, "(0, inf)")
        check_number("dp_sgd.delta", self.delta, "(0, 1)")
        if (self.noise is None) == (self.epsilon is None):
            what = "neither noise nor epsilon is given" if self.noise is None else "both noise and epsilon are given"
            raise ConfigError(f"dp_sgd.noise: {what}. Give one of them, such as noise: 1.0")
        if self.clip == float("inf") and self.noise != 0:
            raise ConfigError("dp_sgd.clip: inf has no noise that hides a sample. Give a number, such as 1.0")


# --- Losses and gradients of single samples --------------------------------------------------------------------------


class SampleLosses(nn.Module):
    """The losses of a batch that depend on its samples: the objective's, and those of loss terms, by name.

    Args:
        module: The client's module.
        terms: The loss terms that read samples.
    """

    def __init__(self, module: ClientModule, terms: Sequence[LossTerm]) -> None:
        super().__init__()
        self.module = module
        self._terms = tuple(terms)  # they are parts of the module already

    def forward(self, x: Tensor | Inputs, y: Tensor) -> dict[str, Tensor]:
        """Return the losses of a batch. The objective's is its sum over the batch, divided by the batch's units."""
        module = self.module
        step, objective = module.step((x, y)), module.objective
        losses: dict[str, Tensor] = {}
        if weight := objective_weight(module.active_terms):
            mean = objective.loss(step.logits, y, "sum") / objective.units(y).clamp(min=1)
            losses[objective.term] = weight * mean
        return losses | {term.name: term(step) for term in self._terms}


def sample_gradients(
    losses: SampleLosses, parameters: Mapping[str, Tensor], x: Tensor | Inputs, y: Tensor
) -> tuple[Gradients, dict[str, Tensor]]:
    """Return the gradients of each sample, `(B, ...)`, and its losses, `(B,)`, computed for all samples at once.

    Args:
        losses: Computes the losses.
        parameters: The parameters by their names in the backbone.
        x: The inputs of the samples.
        y: Their targets.
    """
    named = x.items() if isinstance(x, Inputs) else ()
    tensors: Any = dict(named) if isinstance(x, Inputs) else x

    def loss_of_one(weights: dict[str, Tensor], inputs: Any, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        one = Inputs(x.like(inputs[name][None] for name, _ in named)) if isinstance(x, Inputs) else inputs[None]
        values = functional_call(losses, weights, (one, target[None]))
        return total_loss(values), values

    prefix = "module.backbone."
    weights = {f"{prefix}{name}": value.detach() for name, value in parameters.items()}
    of_all = vmap(grad(loss_of_one, has_aux=True), in_dims=(None, 0, 0), randomness="different")
    with sdpa_kernel(SDPBackend.MATH):  # vmap cannot batch the fused kernels of attention
        gradients, values = of_all(weights, tensors, y)
    return {name.removeprefix(prefix): value for name, value in gradients.items()}, values


def gradients_of_one(
    losses: SampleLosses, parameters: Mapping[str, Tensor], x: Tensor | Inputs, y: Tensor
) -> tuple[Gradients, dict[str, Tensor]]:
    """Return the same as `sample_gradients` for a batch of one sample, for networks that `torch.vmap` cannot batch."""
    values = losses(x, y)
    total = total_loss(values)
    found = torch.autograd.grad(total, [*parameters.values()], allow_unused=True, materialize_grads=True)
    gradients = {name: value[None] for name, value in zip(parameters, found, strict=True)}
    return gradients, {name: value.detach()[None] for name, value in values.items()}


def clipped_sum(gradients: Mapping[str, Tensor], clip: float) -> Gradients:
    """Return `Σ_i g_i min(1, C / |g_i|)`. The norm of a sample's gradient is that over all parameters.

    Args:
        gradients: The gradients of the samples by parameter, `(B, ...)`.
        clip: C.
    """
    squares = [value.reshape(len(value), -1).square().sum(dim=1) for value in gradients.values()]
    factors = (clip / torch.stack(squares).sum(dim=0).sqrt()).clamp(max=1)
    return {name: torch.tensordot(factors.to(value.dtype), value, dims=1) for name, value in gradients.items()}


def noisy_mean(total: Tensor, clip: float, noise: float, expected: int, random: PrivateRandom) -> Tensor:
    """Return `(total + N(0, z² C² I)) / expected` for one parameter.

    Args:
        total: The sum of the clipped gradients.
        clip: C.
        noise: z; 0 draws no noise.
        expected: The expected number of samples in a batch.
        random: Draws the noise.
    """
    return (total + noise * clip * random.normal(total) if noise else total) / expected


# --- The terms of the loss -------------------------------------------------------------------------------------------


def step_without_samples(module: ClientModule) -> Step:
    """Return a training step that has the network, but no samples. Any use of its samples raises an error."""
    hidden: Any = HiddenSamples()
    return Step(hidden, hidden, hidden, hidden, module.backbone)


def reads_samples(term: LossTerm, module: ClientModule) -> bool:
    """Return whether a loss term depends on the samples of a step. If not, it needs neither clipping nor noise.

    Args:
        term: A loss term of the module, after its `begin`.
        module: The client's module.
    """
    try:
        with torch.no_grad():
            term(step_without_samples(module))
    except Exception:  # whatever a term raises when it cannot read the samples
        return True
    return False


# --- A client's fit --------------------------------------------------------------------------------------------------


@dataclass
class PrivateGradients:
    """Computes the gradients of DP-SGD in a client's fit, in place of `compute_gradients`.

    The gradients of loss terms that depend on the weights only, such as FedProx's, are added after the noise.

    Args:
        clip: C, the clipping norm.
        noise: z, the noise multiplier.
        expected: The expected number of samples in a batch.
        random: Draws the noise.
        vectorised: Whether `torch.vmap` computes the gradients of several samples at once.
    """

    clip: float
    noise: float
    expected: int
    random: PrivateRandom
    vectorised: bool = True
    _last: tuple[int, int] | None = field(default=None, init=False)
    _losses: SampleLosses | None = field(default=None, init=False)
    _terms: list[LossTerm] = field(default_factory=list, init=False)

    def __call__(
        self, module: ClientModule, optimizer: torch.optim.Optimizer, batch: Any, number: int, options: L.Trainer
    ) -> Tensor:
        """Set the noisy gradients of a step, and return its loss: the sum over the samples, divided by `expected`.

        The arguments are those of `compute_gradients`. The batch may be empty.

        Raises:
            ConfigError: The optimizer asks for the gradients of a step twice, which would be two releases.
        """
        place = module.current_epoch, number
        if place == self._last:
            what = f"{type(optimizer).__name__} computes the gradients of a step several times"
            raise ConfigError(f"optimizer: {what}, and dp_sgd accounts for one. Use another, such as SGD or Adam")
        self._last = place
        if self._losses is None:
            reading = [term for term in module.active_terms if reads_samples(term, module)]
            self._terms = [term for term in module.active_terms if term not in reading]
            self._losses = SampleLosses(module, reading)
        with options.precision_plugin.train_step_context():
            losses = self._set_gradients(module, self._losses, *batch)
            without_samples = {term.name: term(step_without_samples(module)) for term in self._terms}
        if without_samples:
            total_loss(without_samples).backward()
        if options.gradient_clip_val:
            module.clip_gradients(optimizer)
        zero = torch.zeros((), device=module.device)
        recorded = {name: (losses | without_samples).get(name, zero) for name in module.loss_names}
        module.loss_record.add(recorded)
        return total_loss(recorded)

    def _set_gradients(
        self, module: ClientModule, losses: SampleLosses, x: Tensor | Inputs, y: Tensor
    ) -> dict[str, Tensor]:
        """Set the noisy gradients of the losses that depend on samples, and return these losses' means."""
        parameters: dict[str, Any] = dict(trainable_parameters(module.backbone))
        totals = {name: torch.zeros_like(value) for name, value in parameters.items()}
        means: dict[str, Tensor] = {}
        for gradients, values in self._parts(losses, parameters, x, y):
            for name, part in clipped_sum(gradients, self.clip).items():
                totals[name] += part
            for name, each in values.items():
                means[name] = means.get(name, 0) + each.detach().sum() / self.expected
        for name, parameter in parameters.items():
            parameter.grad = noisy_mean(totals[name], self.clip, self.noise, self.expected, self.random)
        return means

    def _parts(
        self, losses: SampleLosses, parameters: Mapping[str, Tensor], x: Tensor | Inputs, y: Tensor
    ) -> Iterator[tuple[Gradients, dict[str, Tensor]]]:
        """Yield the gradients and losses of some samples at a time, until all are done."""
        function, size = gradients_of_one, 1
        if self.vectorised:
            function, size = sample_gradients, max(1, MAX_BYTES // sum(each.nbytes for each in parameters.values()))
        for start in range(0, len(y), size):
            part = slice(start, start + size)
            yield function(losses, parameters, x[part], y[part])
            torch.clear_autocast_cache()  # it may contain tensors of vmap


def obstacle_to_vmap(module: ClientModule, batch: Any, context: Callable[[], Any]) -> str | None:
    """Return why `torch.vmap` cannot compute the gradients of several samples of a batch at once; None if it can.

    Args:
        module: A client's module in train mode, after `begin` of its loss terms. Its random numbers are drawn.
        batch: A batch of at least one sample, prepared.
        context: Returns the context of a training step.
    """
    if rnn := next((part for part in module.backbone.modules() if isinstance(part, nn.RNNBase)), None):
        return f"{type(rnn).__name__} is a recurrent layer"
    x, y = batch
    reading = [term for term in module.active_terms if reads_samples(term, module)]
    try:
        with warnings.catch_warnings(), context():
            warnings.simplefilter("error")  # vmap warns if it computes sample by sample, with more work than the loop
            two = x[:2], y[:2]
            sample_gradients(SampleLosses(module, reading), trainable_parameters(module.backbone), *two)
    except Exception as error:  # whatever the network or torch raises
        return str(error).split(". ")[0].strip().partition("\n")[0] or type(error).__name__
    finally:
        torch.clear_autocast_cache()
    return None
