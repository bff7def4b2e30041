"""Checks of the Trainer options, the model and the optimizer before round 1."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from fl_lightning.client.lightning_model import class_name, has_optimizer
from fl_lightning.client.mixing import Mixing
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import optimizer_tensors
from fl_lightning.core.errors import ConfigError, blame, check_number, one_line
from fl_lightning.core.fixed_tensors import named_tensors, shared_tensors
from fl_lightning.core.inputs import Inputs
from fl_lightning.core.objectives import Classification, ClassWeights, MultiLabel, Objective
from fl_lightning.core.trainer_options import TRAINER_KEYS, unsupported_option
from fl_lightning.data import FederatedData, LoadedData
from fl_lightning.data.federated_data import sha256
from fl_lightning.engines.trainer import DEFAULTS
from fl_lightning.models import Mixed
from fl_lightning.models.wrapped import outputs_option

MOST = 10**9
"""Maximum number of epochs, steps or batches of a client's fit."""

IN_FULL = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""Full names of the precisions for which Lightning has short names."""

ROUNDING = {
    "cpu": ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
    "cuda": ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"),
}
"""Environment variables that make torch compute float32 products with fewer bits, by device type."""


def check_options(options: Mapping[str, Any]) -> None:
    """Raise an error for options of `Trainer` that a client's fit does not support, and for numbers out of range."""
    for name in options:
        if name not in TRAINER_KEYS:
            raise ConfigError(unsupported_option(name))
    for name in ("max_epochs", "max_steps"):
        check_number(f"trainer.{name}", options.get(name), f"[-1, {MOST}]", "-1 is without bound")
    check_number("trainer.accumulate_grad_batches", options.get("accumulate_grad_batches"), f"[0, {MOST}]")
    check_number("trainer.gradient_clip_val", options.get("gradient_clip_val"), "[0, inf)", "0 clips nothing")
    batches = options.get("limit_train_batches") or 0
    within = "[0, 1]" if batches % 1 else f"[0, {MOST}]"
    check_number("trainer.limit_train_batches", batches, within, "give a number of batches, or a share up to 1.0")


def check_share(trainer: L.Trainer, batches: int) -> None:
    """Raise an error if `limit_train_batches` is a fraction that leaves no batch for the smallest client."""
    share = trainer.limit_train_batches
    if isinstance(share, float) and share * batches < 1:
        raise ConfigError(
            f"trainer.limit_train_batches: {share} is less than one of the {batches} batches of the smallest client; "
            f"give a larger share, or a number of batches"
        )


def check_trainer(trainer: L.Trainer, options: Mapping[str, Any]) -> None:
    """Raise an error if a `Trainer`'s fit takes no step, never ends, uses several devices, or changes the precision.

    Args:
        trainer: The trainer.
        options: The keyword arguments that it was built with.
    """
    if trainer.world_size > 1:
        raise ConfigError(
            "trainer.devices: a client's fit runs on one device; give 1, or [n] for the n-th, and use "
            "the engine processes for more"
        )
    for name in ("max_epochs", "max_steps", "limit_train_batches", "accumulate_grad_batches"):
        if getattr(trainer, name) == 0:
            raise ConfigError(f"trainer.{name}: with 0, clients do not train; give 1 or more")
    if trainer.max_epochs == trainer.max_steps == -1:
        raise ConfigError("trainer.max_epochs: -1 without trainer.max_steps never ends; give one of them")
    asked = str(options.get("precision") or trainer.precision)
    if trainer.precision != IN_FULL.get(asked, asked):
        device = trainer.strategy.root_device.type
        raise ConfigError(
            f"trainer.precision: {asked} is not available on the {device}, where Lightning would use "
            f"{trainer.precision} instead; give that, or 32-true"
        )


def warn_of_cut_steps(trainer: L.Trainer, steps: int) -> None:
    """Warn if the smallest client's fit reaches `max_epochs` before `max_steps`.

    Args:
        trainer: The `Trainer` of a client's fit.
        steps: The number of steps that the smallest client's fit takes.
    """
    if steps < trainer.max_steps:
        what = f"trainer.max_epochs {trainer.max_epochs} ends the smallest client's fit after {steps} steps"
        fix = "Set trainer.max_epochs -1 for the same number of steps on all clients."
        warnings.warn(f"trainer.max_steps: {trainer.max_steps}, but {what}. {fix}", stacklevel=2)


