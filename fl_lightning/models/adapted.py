"""Pretrained networks with adapters: few parameters that are trained, while the rest is frozen."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from fl_lightning.core.arguments import FieldsMixin, number
from fl_lightning.core.errors import ConfigError, require_extra
from fl_lightning.core.inputs import Shapes
from fl_lightning.models.base import Backbone, ModelFactory, NetworkFactory, with_encoder
from fl_lightning.models.wrapped import build_network

if TYPE_CHECKING:
    from peft import PeftConfig

SHOWN_LAYERS = 12
"""Number of layer names that an error message shows."""


class Adapter(FieldsMixin):
    """Base class of adapters for `Adapted`. A subclass declares its options as fields, and overrides `peft_config`."""

    section = "model.adapter"

    targets: Sequence[str]
    modules_to_save: Sequence[str] | None = None

    def peft_config(self, layers: Sequence[str], transposed: bool) -> PeftConfig:
        """Return peft's configuration of the adapters.

        Args:
            layers: Full names of the layers that are adapted.
            transposed: Whether all of these layers are `Conv1D`, whose weights are `(inputs, outputs)`.
        """
        raise NotImplementedError


class LoRA(Adapter):
    """LoRA: a layer's frozen weight `W` becomes `W + s B A` with two trained factors of small rank `r`.

    Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022. peft implements it.

    Args:
        targets: Names of the layers to adapt, such as `[query, value]`. A name is the last part of a layer's full name,
            or its last parts (`attention.self.query`).
        r: The rank of the factors.
        alpha: α. The scaling `s` is `α / r`, or `α / √r` with `rslora`.
        dropout: Dropout on the input of `A`, in [0, 1).
        rslora: Rank-stabilised scaling (Kalajdzievski 2023).
        modules_to_save: Names of layers that are trained whole, besides the adapters. By default the layers that are
            not pretrained: the head, and for a `Pretrained` with the task `causal_lm` none.
    """

    r: int = number(8, "[1, inf)")
    alpha: int = number(16, "[1, inf)")
    dropout: float = number(0.0, "[0, 1)")
    rslora: bool = False

    def peft_config(self, layers: Sequence[str], transposed: bool) -> PeftConfig:
        """Return peft's `LoraConfig`."""
        from peft import LoraConfig

        return LoraConfig(
            r=self.r,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            use_rslora=self.rslora,
            target_modules=[*layers],
            fan_in_fan_out=transposed,
        )


class Adapted(Backbone):
    """A network with adapters. Only the adapters and the new layers, such as the head, are trained and sent.

    It needs the package `peft`. In a config:

        model:
          class_path: Adapted
          init_args:
            base: {class_path: Pretrained, init_args: {path: ./roberta-base}}
            adapter: {class_path: LoRA, init_args: {r: 8, targets: [query, value]}}

    Args:
        in_shape: Shape of one input, or the shapes of several inputs by name.
        num_classes: Number of classes, `C`.
        base: The network that is frozen: `Pretrained`, `FromModule`, or any other model with an encoder and a head.
        adapter: The adapters, and the layers that get them.

    Raises:
        ConfigError: No layer has a name in `targets`; such a layer is an embedding, shares its weight with another
            layer, or is neither linear nor a convolution; or `peft` is not installed.
    """

    several_inputs: ClassVar = True

    def __init__(
        self,
        in_shape: tuple[int, ...] | Shapes,
        num_classes: int,
        base: ModelFactory | NetworkFactory,
        adapter: Adapter,
    ) -> None:
        with require_extra("transformers", "model: Adapted needs the package peft"):
            from peft import inject_adapter_in_model
            from transformers.pytorch_utils import Conv1D
        network = with_encoder(build_network(base, in_shape, num_classes))
        super().__init__(network.encoder, network.head, network.feature_dim, network.predictor)
        self.new_layers = tuple(saved_layers(self, adapter.modules_to_save, network.new_layers))
        layers = target_layers(self, adapter.targets, self.new_layers, (nn.Linear, nn.Conv2d, Conv1D))
        transposed = all(isinstance(layer, Conv1D) for layer in layers.values())
        inject_adapter_in_model(adapter.peft_config([*layers], transposed), self)  # freezes everything else
        for name in self.new_layers:
            self.get_submodule(name).requires_grad_(True)


