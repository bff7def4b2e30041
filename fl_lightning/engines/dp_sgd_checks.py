"""Checks, before round 1, that DP-SGD makes everything private that clients send (the option `dp_sgd`)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import HalfPrecision
from torch import Tensor, nn

from fl_lightning.algorithms.base import Algorithm
from fl_lightning.algorithms.protocols import Calibrates
from fl_lightning.client.dp_sgd import reads_samples
from fl_lightning.client.lightning_model import class_name
from fl_lightning.client.local_training import LocalTraining
from fl_lightning.client.module import ClientModule, FitContext, LossTerm
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.data import FederatedData, LoadedData
from fl_lightning.engines.trainer import obstacle_to_loop
from fl_lightning.models.layers import BATCH_NORMS

OPTIONS = {
    "mixup": "it mixes samples, so that no gradient belongs to one of them",
    "cutmix": "it mixes samples, so that no gradient belongs to one of them",
    "compile": "the compiled network cannot be called for single samples by torch.func",
    "client_callbacks": "they are for a fit of each client's own, and dp_sgd is applied by the local loop",
}
"""Options of local training that `dp_sgd` excludes, and why."""

TRIED = 8
"""Number of samples with which networks and loss terms are tried."""

TOLERANCE = 1e-4
"""Largest difference between values for a batch and for single samples, relative to the largest value: rounding."""


def check_dp_sgd(algorithm: Algorithm, module: ClientModule, batch: tuple[Any, Tensor]) -> None:
    """Check that the method and the network work with `dp_sgd`.

    Args:
        algorithm: The method.
        module: A client's module that is not used afterwards, on the training device, after `begin` of its terms.
        batch: A batch of prepared samples.

    Raises:
        ConfigError: Something does not work with `dp_sgd`, or would send values without noise.
    """
    check_method(algorithm, module)
    x, y = batch
    check_network(module, x[:TRIED])
    check_terms(module, (x[:TRIED], y[:TRIED]))


def refusal(key: str, why: str, fix: str = "Leave it or dp_sgd out.") -> ConfigError:
    """Return the error for an option that does not work with `dp_sgd`."""
    return ConfigError(f"{key}: it does not work with dp_sgd, because {why}. {fix}")


def check_dp_sgd_options(training: LocalTraining, trainer: L.Trainer, data: FederatedData) -> None:
    """Check that the options of local training and the data work with `dp_sgd`.

    Args:
        training: The options of local training.
        trainer: The trainer with the options of a client's fit.
        data: The data.

    Raises:
        ConfigError: An option or the dataset does not work with `dp_sgd`.
    """
    for key, why in OPTIONS.items():
        if getattr(training, key):
            raise refusal(key, why)
    if training.batch_sampler != "shuffle":
        raise refusal("batch_sampler", "each sample must have the same probability", "Set it to shuffle.")
    if training.class_weights == "balanced":
        why = "balanced weights reveal the client's number of samples of each class"
        raise refusal("class_weights", why, "Give a list of weights, which must not come from the clients' data.")
    if obstacle := obstacle_to_loop(trainer):
        raise refusal(*obstacle)
    if isinstance(trainer.precision_plugin, HalfPrecision):
        why = "norms and noise need float32"
        raise refusal("trainer.precision", why, "Use 32-true or bf16-mixed.")
    if data.data.cut is not LoadedData.cut:
        raise refusal("scenario.dataset", "its batches are not random samples, such as few-shot episodes")


def check_method(algorithm: Algorithm, module: ClientModule) -> None:
    """Raise an error if a method's clients use their samples in another way than in training steps."""
    name, use = type(algorithm).__name__, "Use a method such as FedAvg, FedProx or SCAFFOLD."
    if algorithm.knowledge:
        piece = algorithm.knowledge[0].name
        raise refusal("algorithm", f"{name} shares {piece!r}, which has no noise", use)
    if isinstance(algorithm, Calibrates):
        raise refusal("algorithm", f"{name} collects statistics of the clients' samples, which have no noise", use)
    if algorithm.validation:
        raise refusal("algorithm.validation", f"{name} evaluates models on a part of the client's samples", use)
    if not algorithm.only_steps_read_data:
        parts = algorithm.capabilities["only_steps_read_data"]
        own = [part for part in parts if getattr(type(algorithm), part) is not getattr(Algorithm, part)]
        why = f"{name} reads the client's samples outside of training steps, in {', '.join(own)}"
        raise refusal("algorithm", why, use)
    if type(module) is not ClientModule:
        raise refusal("algorithm", f"{name} has training steps of its own ({type(module).__name__})", use)
    if module.trains_itself:
        what = f"{class_name(module.backbone)}.training_step computes the loss of a batch, not that of each sample"
        raise refusal("model", what, "Use a network without a training_step.")


