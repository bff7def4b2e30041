"""LoRA adapters of a network, and products of their factors, for the methods of this family.

LoRA (Hu et al., ICLR 2022) adds `s B A` to the weight of a layer, with the scaling `s` and the factors `B`, of shape
`(m, r)`, and `A`, of shape `(r, n)`. In a convolution, `n` is the number of input channels times the kernel's size. The
factors are found by the names that peft gives them, `lora_A` and `lora_B`, so peft itself is not needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message


def belongs_to_a(name: str) -> bool:
    """Return whether an entry of a network's state dict belongs to a factor `A`."""
    return ".lora_A." in f".{name}"


def belongs_to_b(name: str) -> bool:
    """Return whether an entry of a network's state dict belongs to a factor `B`."""
    return ".lora_B." in f".{name}"


def is_base_weight(name: str) -> bool:
    """Return whether an entry of a network's state dict is the frozen weight of a layer with adapters."""
    return f".{name}".endswith(".base_layer.weight")


def without_entries(message: Message, is_left_out: Callable[[str], bool]) -> Message:
    """Return a message without those entries of the section `model` for which a function of the name is true."""
    model = {name: value for name, value in message.section("model").items() if not is_left_out(name)}
    return Message.pack({**message.sections, "model": model}, **message.numbers)


@dataclass(frozen=True)
class AdapterLayer:
    """A layer with an adapter.

    Args:
        path: Name of the layer in the network.
        scaling: The factor `s` on the product `B A`.
        transposed: Whether the weight has the shape `(n, m)`, as in the `Conv1D` of Hugging Face's GPT-2.
        adapter: Name of the adapter.
    """

    path: str
    scaling: float = 1.0
    transposed: bool = False
    adapter: str = "default"

    @property
    def a(self) -> str:
        """Name of the factor `A` in the network's state dict."""
        return f"{self.path}.lora_A.{self.adapter}.weight"

    @property
    def b(self) -> str:
        """Name of the factor `B` in the network's state dict."""
        return f"{self.path}.lora_B.{self.adapter}.weight"

    @property
    def base(self) -> str:
        """Name of the frozen weight in the network's state dict."""
        return f"{self.path}.base_layer.weight"

    def add(self, weight: Tensor, product: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the frozen weight plus `s` times a product of factors. The sum is computed in float64.

        Args:
            weight: The frozen weight, `(m, n)`, or `(n, m)` if it is transposed, or that of a convolution.
            product: `(m, n)`.
            dtype: That of the factors. The result has this dtype or the weight's, whichever is more precise.
        """
        change = self.scaling * (product.T if self.transposed else product)
        return (weight.double() + change.reshape(weight.shape)).to(torch.promote_types(weight.dtype, dtype))


def adapter_layers(backbone: nn.Module) -> tuple[AdapterLayer, ...]:
    """Return the layers of a network that have LoRA adapters.

    Raises:
        ConfigError: There is none, or an adapter is not a product `B A` that is added to the weight of one layer.
    """
    found: list[AdapterLayer] = []
    uses = Counter(map(id, (value for _, value in backbone.named_parameters(remove_duplicate=False))))
    for path, layer in backbone.named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            _check_layer(path, layer, uses)
            transposed = bool(getattr(layer, "fan_in_fan_out", False))
            found += [AdapterLayer(path, float(layer.scaling[name]), transposed, name) for name in layer.lora_A]
    if not found:
        fix = "Use --model Adapted, or inject peft's LoRA into a model of your own"
        raise ConfigError(f"model: this method needs LoRA adapters, and {type(backbone).__name__} has none. {fix}.")
    return tuple(found)


def _check_layer(path: str, layer: Any, uses: Counter[int]) -> None:
    """Raise an error if the adapters of a layer are not products that are added to a weight of this layer only."""
    if len(getattr(layer, "lora_embedding_A", ())) or len(getattr(layer, "lora_magnitude_vector", ())):
        fix = "Use LoRA on linear layers and convolutions, or --algorithm FedAvg."
        raise ConfigError(f"model: {path} has an adapter of an embedding, or of DoRA. {fix}")
    if uses[id(layer.base_layer.weight)] > 1:
        fix = "Adapt layers that have a weight of their own."
        raise ConfigError(f"model: {path} has an adapter, but shares its weight with another layer. {fix}")
    for adapter in layer.lora_A:
        b, a = layer.lora_B[adapter].weight, layer.lora_A[adapter].weight
        if len(b) * a[0].numel() != layer.base_layer.weight.numel():
            fix = "Adapt linear layers, and convolutions without groups."
            raise ConfigError(f"model: the adapter of {path} has not the size of its weight. {fix}")


def stack_factors(factors: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Return one pair of factors, in float64, whose product is the weighted mean of the products `B_k A_k`.

    The factors are `[p_1 B_1, ..., p_K B_K]` and `[A_1; ...; A_K]`, with the weights `p_k` divided by their sum.

    Args:
        factors: The pairs `(B_k, A_k)`, of shapes `(m, r_k)` and `(r_k, n)`, or those of convolutions.
        weights: A weight of each pair, 0 or more.

    Returns:
        Tensors `(m, R)` and `(R, n)`, where `R` is the sum of the ranks `r_k`.

    Example:
        >>> ones = (torch.ones(1, 1), torch.ones(1, 2))
        >>> b, a = stack_factors([ones, (2 * ones[0], 3 * ones[1])], weights=[1, 3])
        >>> (b @ a).tolist()
        [[4.75, 4.75]]
    """
    total = sum(weights)
    b = torch.cat([weight / total * b.double().flatten(1) for (b, _), weight in zip(factors, weights, strict=True)], 1)
    return b, torch.cat([a.double().flatten(1) for _, a in factors])
