"""Load, select and copy entries of a backbone's state dict."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigError, NonFiniteError
from fl_lightning.core.fixed_tensors import is_shared
from fl_lightning.core.flat_tensors import FlatTensors, as_flat, map_tensors
from fl_lightning.core.message import Tensors
from fl_lightning.core.state_dicts import State, first_non_finite
from fl_lightning.models.base import Backbone, options_with_head

PLAIN_LOADING = {kind._load_from_state_dict for kind in (nn.Module, nn.BatchNorm2d)}


@dataclass
class WeightMemory:
    """How a client module's weights are stored, and whether an upload copies them. Engines set it to save copies.

    Args:
        flat: The weights that are sent, as views of one tensor, if the module belongs to a `ClientSlot`.
        stays: Whether uploaded weights stay on the training device, where the server averages them.
        spent: Whether the module is not used after its upload, so that the upload need not copy tensors.
    """

    flat: FlatTensors | None = None
    stays: bool = False
    spent: bool = False


def load_weights(backbone: nn.Module, weights: Tensors) -> None:
    """Load weights by state dict name into a backbone. Entries without a given weight do not change.

    Raises:
        ValueError: An entry is not in the backbone's state dict.
    """
    strangers = backbone.load_state_dict(weights, strict=False).unexpected_keys
    if strangers:
        raise ValueError(f"{strangers[0]!r} is no entry of this model")


def loads_plainly(backbone: nn.Module) -> bool:
    """Return whether `load_state_dict` of a backbone only copies values, without hooks or custom loading code."""

    def plain(part: nn.Module) -> bool:
        hooked = part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks
        return type(part)._load_from_state_dict in PLAIN_LOADING and not hooked

    return type(backbone).load_state_dict is nn.Module.load_state_dict and all(map(plain, backbone.modules()))


def beginnings(parts: Iterable[str]) -> tuple[str, ...]:
    """Return a tuple with the state dict prefix of each part of a backbone: `("head.",)` for the part `head`.

    Patterns of entries, which contain `*`, are returned unchanged.
    """
    return tuple(part if "*" in part else f"{part}." for part in parts)


def belongs_to(name: str, parts: Iterable[str]) -> bool:
    """Return whether an entry of a state dict belongs to one of some parts: prefixes, or patterns with `*`."""
    return any(fnmatchcase(name, part) if "*" in part else name.startswith(part) for part in parts)


def require_parts(key: str, parts: Iterable[str], backbone: nn.Module) -> None:
    """Check that a backbone has weights in each of some parts, such as `head`, which an option lists by name.

    Args:
        key: The option.
        parts: The parts, from `beginnings`, or patterns.
        backbone: The backbone.

    Raises:
        ConfigError: No entry of the backbone belongs to a part. The message names it.
    """
    for part in parts:
        if not any(belongs_to(name, [part]) for name in backbone.state_dict()):
            getattr(backbone, part.partition(".")[0], None)  # `FromModule` raises an error that says why
            there = ", ".join(dict.fromkeys(name.partition(".")[0] for name in backbone.state_dict()))
            fix = "and their submodules, such as encoder.1"
            if not isinstance(backbone, Backbone):
                fix = f"and their submodules. Name one, or use {options_with_head(backbone)}"
            raise ConfigError(
                f"algorithm.{key}: {part.removesuffix('.')!r} is no part of {type(backbone).__name__} with weights; "
                f"it has {there}, {fix}"
            )


def trainable_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return a network's parameters with `requires_grad=True` by name."""
    return {name: parameter for name, parameter in network.named_parameters() if parameter.requires_grad}


def unfixed_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Return a network's parameters by name, without those that copies of the network share (`fixed_tensors`)."""
    return {name: parameter for name, parameter in network.named_parameters() if not is_shared(parameter)}


def load_parameters(parameters: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into parameters in place, without gradient tracking.

    It can be called between two forward passes of a training step, because it clears autocast's cached weights.
    """
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    torch.clear_autocast_cache()  # it may contain the old weights


def buffer_names(backbone: nn.Module) -> set[str]:
    """Return the names of a backbone's state dict entries that are no parameters, such as BatchNorm's statistics."""
    return set(backbone.state_dict()) - {name for name, _ in backbone.named_parameters(remove_duplicate=False)}


def reinitialised(backbone: nn.Module, rng: np.random.Generator) -> Tensors:
    """Return a backbone's state dict with new random weights, from `reset_parameters` of all its layers.

    Layers without this method keep their entries. The backbone and torch's random state do not change.
    """
    other = copy.deepcopy(backbone)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        for layer in other.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
    return other.state_dict()


def kept_model(network: nn.Module, fixed: Collection[str], what: str, fix: str) -> Tensors:
    """Return a copy of a network's state dict for the client to keep between rounds. Frozen parameters are left out.

    The copy is on the CPU.

    Args:
        network: A model of the client's own, beside the one that is uploaded.
        fixed: Names of frozen parameters, which are equal everywhere and not kept.
        what: The network in the error message, such as "personalised model".
        fix: How to fix it.

    Raises:
        NonFiniteError: An entry contains NaN or Inf. The message names it.
    """
    kept = to_cpu({"": {name: value for name, value in network.state_dict().items() if name not in fixed}})[""]
    if bad := first_non_finite(kept):
        raise NonFiniteError(f"the {what}'s {bad!r} is NaN or Inf. {fix}")
    return kept


def to_cpu(sections: Mapping[str, Tensors]) -> State:
    """Return detached CPU copies of the tensors in nested dicts. Half precision is widened to float32."""
    return detached(sections, "cpu")


def detached(sections: Mapping[str, Tensors], device: str | None, copy: bool = True) -> State:
    """Return detached, contiguous copies of the tensors in nested dicts. Half precision is widened to float32.

    Args:
        sections: Tensors of a module, by section and name.
        device: Device of the copies; that of the tensors if None.
        copy: False if the module is not used any more. Tensors that own their memory are then returned without a copy.
    """
    taken: set[int] = set()

    def shared(value: Tensor) -> bool:
        memory = value.untyped_storage()
        others = memory.data_ptr() in taken
        taken.add(memory.data_ptr())
        return others or memory.nbytes() > value.nbytes

    def widened(value: Tensor, own: bool) -> Tensor:
        half = value.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else value.dtype
        where = value.device if device is None else device
        value = value.detach() if value.requires_grad else value
        return value.to(where, dtype, copy=own, memory_format=torch.contiguous_format).contiguous()

    def section(content: Tensors) -> Tensors:
        if as_flat(content) is not None:
            return map_tensors(lambda value: widened(value, copy or not value.is_floating_point()), content)
        return {key: widened(value, copy or shared(value)) for key, value in content.items()}

    return {name: section(content) for name, content in sections.items()}
