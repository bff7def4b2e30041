"""Tensors of a network that training does not change. Copies of the network share their memory.

These are the parameters that the network freezes, and the buffers of frozen layers. They are the same on all clients
and in all rounds, so they are neither copied, nor sent, nor stored. If adapters are trained on a pretrained network,
these are almost all of its tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn

MARK = "fl_lightning_fixed"
"""Attribute of the tensors that copies of a network share."""

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def fixed_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the frozen parameters of a network, and the buffers of its frozen layers, by name.

    A buffer belongs to the innermost layer around it that has parameters. If all of them are frozen, so is the layer.

    Example:
        >>> network = nn.Sequential(nn.BatchNorm1d(2).requires_grad_(False), nn.BatchNorm1d(2))
        >>> [*fixed_tensors(network)]
        ['0.weight', '0.bias', '0.running_mean', '0.running_var', '0.num_batches_tracked']
    """
    parameters = network.named_parameters(remove_duplicate=False)
    frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
    return frozen | {name: buffer for layer in _frozen_layers(network) for name, buffer in layer.items()}


def _frozen_layers(layer: nn.Module, prefix: str = "", inside: bool = False) -> Iterator[dict[str, Tensor]]:
    """Yield the buffers of each frozen layer by name.

    Args:
        layer: The layer to begin with.
        prefix: Its name with a final dot.
        inside: Whether the layer around it is frozen.
    """
    flags = [parameter.requires_grad for parameter in layer.parameters()]
    frozen = not any(flags) if flags else inside
    if frozen:
        yield {f"{prefix}{name}": buffer for name, buffer in layer.named_buffers(recurse=False)}
    for name, child in layer.named_children():
        yield from _frozen_layers(child, f"{prefix}{name}.", frozen)


def set_to_eval_mode(network: nn.Module) -> None:
    """Set the frozen layers of a network that have buffers to eval mode, so that BatchNorm does not change them."""
    buffers = dict(network.named_buffers(remove_duplicate=False)).keys() & fixed_tensors(network).keys()
    for name in buffers:
        network.get_submodule(name.rpartition(".")[0]).training = False


def share(network: nn.Module, names: Collection[str]) -> None:
    """Let the copies of a network share these tensors, which nothing may change in place afterwards.

    Args:
        network: The network.
        names: Names of parameters and buffers.
    """
    for name, tensor in named_tensors(network):
        if name in names:
            setattr(tensor, MARK, True)


def is_shared(tensor: Tensor) -> bool:
    """Return whether copies of the tensor's network share its memory."""
    return hasattr(tensor, MARK)


def shared_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a network that `share` has marked, by name: all copies of the network use their memory."""
    return {name: tensor for name, tensor in named_tensors(network) if is_shared(tensor)}


def shared_memory(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that copies of a network share, by name. Several names for one tensor occur once."""
    first: dict[Any, tuple[str, Tensor]] = {}
    for name, tensor in shared_tensors(network).items():
        first.setdefault(place_of(tensor), (name, tensor.detach()))
    return dict(first.values())


def use_memory(network: nn.Module, memory: dict[str, Tensor]) -> None:
    """Use other memory, such as that of another process, for the tensors that copies of a network share.

    Args:
        network: The network.
        memory: The result of `shared_memory` of an equal network.
    """
    shared = shared_tensors(network)
    places = {place_of(shared[name]): value for name, value in memory.items()}
    for tensor in shared.values():
        if (place := place_of(tensor)) in places:
            tensor.data = places[place]


def place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the address and form of a tensor, which identify it. A view may begin at its tensor's address."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def alias(tensor: Tensor) -> Tensor:
    """Return another tensor or parameter with the same memory. Tensors of other classes, such as quantized, are copied.

    Options of the new tensor, such as `requires_grad`, can be changed without changing the original.
    """
    view = tensor.detach()
    kinds = {Tensor: lambda: view, nn.Parameter: lambda: nn.Parameter(view, requires_grad=False)}
    other = kinds.get(type(tensor), lambda: copy.deepcopy(tensor))()
    setattr(other, MARK, True)
    return other


def copy_network(network: AnyModule) -> AnyModule:
    """Return a copy of a network or of a part of it, which shares the memory of its fixed tensors with the original."""
    shared = {id(tensor): alias(tensor) for tensor in shared_tensors(network).values()}
    return copy.deepcopy(network, shared)


def copy_shared_tensors(network: nn.Module, names: Collection[str] | None = None) -> None:
    """Give a network memory of its own for tensors that it shares, so that they can be changed.

    Args:
        network: The network.
        names: Names of parameters and buffers; all by default.
    """
    shared = shared_tensors(network)
    chosen = [tensor for name, tensor in shared.items() if names is None or name in names]
    for tensor in {id(tensor): tensor for tensor in chosen}.values():
        tensor.data = tensor.data.clone()
        delattr(tensor, MARK)


def named_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each parameter and buffer of a network, and the tensor. A tied tensor has several names."""
    yield from network.named_parameters(remove_duplicate=False)
    yield from network.named_buffers(remove_duplicate=False)