def check_class_weights(weights: ClassWeights, objective: Objective, outputs: int, module: ClientModule) -> None:
    """Raise an error if the training loss cannot have class weights, or if the number of weights is wrong."""
    if module.trains_itself:
        what, fix = f"{class_name(module.backbone)}.training_step computes the loss", "Weight the classes there"
        raise ConfigError(f"class_weights: {what}. {fix}, or leave class_weights out.")
    if objective.term not in module.loss_names:
        what = f"the method trains on {', '.join(module.loss_names)} in place of {objective.term}"
        raise ConfigError(f"class_weights: {what}. Leave class_weights out.")
    if not objective.weighs_classes:
        what = f"the loss of {type(objective).__name__} has no class weights"
        raise ConfigError(f"class_weights: {what}. Leave class_weights out.")
    if weights != "balanced" and len(weights) != outputs:
        one = "class" if objective.classes else "label"
        raise ConfigError(
            f"class_weights: {len(weights)} weights, but the number of outputs is {outputs}. Give one for each {one}."
        )


def check_mixing(mixing: Mixing, data: FederatedData, module: ClientModule) -> None:
    """Raise an error if mixed samples (MixUp, CutMix) do not fit the data, or the method reads targets of samples."""
    key = "cutmix" if mixing.mixup is None else "mixup"
    x, kind = data.data.x_train, type(module)
    parts: list[Any] = [*module.terms(), *module.pieces()]
    wrong = None
    if isinstance(x, Inputs) or x.dtype == torch.int64:
        wrong = "the inputs are token ids or several tensors, which cannot be mixed"
    elif mixing.cutmix is not None and x.ndim != 4:
        key, wrong = "cutmix", "the inputs are not images"
    elif not isinstance(data.objective, Classification | MultiLabel):
        wrong = f"the targets of {type(data.objective).__name__} are not classes or labels of whole samples"
    elif data.data.cut is not LoadedData.cut:
        wrong = "the dataset has batches of its own, such as few-shot episodes"
    elif module.trains_itself:
        wrong = f"{class_name(module.backbone)}.training_step computes the loss. Mix the samples there"
    elif any(getattr(kind, name) is not getattr(ClientModule, name) for name in ("training_step", "step", "losses")):
        wrong = "the method has a training step of its own, which takes one target for each sample"
    elif part := next((part for part in parts if part.needs_classes), None):
        wrong = f"{type(part).__name__} reads the class of each sample"
    elif piece := next((piece for piece in module.pieces() if piece.observes), None):
        wrong = f"{type(piece).__name__} collects the features of each class in training"
    if wrong:
        raise ConfigError(f"{key}: {wrong}. Leave mixup and cutmix out, or use another method.")


def check_batch_sampler(data: FederatedData) -> None:
    """Raise an error if `batch_sampler: balanced`, which draws all classes equally often, does not fit the data."""
    wrong = None if data.objective.classes else data.objective.no_classes
    if data.data.cut is not LoadedData.cut:
        wrong = "the dataset has batches of its own, such as few-shot episodes"
    if wrong:
        raise ConfigError(f"batch_sampler: balanced draws from each class equally often, but {wrong}. Use shuffle.")


def warn_of_environment(device: torch.device) -> None:
    """Warn of ignored `PL_TRAINER_*` environment variables, and of variables that make torch round to fewer bits."""
    for name in DEFAULTS:
        if os.environ.get(variable := f"PL_TRAINER_{name.upper()}"):
            warnings.warn(f"{variable} is set but ignored: a run depends on its config only", stacklevel=2)
    for variable in ROUNDING.get(device.type, ()):
        if value := os.environ.get(variable):
            warnings.warn(
                f"{variable} is {value}: torch may round float32 products to fewer bits than trainer.precision says",
                stacklevel=2,
            )


def warn_of_emulation(device: torch.device, precision: str) -> None:
    """Warn if a CUDA GPU computes bfloat16 in software."""
    if device.type == "cuda" and precision.startswith("bf16") and not torch.cuda.is_bf16_supported(False):
        fix = "Use 32-true, or 16-mixed."
        warnings.warn(f"trainer.precision: {precision} is slow, because this GPU has no bfloat16. {fix}", stacklevel=2)


def warn_of_unused_optimizer(module: ClientModule) -> None:
    """Warn if the model is a LightningModule with an optimizer, but the config names another one."""
    if has_optimizer(module.backbone) and not module.has_own_optimizer:
        what = (
            f"{class_name(module.backbone)}'s configure_optimizers is not used, because the config names an optimizer"
        )
        warnings.warn(f"model: {what}. Set optimizer null to use it", stacklevel=2)


