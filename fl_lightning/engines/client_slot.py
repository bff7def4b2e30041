"""A client module that is built once and reset for each client, which is faster than building a new one."""

from __future__ import annotations

import copyreg
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Set
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.client.module import ClientModule
from fl_lightning.core.fixed_tensors import is_shared
from fl_lightning.core.flat_tensors import FlatTensors, Layout

CONTAINERS = (dict, OrderedDict, list, set)
CONSTANTS = (
    *(int, float, complex, str, bytes, type(None), tuple, frozenset, type, Enum, partial, torch.dtype, torch.device),
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
)
"""Types of attributes that are not changed in place."""


class ClientSlot:
    """A reusable client module with its weights in one flat tensor. It is reset for one client after another.

    `reset` makes the module equal to a newly built one, in a tenth of the time. If the module is not used
    after its upload (`WeightMemory.spent`), the upload consists of the weights themselves, not of copies.

    Args:
        module: A newly built client module on the training device, for which `can_reset` is true.
        shared: Names of the backbone's entries that are sent.

    Attributes:
        layout: The positions of the sent weights in the flat tensor.
    """

    def __init__(self, module: ClientModule, shared: Iterable[str]) -> None:
        self.module = module.train()
        entries = module.backbone.state_dict(keep_vars=True)
        self._order = tuple(shared)
        sent = weights_of(entries, self._order)
        self.layout, self._weights = Layout.of(sent), [*sent.values()]
        self._owners = [owner(module.backbone, name) for name in sent]
        self._children = [(vars(part), part._modules.copy()) for part in module.modules() if part._modules]
        self._others = {name: entries[name] for name in self._order if name not in sent}
        self._initial = self._new_flat()
        for name, view in self.layout.views(self._initial).items():
            view.copy_(entries[name].detach())
        values = {id(value): value for part in module.modules() for value in containers_in(vars(part))}
        self._empty = [value for value in values.values() if not value]
        self._filled = [(value, value.copy()) for value in values.values() if value]
        received = {id(entries[name]) for name in sent}
        rest = {id(value): value for part in module.modules() for value in tensors_of(part) if not is_shared(value)}
        self._rest = [(value, value.detach().clone()) for key, value in rest.items() if key not in received]
        self._flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        self.place(self._initial.clone())

    def reset(self, overwritten: Set[str] = frozenset()) -> ClientModule:
        """Reset the module to the state of a newly built one, and return it.

        Args:
            overwritten: Entries of the backbone that are overwritten before they are read.
        """
        for container in filter(None, self._empty):
            container.clear()
        for container, content in self._filled:
            container.clear()
            container.extend(content) if isinstance(container, list) else container.update(content)
        for parameter, flag in self._flags:
            parameter.grad = None
            if parameter.requires_grad != flag:
                parameter.requires_grad_(flag)
        with torch.no_grad():
            for value, start in self._rest:
                value.copy_(start)
        if self._given_away:
            self.place(self._new_flat())
        if not self._placed.keys() <= overwritten:
            self._placed.flat.copy_(self._initial)
        return self.module

    def give_away(self) -> None:
        """Leave the memory of the weights to the upload. The next client gets new memory."""
        self._given_away = True

    @property
    def weights(self) -> FlatTensors:
        """The weights that are sent, as views of one tensor."""
        return self._placed

    def check_weights(self) -> None:
        """Let the module's weights be uploaded one by one if they can no longer be uploaded as one tensor."""
        if not self.is_intact:
            self.module.weight_memory.flat = None

    @property
    def is_intact(self) -> bool:
        """Whether the module still has its original submodules, weights and weight memory, and no gradient hooks."""
        same_parts = all(attributes["_modules"] == children for attributes, children in self._children)
        hooked = any(p._backward_hooks or p._post_accumulate_grad_hooks for p, _ in self._flags)
        return same_parts and not hooked and self._has_original_weights()

    def _has_original_weights(self) -> bool:
        """Return whether no weight was replaced by another tensor, or moved out of the memory that `place` set."""
        for (entry, _), weight, owner in zip(self.layout.shapes, self._weights, self._owners, strict=True):
            attributes, kind, name = owner  # see the function `owner`
            if attributes[kind].get(name) is not weight or weight.data_ptr() != self._placed[entry].data_ptr():
                return False
        return True

    def _new_flat(self) -> Tensor:
        return self.layout.empty(self._weights[0].dtype, self._weights[0].device)

    def place(self, flat: Tensor) -> None:
        """Use the tensor `flat` as the memory of the module's weights, so that the weights take its values."""
        self._placed, self._given_away = FlatTensors(flat, self.layout, self._others, self._order), False
        for (name, _), weight in zip(self.layout.shapes, self._weights, strict=True):
            weight.data = self._placed[name]


