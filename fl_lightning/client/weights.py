"""Weights of a backbone: loading, selecting, copying."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors
from fl_lightning.core.state import State

PLAIN_LOADING = {kind._load_from_state_dict for kind in (nn.Module, _NormBase)}


def load_weights(backbone: nn.Module, weights: Tensors) -> None:
    """Load what was shared; entries that are not shared stay as they are.

    Raises:
        ValueError: An entry is none of this backbone's.
    """
    strangers = backbone.load_state_dict(weights, strict=False).unexpected_keys
    if strangers:
        raise ValueError(f"{strangers[0]!r} is no entry of this model")


def loads_plainly(backbone: nn.Module) -> bool:
    """Whether `load_weights` only writes over entries: no part of the network has hooks or a way of its own to load."""

    def plain(part: nn.Module) -> bool:
        hooked = part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks
        return type(part)._load_from_state_dict in PLAIN_LOADING and not hooked

    return type(backbone).load_state_dict is nn.Module.load_state_dict and all(map(plain, backbone.modules()))


def beginnings(parts: Iterable[str]) -> tuple[str, ...]:
    """What the entries of parts of a backbone begin with: `head.` for the part `head`."""
    return tuple(f"{part}." for part in parts)


def require_parts(key: str, parts: Iterable[str], backbone: nn.Module) -> None:
    """Refuse a part of a backbone that has no entry.

    Args:
        key: The option that names the parts.
        parts: As `beginnings` gives them.
        backbone: The backbone.

    Raises:
        ConfigError: Names the first that has none.
    """
    for part in parts:
        if not any(name.startswith(part) for name in backbone.state_dict()):
            getattr(backbone, part.partition(".")[0], None)  # `FromModule` says why it has no head or encoder
            there = ", ".join(dict.fromkeys(name.partition(".")[0] for name in backbone.state_dict()))
            raise ConfigError(
                f"algorithm.{key}: {part.removesuffix('.')!r} is no part of {type(backbone).__name__} with weights; "
                f"it has {there}, and what is in them, as encoder.1"
            )


def buffer_names(backbone: nn.Module) -> set[str]:
    """Names of a state dict's entries that are no parameters: BatchNorm's statistics."""
    return set(backbone.state_dict()) - {name for name, _ in backbone.named_parameters()}


def reinitialised(backbone: nn.Module, rng: np.random.Generator) -> Tensors:
    """The entries of a backbone with other random weights: what its layers' own `reset_parameters` draw.

    What belongs to no layer that has one stays as it is. Neither the backbone nor torch's generators are moved.
    """
    other = copy.deepcopy(backbone)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(rng.integers(2**63)))
        for layer in other.modules():
            if callable(reset := getattr(layer, "reset_parameters", None)):
                reset()
    return other.state_dict()


def to_cpu(sections: Mapping[str, Tensors]) -> State:
    """Detached copies on the CPU, contiguous, half precision widened to float32, free of the module they came from."""
    return detached(sections, "cpu")


def detached(sections: Mapping[str, Tensors], device: str | None, copy: bool = True) -> State:
    """Detached copies, contiguous, half precision widened to float32, free of the module they came from.

    Args:
        sections: Tensors of a module, by section and name.
        device: Where the copies are to be; where the tensors are if None.
        copy: False where nobody needs the module any more: what has its memory to itself is then given up as it is.
    """
    taken: set[int] = set()

    def shared(value: Tensor) -> bool:
        memory = value.untyped_storage()
        others = memory.data_ptr() in taken
        taken.add(memory.data_ptr())
        return others or memory.nbytes() > value.nbytes

    def widened(value: Tensor) -> Tensor:
        half = value.dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else value.dtype
        own = copy or shared(value)
        where = value.device if device is None else device
        return value.detach().to(where, dtype, copy=own, memory_format=torch.contiguous_format).contiguous()

    return {name: {key: widened(value) for key, value in content.items()} for name, content in sections.items()}
