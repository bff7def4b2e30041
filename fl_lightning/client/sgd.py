"""Check the optimizer of a fit, and return its learning rate, for methods that infer gradients from weight changes."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging

from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError


def check_equal_steps(module: ClientModule, method: str) -> None:
    """Check that all steps of a fit are alike: one optimizer step per batch, at one learning rate.

    The fit must also end with the weights of its last step.

    Args:
        module: The client's module.
        method: The method's name, for error messages.

    Raises:
        ConfigError: They are not. The message names the key.
    """
    trainer = module.trainer
    wrong = {
        f"lr_scheduler: {method} needs one learning rate per fit. Use round_lr_scheduler.": module.scheduler_factory,
        f"trainer.precision: 16-mixed skips steps that {method} counts. Use bf16-mixed.": (
            trainer.precision == "16-mixed"
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(message)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, WeightAveraging):
            what = f"{type(callback).__name__} averages weights, but {method} computes gradients from their changes"
            raise ConfigError(f"client_callbacks: {what}. Remove it.")
    check_step_per_batch(module, method)


def check_step_per_batch(module: ClientModule, method: str) -> None:
    """Check that a fit takes one optimizer step per batch.

    Args:
        module: The client's module.
        method: The method's name, for error messages.

    Raises:
        ConfigError: Gradients are accumulated over several batches.
    """
    if module.trainer.accumulate_grad_batches > 1:
        raise ConfigError(
            f"trainer.accumulate_grad_batches: {method} needs one step per batch. Use a larger batch_size."
        )


def check_one_rate(module: ClientModule, method: str) -> None:
    """Check that all parameters have one learning rate.

    Args:
        module: The client's module.
        method: The method's name, for error messages.

    Raises:
        ConfigError: `lr_factors` gives some parameters another one.
    """
    if module.lr_factors:
        raise ConfigError(f"lr_factors: {method} needs one learning rate for all parameters. Leave lr_factors out.")


def plain_sgd_rate(module: ClientModule, method: str) -> float:
    """Return the constant learning rate of a client's fit. Raise an error if the fit is not plain SGD.

    Args:
        module: The client's module.
        method: The method's name, for error messages.

    Raises:
        ConfigError: The fit is not plain SGD with one learning rate. The message names the key.
    """
    check_one_rate(module, method)
    groups = sgd_groups(module, method)
    rates = {float(group["lr"]) for group in groups}
    if len(rates) > 1 or any(group["momentum"] for group in groups):
        raise ConfigError(f"optimizer: {method} needs plain SGD with one learning rate. Set momentum 0.")
    check_equal_steps(module, method)
    if module.trainer.gradient_clip_val:
        raise ConfigError(
            f"trainer.gradient_clip_val: it would clip {method}'s correction with the gradient. Remove it."
        )
    return rates.pop()


def sgd_groups(module: ClientModule, method: str) -> list[dict[str, Any]]:
    """Return the parameter groups of a client's optimizer, which must be SGD.

    Args:
        module: The client's module.
        method: The method's name, for error messages.

    Raises:
        ConfigError: The optimizer is not SGD, or it maximises.
    """
    optimizer = module.optimizer_for(module.backbone.parameters())
    groups = optimizer.param_groups
    if type(optimizer) is not torch.optim.SGD or any(group["maximize"] for group in groups):
        kind = type(optimizer).__name__
        raise ConfigError(f"optimizer: {method} needs SGD, and this is {kind} or maximizes. Set optimizer SGD.")
    return groups