def check_network(module: ClientModule, x: Tensor | Inputs) -> None:
    """Raise an error if a network's output for a sample depends on other samples, or training changes its buffers.

    Args:
        module: The module. It is left in eval mode.
        x: A batch of inputs.
    """
    module.train()
    network, name = module.backbone, class_name(module.backbone)
    norms = (type(layer).__name__ for layer in network.modules() if isinstance(layer, BATCH_NORMS) and layer.training)
    if norm := next(norms, None):
        fix = "Use GroupNorm, such as model.norm: group, or freeze it in eval mode."
        raise refusal("model", f"{norm} mixes the samples of a batch, and its statistics have no noise", fix)
    before = {key: value.clone() for key, value in network.named_buffers()}
    with torch.no_grad():
        network(x)
    if changed := [key for key, value in network.named_buffers() if not torch.equal(before[key], value)]:
        fix = "Use a network without buffers that change."
        raise refusal("model", f"training changes the buffer {changed[0]!r}, which has no noise", fix)
    module.eval()
    with torch.no_grad():
        together, alone = network(x), torch.cat([network(one) for one in single_samples(x)])
    if not are_equal(together, alone):
        fix = "Use a network that computes each sample separately."
        raise refusal("model", f"the output of {name} for a sample depends on the other samples of the batch", fix)


def check_terms(module: ClientModule, batch: tuple[Any, Tensor]) -> None:
    """Raise an error if a loss term that reads samples is not the mean of the terms of single samples.

    The weights are changed at random before, because some terms vanish at the received weights, and the state that
    terms keep from round to round is that of a second round.

    Args:
        module: A module that is not used afterwards.
        batch: A batch of prepared samples.
    """
    x, y = batch
    for _ in range(2):
        module.context = FitContext()  # without the numbers of samples of each class
        for term in module.active_terms:
            try:
                term.begin(module)
            except ConfigError as error:
                why = f"the loss term {term.name!r} reads the number of samples of each class"
                raise refusal("algorithm", why, "Use another method.") from error
        change_weights(module.backbone)
        for term in module.active_terms:
            term.recall(term.remember(module))
    module.eval()
    for term in module.active_terms:
        term.train()
        if reads_samples(term, module):
            alone = [(one, target[None]) for one, target in zip(single_samples(x), y, strict=True)]
            values = [torch.stack([value_of(term, module, one) for one in alone]) for _ in range(2)]
            together = value_of(term, module, (x, y))
            if not are_equal(values[0].mean(), together) or not torch.equal(*values):
                why = f"the loss term {term.name!r} is not the mean of a loss of each sample"
                raise refusal("algorithm", why, "Use another method.")


def value_of(term: LossTerm, module: ClientModule, batch: tuple[Any, Tensor]) -> Tensor:
    """Return the value of a loss term on a batch."""
    return term(module.step(batch)).detach().double()


def change_weights(network: nn.Module) -> None:
    """Add random numbers to a network's weights, of a tenth of their size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in network.parameters():
            noise = torch.randn(value.shape, generator=generator).to(value)
            value.add_(0.1 * (value.abs().mean() + 0.01) * noise)


def single_samples(x: Tensor | Inputs) -> list[Any]:
    """Return the samples of a batch of inputs as batches of one sample each."""
    return [x[number : number + 1] for number in range(len(x))]


def are_equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal except for rounding."""
    return one.shape == other.shape and bool((one - other).abs().max() <= TOLERANCE * (1e-3 + other.abs().max()))