def warn_of_eval_mode(module: ClientModule) -> None:
    """Warn if layers with trainable parameters are in eval mode, as Hugging Face's `from_pretrained` returns them."""
    layers = [(name, module.backbone.get_submodule(name)) for name in module.eval_layers]
    names = [name for name, layer in layers if any(p.requires_grad for p in layer.parameters())]
    if names:
        where = f"layer {names[0]!r} of " if names[0] else ""
        what = f"{where}{class_name(module.backbone)} is in eval mode, and stays so during training"
        fix = "Call its train() in your constructor, for dropout and BatchNorm as usual in training."
        warnings.warn(f"model: {what}. {fix}", stacklevel=2)


@contextmanager
def unchanged_fixed_tensors(network: nn.Module) -> Iterator[None]:
    """Context for a fit that checks at its end that the tensors that all clients share have not changed.

    Raises:
        ConfigError: The fit has changed one of them in place.
    """
    before = {name: sha256([tensor]) for name, tensor in shared_tensors(network).items()}
    yield
    after = dict(named_tensors(network))
    for name, digest in before.items():
        if name not in after or sha256([after[name]]) != digest:
            what = f"{name!r} is frozen when the model is built, so all clients share it, but the fit changes it"
            raise ConfigError(f"model: {what}. Build it trainable, or as a buffer of a layer that is not frozen.")


@contextmanager
def blame_inputs(x: Tensor | Inputs) -> Iterator[None]:
    """Context that turns an exception of the model into a `ConfigError`, which says if integer inputs are the cause."""
    try:
        with blame("model"):
            yield
    except ConfigError as error:
        tensors = [each for _, each in x.items()] if isinstance(x, Inputs) else [x]
        ids = [each for each in tensors if each.dtype == torch.int64]
        if isinstance(error.__cause__, IndexError) and ids:
            largest, length = max(int(each.max()) for each in ids), max(each[0].numel() for each in ids)
            what = f"Two samples have numbers up to {largest} and {length} positions; embeddings need a row for each"
            raise ConfigError(f"{error}. {what}.") from error
        if isinstance(x, Inputs) or x.is_floating_point() or not isinstance(error.__cause__, RuntimeError | TypeError):
            raise
        fix = "Use TextCNN, FastText, BiLSTM or a network with an embedding, or store the inputs as float32."
        raise ConfigError(f"model: it cannot take int64 inputs ({one_line(error.__cause__)}). {fix}") from error


@contextmanager
def blame_network(model: Any, group: int) -> Iterator[None]:
    """Context in which an error about `model` names a network of a `Mixed`, as in `model.models.1`.

    With any other model, errors do not change.

    Args:
        model: The model of the run.
        group: The number of the network.
    """
    try:
        yield
    except (ConfigError, ValueError) as error:
        text = one_line(error)
        if not isinstance(model, Mixed) or not re.match(r"model\b", text):
            raise
        raise ConfigError(re.sub(r"^model\b", f"model.models.{group}", text)) from error


def check_tensors(network: nn.Module) -> None:
    """Raise an error if a network has a tensor that cannot be copied, sent or averaged, or nothing to train.

    Raises:
        ConfigError: Names the layer or the entry of the state dict.
    """
    for path, layer in network.named_modules():
        if isinstance(layer, torch.jit.ScriptModule):
            raise ConfigError(f"model: {path or type(layer).__name__} is compiled by torch.jit. Give the Python class.")
        for name, value in vars(layer).items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                fix = "Use torch.nn.utils.parametrizations instead of weight_norm or prune, or compute it in forward."
                what = "is computed from other tensors when the model is built, so it cannot be copied"
                raise ConfigError(f"model: {f'{path}.{name}'.lstrip('.')!r} {what}. {fix}")
    state = network.state_dict()
    for name, value in state.items():
        if wrong := _obstacle(value):
            raise ConfigError(f"model: {name!r} {wrong}")
    for name, _ in network.named_parameters():
        if name not in state:
            fix = "Weights are sent by the names of its state dict, so remove the override or hook that changes these."
            raise ConfigError(f"model: the state dict of {class_name(network)} lacks the parameter {name!r}. {fix}")
    if not any(parameter.requires_grad for parameter in network.parameters()):
        fix = "Build all layers in the constructor, and set requires_grad of the parameters to train."
        raise ConfigError(f"model: {class_name(network)} has no trainable parameter. {fix}")


def _obstacle(value: Any) -> str | None:
    """Return why an entry of a state dict cannot be sent or averaged, and how to fix it; None if it can."""
    if isinstance(value, torch.dtype):  # of a dynamically quantized layer
        return "belongs to a quantized layer, which cannot be trained. Give the network as it was before quantization."
    if not isinstance(value, Tensor):
        return f"is of type {type(value).__name__}, not a tensor. Return a tensor from get_extra_state."
    if value.is_complex():
        return "is complex. Store torch.view_as_real of it, and use torch.view_as_complex in forward."
    if value.is_meta:
        return "is on the device meta, without values. Build the layer on the CPU."
    if value.layout != torch.strided or value.is_quantized:
        return "is a sparse or quantized tensor. Store a dense one, or register the buffer with persistent=False."
    if value.is_floating_point() and value.element_size() == 1:
        return f"is of {value.dtype}, in which torch cannot compute a mean. Store it in float16."
    if any(size > 1 and not stride for size, stride in zip(value.shape, value.stride(), strict=True)):
        return "has elements that share memory, as from expand. Call clone() on it."
    return None


