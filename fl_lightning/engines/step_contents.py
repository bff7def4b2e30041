"""A client's training step as a function of tensors: everything that it can read, by path.

These are the registered parameters and buffers of the client's module, and tensors in plain attributes of its parts,
such as a loss term's anchors, also within lists, tuples and dicts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import lightning as L
from torch import Tensor, nn

from fl_lightning.client.losses import total_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Tensors

BACKBONE = "client.backbone."
CONTAINERS = (dict, list, tuple)

# Attributes that a client's step does not read. The first class that a module is an instance of counts.
_FIT = {"optimizer_factory", "scheduler_factory", "optimizer_state", "notes", "loss_record", "weight_memory"}
_MODULE, _LIGHTNING = (vars(kind()).keys() - {"training"} for kind in (nn.Module, L.LightningModule))
_HIDDEN = {ClientModule: _LIGHTNING | _FIT, L.LightningModule: _LIGHTNING, nn.Module: _MODULE}


class StepOutput(NamedTuple):
    """Output of a training step. In a stacked step, each tensor has a first dimension of clients.

    Attributes:
        loss: The sum of the losses.
        losses: Cross-entropy and each active term, by name.
        logits: `(B, C)`.
        features: `(B, d)`, or None where the model has no encoder.
    """

    loss: Tensor
    losses: dict[str, Tensor]
    logits: Tensor
    features: Tensor | None


class ClientStep(nn.Module):
    """A client's training step as an `nn.Module`, with all modules that the step may use as submodules.

    These include modules that PyTorch does not register, such as those in a list.
    """

    def __init__(self, client: ClientModule) -> None:
        super().__init__()
        self.client, self.held = client, nn.ModuleList()
        walked = list(client.modules())  # whose attributes may contain modules that are not registered
        for module in walked:  # the list grows in the loop
            for leaf in leaves(attributes(module)).values():
                if isinstance(leaf, nn.Module) and not any(leaf is one for one in walked):
                    self.held.append(leaf)
                    walked += leaf.modules()

    def forward(self, x: Tensor, y: Tensor) -> StepOutput:
        """Return the losses, logits and features of the client's module on a batch."""
        step = self.client.step((x, y))
        losses = self.client.losses(step)
        return StepOutput(total_loss(losses), losses, step.logits, step.features)


class StepContents:
    """A snapshot, taken on creation, of the tensors and attributes that a client's training step reads.

    Args:
        step: The step.

    Attributes:
        registered: Parameters and buffers by name, those of the backbone under `client.backbone.`.
        names: Their names by id.
        homes: Where they are stored, as (dict, key, name). A tensor may be in several places.
        plain: Plain attributes of its parts by path.
    """

    def __init__(self, step: ClientStep) -> None:
        self.step, self.plain = step, plain(step)
        self.modules: dict[str, nn.Module] = dict(step.named_modules())
        self.registered: Tensors = {}
        self.names: dict[int, str] = {}
        self.homes: list[tuple[dict[str, Any], str, str]] = []
        for prefix, module in self.modules.items():
            for held in (module._parameters, module._buffers):
                for key, value in held.items():
                    if value is not None:
                        name = self.names.setdefault(id(value), f"{prefix}.{key}")
                        self.registered[name] = value
                        self.homes.append((held, key, name))

    def free(self) -> Tensors:
        """Return the tensors that are stored in attributes without being parameters or buffers, by path."""
        return {
            path: leaf for path, leaf in self.plain.items() if isinstance(leaf, Tensor) and id(leaf) not in self.names
        }

    def shape(self) -> dict[str, Any]:
        """Return the step's tensor shapes and types, module classes and other attributes, without tensor values.

        The keys are paths in the step. Clients can be trained as one batch only if this dict is equal for all of them.
        """
        modules = {id(module): name for name, module in self.modules.items()}

        def described(leaf: Any) -> Any:
            if isinstance(leaf, Tensor):
                return self.names.get(id(leaf)) or (tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            return modules[id(leaf)] if isinstance(leaf, nn.Module) else leaf

        tensors = {name: (tuple(t.shape), t.dtype, t.requires_grad) for name, t in self.registered.items()}
        kinds = {f"{name} is": type(module) for name, module in self.modules.items()}
        return tensors | kinds | {path: described(leaf) for path, leaf in self.plain.items()}


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters, then its buffers, with their names, including those not in the state dict."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that a step may read, without parameters, buffers and submodules."""
    hidden = next(names for kind, names in _HIDDEN.items() if isinstance(module, kind))
    return {name: value for name, value in vars(module).items() if name not in hidden}


def plain(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module and its submodules by path, without parameters and buffers.

    Each item of a list, tuple or dict has a path of its own.
    """
    held = {f"{name}.": attributes(part) for name, part in module.named_modules()}
    return {name + path: leaf for name, values in held.items() for path, leaf in leaves(values).items()}


def contents(module: nn.Module) -> dict[str, Any]:
    """Return the parameters, buffers and other attributes of a module and its submodules. The keys are dotted paths."""
    return {**dict(tensors_of(module)), **plain(module)}


def versions(held: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of in-place changes to each tensor in a mapping, by the tensor's key."""
    return {path: leaf._version for path, leaf in held.items() if isinstance(leaf, Tensor)}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Return the leaves of nested lists, tuples and dicts by path. An empty container is a leaf."""
    if not isinstance(value, CONTAINERS) or not value:
        return {path: value}
    found: dict[str, Any] = {}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        place = f"{path}.{key}" if path else str(key)
        if isinstance(item, CONTAINERS):
            found |= leaves(item, place)
        else:
            found[place] = item
    return found


def with_tensors(value: Any, path: str, alias: Callable[[Any], Tensor | None], free: Tensors) -> Any:
    """Return a tensor or container with some tensors replaced by others. The given value is not modified.

    A container in which a tensor is replaced is copied.

    Args:
        value: The value, possibly a container of tensors.
        path: The path of the value.
        alias: Returns the replacement of a tensor, or None to look it up in `free`.
        free: Replacements by path. A tensor with a path that is not among them is kept.
    """
    if isinstance(value, Tensor):
        other = alias(value)
        return free.get(path, value) if other is None else other
    if not isinstance(value, CONTAINERS):
        return value
    keys = list(value) if isinstance(value, dict) else range(len(value))
    items = {key: with_tensors(value[key], f"{path}.{key}", alias, free) for key in keys}
    if all(items[key] is value[key] for key in keys):
        return value
    if isinstance(value, tuple):
        return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(items.values())
    container = copy.copy(value)
    for key, item in items.items():
        container[key] = item
    return container


def same(one: Any, other: Any) -> bool:
    """Return whether two attribute values are the same object or equal plain values."""
    if one is other:
        return True
    try:
        return type(one) is type(other) and not isinstance(one, Tensor | nn.Module) and bool(one == other)
    except Exception:  # what cannot be compared may differ
        return False


def difference(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Return the first path at which two dicts of attribute values differ; None if they are equal."""
    if one.keys() != other.keys():
        return sorted(one.keys() ^ other.keys())[0]
    return next((path for path, leaf in one.items() if not same(leaf, other[path])), None)