def can_reset(module: ClientModule, shared: Iterable[str]) -> bool:
    """Return whether a `ClientSlot` can hold a module and reset it for the next client.

    Its weights must be of one type and ordinary tensors, and its parts may only have attributes that can be restored.
    A subclass of `ClientModule` may have other attributes.

    Args:
        module: The module.
        shared: The names of the weights that clients exchange.
    """
    if type(module) is not ClientModule:
        return False
    weights = weights_of(module.backbone.state_dict(keep_vars=True), shared).values()
    ordinary = all(type(w) is nn.Parameter or type(w) is Tensor for w in weights)
    apart = len({w.untyped_storage().data_ptr() for w in weights}) == len(weights) > 0
    # strides decide the memory format in which convolutions compute
    alike = len({w.dtype for w in weights}) == 1 and all(w.stride() == default_strides(w) for w in weights)
    parts = [part for part in module.modules() if part is not module]
    return ordinary and apart and alike and all(is_restorable(value) for part in parts for value in values_of(part))


def default_strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides that a tensor would have if it were contiguous."""
    return torch.empty(tensor.shape, device="meta").stride()


def weights_of(entries: dict[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    """Return the floating-point tensors of a state dict that have these names."""
    return {name: entries[name] for name in names if entries[name].is_floating_point()}


def owner(network: nn.Module, entry: str) -> tuple[dict[str, Any], str, str]:
    """Find the module that stores an entry of a network's state dict.

    Returns:
        The `vars` of the module, the name `_parameters` or `_buffers`, and the tensor's key in the dict of that name.
    """
    path, _, name = entry.rpartition(".")
    attributes = vars(network.get_submodule(path))
    return attributes, "_parameters" if name in attributes["_parameters"] else "_buffers", name


def is_container(value: Any) -> bool:
    """Return whether an attribute's value is a container that `ClientSlot.reset` restores."""
    return type(value) in CONTAINERS


def contents(container: Any) -> Iterable[Any]:
    """Return the values of a dict, or the items of a list or set."""
    return container.values() if isinstance(container, dict) else container


def containers_in(container: Any, known: set[int] | None = None) -> Iterator[Any]:
    """Yield a container, the containers inside of it, and the attributes of the objects inside, such as configs.

    Args:
        container: A dict, list or set.
        known: Containers that were yielded before, by `id`.
    """
    known = set() if known is None else known
    if id(container) in known:
        return
    known.add(id(container))
    yield container
    for value in contents(container):
        if is_container(value):
            yield from containers_in(value, known)
        elif has_attributes_only(value):
            yield from containers_in(vars(value), known)


def has_attributes_only(value: Any) -> bool:
    """Return whether an object, such as the config of a Hugging Face model, has no state except its attributes."""
    if isinstance(value, (*CONSTANTS, Tensor, nn.Module)) or not hasattr(value, "__dict__"):
        return False
    try:
        build, arguments, state, *items = value.__reduce_ex__(2)
    except Exception:  # whatever an object's own pickling raises
        return False
    return build is copyreg.__newobj__ and len(arguments) == 1 and state == vars(value) and items == [None, None]  # type: ignore[attr-defined]


def values_of(part: nn.Module) -> Iterator[Any]:
    """Yield the values of a module's attributes; for containers and configs, the values inside."""
    for container in containers_in(vars(part)):
        yield from (value for value in contents(container) if not is_container(value))


def is_restorable(value: Any) -> bool:
    """Return whether a `ClientSlot` can restore an attribute with this value."""
    return isinstance(value, (*CONSTANTS, Tensor, nn.Module)) or has_attributes_only(value)


def tensors_of(part: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors in the attributes of a module."""
    return (value for value in values_of(part) if isinstance(value, Tensor))