def check_gradients(loss: Tensor, module: ClientModule, entries: Set[str]) -> None:
    """Raise an error if a trial of the network yielded no gradient, or added parameters or buffers to it.

    Args:
        loss: The outputs or the loss of the trial.
        module: The module after the trial.
        entries: Names of the network's state dict entries before it.
    """
    name = class_name(module.backbone)
    if new := sorted(module.backbone.state_dict().keys() - entries):
        fix = "Build all layers in the constructor, because the server knows and sends only those."
        raise ConfigError(f"model: {name} adds {new[0]!r} when it is called. {fix}")
    if not loss.requires_grad:
        what = f"the {'loss' if module.trains_itself else 'output'} of {name} does not depend on a trainable parameter"
        raise ConfigError(f"model: {what}. Remove detach, no_grad or item from its computation.")


def check_outputs(outputs: Any, samples: int, expected: tuple[int, ...], factory: Any, key: str = "model") -> None:
    """Raise an error if an untrained network's outputs for a batch are not finite, or not as many as the dataset's.

    Args:
        outputs: What the network returned.
        samples: Number of samples in the batch.
        expected: Shape of the outputs for a sample.
        factory: The factory of the experiment's model.
        key: The config key of the network.
    """
    if not isinstance(outputs, Tensor):
        fix = "Return the logits, a tensor, from forward, as in `return self.net(x).logits`."
        raise ConfigError(f"{key}: forward returned {type(outputs).__name__}. {fix}")
    if outputs.shape == (samples, *expected):
        if not outputs.isfinite().all():
            fix = "Check its initial weights and its forward."
            raise ConfigError(f"{key}: forward returned NaN or Inf before any training. {fix}")
        return
    option = outputs_option(factory) if key == "model" else None
    fix = f"Did you mean --{option} {expected[0]}?" if option else f"Give its last layer {expected[0]} outputs."
    what = f"{tuple(outputs.shape[1:])} outputs a sample, and the dataset needs {expected}"
    raise ConfigError(f"{key}: forward returned {what}. {fix}")


def warn_of_probabilities(outputs: Tensor, key: str) -> None:
    """Warn if a classifier's outputs for a batch, `(B, C)`, are probabilities, because the loss applies softmax."""
    if (outputs >= 0).all() and (outputs.float().sum(dim=1) - 1).abs().max() < 1e-3:
        what = "forward returned numbers that sum to 1, as after softmax, which the loss applies itself"
        warnings.warn(f"{key}: {what}. Return the logits.", stacklevel=2)


def check_shapes(network: nn.Module, initial: Mapping[str, Any]) -> None:
    """Raise an error if training has changed the shape of an entry of a network's state dict.

    Args:
        network: The trained network.
        initial: The state dict before the training.

    Raises:
        ConfigError: Names the entry.
    """
    for name, value in network.state_dict().items():
        if name in initial and value.shape != initial[name].shape:
            what = f"{name!r} has {tuple(value.shape)} elements after training, and {tuple(initial[name].shape)} before"
            fix = "Keep its shape, or register the buffer with persistent=False."
            raise ConfigError(f"model: {what}, so it cannot be averaged. {fix}")


def check_optimizer(optimizer: torch.optim.Optimizer, trainer: L.Trainer, kept: bool) -> None:
    """Raise an error if an optimizer has an option that is not finite, or cannot step on dense gradients.

    Args:
        optimizer: An optimizer over parameters that are not used afterwards, because this check takes a step.
        trainer: The trainer of a fit.
        kept: Whether the optimizer's state is kept from round to round, which not every optimizer supports.

    Raises:
        ConfigError: An option is not finite.
        Exception: Errors of the optimizer's step.
    """
    for group in optimizer.param_groups:
        for name, value in group.items():
            for number in value if isinstance(value, tuple | list) else (value,):
                if isinstance(number, float):
                    check_number(f"optimizer.{name}", number, "(-inf, inf)")
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    if trainer.gradient_clip_val:
        trainer.precision_plugin.clip_gradients(optimizer, trainer.gradient_clip_val)
    optimizer.step(lambda: 0.0)
    if kept:
        optimizer_tensors(optimizer)
