"""Train a user's LightningModule as the clients' model, with its own training step, optimizer, hooks and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from fl_lightning.client.distributed import trainer_of
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.inputs import Inputs
from fl_lightning.models.base import tapped
from fl_lightning.models.wrapped import FromModule

Outputs = tuple[Tensor | None, Tensor]
"""Features (None if the model does not name its head) and logits."""

HOOKS = (
    *("setup", "teardown", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start"),
    *("on_train_epoch_end", "on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_before_zero_grad"),
)
"""Hooks of a LightningModule that are called in a client's fit."""

UNSUPPORTED = (
    *("optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "backward"),
    *("configure_callbacks", "configure_model", "configure_sharded_model"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
"""Methods of a LightningModule that change its training and are not called in a client's fit."""


def users_module(backbone: nn.Module) -> nn.Module:
    """Return the user's own module if the backbone is its wrapper `FromModule`; otherwise return the backbone."""
    return backbone.network if isinstance(backbone, FromModule) else backbone


def class_name(backbone: nn.Module) -> str:
    """Return the class name of the user's module that a backbone wraps, or of the backbone itself."""
    return type(users_module(backbone)).__name__


def overrides(backbone: nn.Module, name: str) -> bool:
    """Return whether the user's module is a LightningModule that overrides a method."""
    network = users_module(backbone)
    return isinstance(network, L.LightningModule) and getattr(type(network), name) is not getattr(
        L.LightningModule, name
    )


def trains_itself(backbone: nn.Module) -> bool:
    """Return whether the user's module is a LightningModule with a training step."""
    return overrides(backbone, "training_step")


def has_optimizer(backbone: nn.Module) -> bool:
    """Return whether the user's module is a LightningModule with a training step and an optimizer."""
    return trains_itself(backbone) and overrides(backbone, "configure_optimizers")


@contextmanager
def in_fit(module: L.LightningModule) -> Iterator[Any]:
    """Context that connects the user's LightningModule to the client's `Trainer`, and yields the LightningModule.

    A head that was split off is put back for this time. Values that the user's LightningModule logs are logged by the
    client's module.
    """
    backbone: Any = module.backbone
    with backbone.assembled() if isinstance(backbone, FromModule) else nullcontext(backbone) as network:
        network.trainer = trainer_of(module)
        vars(network)["log"] = module.log
        try:
            yield network
        finally:
            del vars(network)["log"]


def users_batch(value: Any) -> Any:
    """Return a batch with `Inputs` replaced by its tensors (a dict or tuple), as the user's module expects it."""
    if isinstance(value, tuple | list) and value and isinstance(value[0], Inputs):
        return (value[0].tensors, *value[1:])
    return value


def own_step(module: L.LightningModule, batch: Any, batch_idx: int) -> tuple[Tensor, Outputs | None]:
    """Call the training step of the user's LightningModule on a batch.

    Returns:
        The loss, and the features and logits of the last forward pass in the step; None if there was no such pass.

    Raises:
        ConfigError: The training step returns no loss.
    """
    backbone: Any = module.backbone
    outputs: list[Tensor] = []
    with in_fit(module) as network:
        cut = [backbone.cut] if isinstance(backbone, FromModule) else []
        handle = network.register_forward_hook(lambda _network, _inputs, output: outputs.append(output))
        try:
            with tapped(network, cut) as taps:
                returned = network.training_step(users_batch(batch), batch_idx)
        finally:
            handle.remove()
        loss = returned.get("loss") if isinstance(returned, dict) else returned
        if not isinstance(loss, Tensor):
            what = "a dict without 'loss'" if isinstance(returned, dict) else type(returned).__name__
            raise ConfigError(f"model: {class_name(network)}.training_step returned {what}. Return the loss, a tensor.")
    return loss, (next(iter(taps.values()), None), outputs[-1]) if outputs else None


def own_optimizer(module: L.LightningModule) -> tuple[Any, torch.optim.Optimizer]:
    """Call `configure_optimizers` of the user's LightningModule. Return the result, and the optimizer in it.

    Raises:
        ConfigError: It does not return exactly one optimizer.
    """
    with in_fit(module) as network:
        configured = found = network.configure_optimizers()
        if isinstance(found, tuple | list) and found and isinstance(found[0], tuple | list):  # (optimizers, schedulers)
            found = found[0]
        if isinstance(found, tuple | list) and len(found) == 1:
            (found,) = found
        if isinstance(found, dict):
            found = found.get("optimizer")
        if not isinstance(found, torch.optim.Optimizer):
            what = f"{class_name(network)}.configure_optimizers does not return one optimizer"
            raise ConfigError(
                f"model: {what}. Return one, with or without a scheduler, or set optimizer in the config."
            )
    return configured, found


def check_lightning_model(module: L.LightningModule) -> None:
    """Raise an error if the model is a LightningModule whose training is not supported in a client's fit."""
    with in_fit(module) as network:
        if not network.automatic_optimization:
            fix = "Return the loss from training_step, and leave automatic_optimization True."
            raise ConfigError(f"model: {class_name(network)} optimizes manually, so no loss terms can be added. {fix}")
        if odd := next((name for name in UNSUPPORTED if overrides(network, name)), None):
            fix = "Remove it, or write it as a callback for client_callbacks."
            raise ConfigError(
                f"model: {class_name(network)} overrides {odd}, which a client's fit does not call. {fix}"
            )


class ModelHooks(Callback):
    """Calls the hooks of the user's LightningModule, such as `on_train_epoch_end`, in a client's fit."""


def _hook(name: str) -> Callable[..., None]:
    def call(self: ModelHooks, trainer: L.Trainer, module: L.LightningModule, *args: Any, **options: Any) -> None:
        with in_fit(module) as network:
            getattr(network, name)(*map(users_batch, args), **options)

    return call


for _name in HOOKS:
    setattr(ModelHooks, _name, _hook(_name))
