"""Fine-tune a client's model outside of its Lightning fit, and freeze parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor, nn

from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import descend
from fl_lightning.models.layers import BATCH_NORMS


def trainable_names(backbone: nn.Module) -> frozenset[str]:
    """Return the names of a backbone's parameters with `requires_grad=True`."""
    return frozenset(name for name, parameter in backbone.named_parameters() if parameter.requires_grad)


def learn_only(module: ClientModule, learns: Callable[[str], bool], among: Collection[str]) -> None:
    """Freeze all parameters of a module's backbone except the chosen ones, and set the frozen layers to eval mode.

    Args:
        module: The module, changed in place and otherwise in train mode.
        learns: Returns whether the parameter or layer of this name is trained. A layer's name ends with a dot.
        among: Names of the parameters that may be trained. All others are frozen.
    """
    for name, parameter in module.backbone.named_parameters():
        parameter.requires_grad_(name in among and learns(name))
    module.train()
    for name, layer in module.backbone.named_modules():
        layer.training &= not name or learns(f"{name}.")


def fine_tune(
    module: ClientModule,
    batches: Iterable[tuple[Tensor, Tensor]],
    epochs: int,
    learns: Callable[[str], bool] = lambda name: True,
) -> None:
    """Train a client's module for some epochs outside its Lightning fit, on the objective's loss without loss terms.

    Args:
        module: The module, changed in place and left in eval mode.
        batches: The client's training data.
        epochs: Number of epochs, with batches shuffled in each and an optimizer like that of the fit.
        learns: Returns whether the parameter or layer of this name is trained. The rest is frozen and in eval mode.
    """
    x, y = (torch.cat(part) for part in zip(*batches, strict=True))
    trainable = trainable_names(module.backbone)
    learn_only(module, learns, trainable)
    has_batch_norm = any(isinstance(layer, BATCH_NORMS) and layer.training for layer in module.backbone.modules())
    min_samples = 2 if has_batch_norm else 1  # BatchNorm cannot train on one sample
    optimizer = module.optimizer_for(p for p in module.backbone.parameters() if p.requires_grad)
    with torch.enable_grad():
        for _ in range(epochs):
            for chosen in torch.randperm(len(y)).split(module.context.batch_size):
                if len(chosen) >= min_samples:
                    descend(optimizer, module.objective.loss(module(x[chosen]), y[chosen]))
    learn_only(module, lambda name: True, trainable)
    module.eval()