def merge_adapters(network: nn.Module) -> nn.Module:
    """Return a copy of a network in which each layer with LoRA is an ordinary layer again, with the weight `W + s B A`.

    Raises:
        ConfigError: The network has no layer with LoRA.
    """
    merged = copy.deepcopy(network)
    adapted = [(name, layer) for name, layer in merged.named_modules() if hasattr(layer, "lora_A")]
    if not adapted:
        raise ConfigError(f"--merge: {type(network).__name__} has no LoRA adapters. Leave it out.")
    for name, layer in adapted:
        layer.merge(safe_merge=True)
        merged.set_submodule(name, layer.get_base_layer())
    return merged


def saved_layers(network: nn.Module, names: Sequence[str] | None, default: Sequence[str]) -> Iterator[str]:
    """Yield the full names of the layers that are trained whole.

    Args:
        network: The network.
        names: Names or last parts of names of the layers; None for the default.
        default: Full names.

    Raises:
        ConfigError: No layer has one of the names.
    """
    if names is None:
        yield from default
        return
    layers = dict(network.named_modules())
    for wanted in names:
        found = layers_named(wanted, layers)
        if not found:
            raise ConfigError(f"model.adapter.modules_to_save: layer {wanted!r} not found. {list_names(layers)}")
        yield from found


def target_layers(
    network: nn.Module, targets: Sequence[str], trained: Sequence[str], kinds: tuple[type[nn.Module], ...]
) -> dict[str, nn.Module]:
    """Return the layers of a network that get adapters, by full name. Layers that are trained whole get none.

    Args:
        network: The network.
        targets: Names or last parts of names of the layers.
        trained: Full names of the layers that are trained whole.
        kinds: The types of layers that can be adapted.

    Raises:
        ConfigError: A name belongs to no layer, or to one that cannot be adapted.
    """
    whole = tuple(f"{part}." for part in trained)
    layers = {name: layer for name, layer in network.named_modules() if not f"{name}.".startswith(whole)}
    adaptable = [name for name, layer in layers.items() if isinstance(layer, kinds)]
    uses = Counter(map(id, (value for _, value in network.named_parameters(remove_duplicate=False))))
    found: dict[str, nn.Module] = {}
    for target in targets:
        matches = layers_named(target, layers)
        if not matches:
            raise ConfigError(f"model.adapter.targets: layer {target!r} not found. {list_names(adaptable)}")
        for name in matches:
            _check_target(target, name, layers[name], kinds, uses)
            found[name] = layers[name]
    if not found:
        raise ConfigError(f"model.adapter.targets: it is empty. {list_names(adaptable)}")
    return found


def _check_target(target: str, name: str, layer: Any, kinds: tuple[type[nn.Module], ...], uses: Counter[int]) -> None:
    """Raise an error if a layer cannot have an adapter whose product can be added to its weight."""
    if isinstance(layer, nn.Embedding):
        what = "is an embedding"
    elif not isinstance(layer, kinds):
        what = f"is of the type {type(layer).__name__}"
    elif getattr(layer, "groups", 1) > 1:
        what = "is a convolution with groups"
    elif uses[id(layer.weight)] > 1:
        what = "shares its weight with another layer"
    else:
        return
    fix = "Name linear layers, or convolutions without groups, that have a weight of their own"
    raise ConfigError(f"model.adapter.targets: {target!r}: {name} {what}. {fix}.")


def layers_named(wanted: str, layers: Iterable[str]) -> list[str]:
    """Return those of the full names of layers that are a name, or end with it after a dot."""
    return [name for name in layers if f".{name}".endswith(f".{wanted}")]


def list_names(layers: Iterable[str]) -> str:
    """Return a sentence with the last parts of the full names of layers."""
    names = list(dict.fromkeys(name.rpartition(".")[2] for name in layers if name))
    more = ", ..." if len(names) > SHOWN_LAYERS else ""
    return f"Its layers are {', '.join(names[:SHOWN_LAYERS])}{more}."
