"""HeteroFL: clients train narrower networks, whose weights are leading slices of the global model's.

Diao, Ding, Tarokh: "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021, Algorithm 1 and Section 3.

The global model is the widest network. A client with a narrower one receives the first rows and columns of each weight,
and the server averages each element over the clients that hold it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Algorithm
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import RunningMean, State, to_float64

Shapes = Mapping[str, torch.Size]


def leading_slice(value: Tensor, shape: torch.Size) -> Tensor:
    """Return the view of a tensor with the first elements of each dimension, of the given shape."""
    return value[tuple(slice(size) for size in shape)]


def fits_into(shape: torch.Size | None, whole: torch.Size | None) -> bool:
    """Return whether a tensor of one shape can be a leading slice of a tensor of another; False if one is missing."""
    if shape is None or whole is None:
        return False
    return len(shape) == len(whole) and all(size <= limit for size, limit in zip(shape, whole, strict=True))


def mean_of_slices(before: Tensor, slices: Sequence[tuple[Tensor, float]]) -> Tensor:
    """Return a tensor in which each element is the weighted mean over the slices that hold it (Section 3).

    Elements that no slice holds keep their value. Sums are float64. Integers become the largest of the slices'.

    Args:
        before: The tensor before the round.
        slices: New values of leading slices of it, and the weight of each.
    """
    if len(slices) == 1:
        result = before.clone()
        leading_slice(result, slices[0][0].shape).copy_(slices[0][0])
        return result
    floating = before.is_floating_point()
    total = torch.zeros_like(before, dtype=torch.float64 if floating else before.dtype)
    weights = torch.zeros_like(before, dtype=torch.float64)
    for value, weight in slices:
        place, held = (leading_slice(each, value.shape) for each in (total, weights))
        if floating:
            place.add_(value, alpha=weight)
        else:
            place.copy_(torch.where(held > 0, torch.maximum(place, value), value))
        held.add_(weight)
    return torch.where(weights > 0, total / weights if floating else total, before).to(before.dtype)


def widths_of(network: nn.Module) -> dict[str, int]:
    """Return the number of outputs of each linear layer and convolution of a network, by the layer's name."""
    found: dict[str, Any] = {
        name: getattr(layer, "out_features", getattr(layer, "out_channels", None))
        for name, layer in network.named_modules()
    }
    return {name: width for name, width in found.items() if isinstance(width, int)}


def scale_in_training(layer: nn.Module, inputs: Any, output: Tensor, *, ratio: float) -> Tensor:
    """Forward hook: divide the outputs of a layer by its relative width while it is trained (the paper's Scaler).

    Args:
        layer: The layer.
        inputs: Its inputs.
        output: Its outputs.
        ratio: Its width, relative to that of the same layer in the widest network.
    """
    return output / ratio if layer.training else output


@dataclass
class WidthMean:
    """The mean model of the clients with one width so far, in float64.

    Args:
        mean: The mean.
        weight: The sum of the clients' weights.
    """

    mean: RunningMean
    weight: float = 0.0


class SliceMean(Aggregator):
    """Averages each element of the weights over the clients that hold it, and sends clients leading slices.

    With one width it is `WeightedMean`, bit for bit.

    Args:
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).

    Attributes:
        shapes: The shapes of each client's weights, by client id. Others get the whole model.
    """

    weighting: Weighting = "uniform"

    only_in = "HeteroFL"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shapes: Sequence[Shapes] = ()

    def model_for(self, state: State, client: int) -> Tensors:
        """Return copies of the leading slices that a client holds, or the model itself if the client holds all."""
        model = state["model"]
        shapes = self.shapes[client] if client < len(self.shapes) else {}
        if all(shapes.get(name, value.shape) == value.shape for name, value in model.items()):
            return model
        return {name: leading_slice(value, shapes[name]).clone() for name, value in model.items()}

    def begin(self, round: Round) -> dict[tuple[torch.Size, ...], WidthMean]:
        """Return no means; `fold` adds one for each width."""
        return {}

    def fold(self, folded: dict[tuple[torch.Size, ...], WidthMean], upload: Upload) -> None:
        """Add an uploaded model to the mean of its width."""
        model = upload.message.section("model")
        of_width = folded.setdefault(tuple(value.shape for value in model.values()), WidthMean(RunningMean()))
        weight = upload.n_samples if self.weighting == "samples" else 1
        of_width.mean.add(to_float64(model), weight)
        of_width.weight += weight

    def finish(self, folded: dict[tuple[torch.Size, ...], WidthMean], round: Round, knowledge: State) -> State:
        """Return the model whose elements are the means over the clients that hold them."""
        means = [(each.mean.value(), each.weight) for each in folded.values()]
        before = round.before["model"]
        return {
            "model": {
                name: mean_of_slices(value, [(model[name], weight) for model, weight in means])
                for name, value in before.items()
            }
        }


class HeteroFL(Algorithm):
    """FedAvg of networks with different widths, whose weights are leading slices of the widest network's.

    The networks are those of a `Mixed`, the widest first. With one width this is FedAvg with `weighting: uniform`, bit
    for bit. The paper's masked cross-entropy and static BatchNorm are left out.

    Bytes a round, each participant: down `model`, up `model + 8`.

    Args:
        scaler: Divide the outputs of each linear layer and convolution by its relative width during training, so that
            they are as large as those of the widest network. Evaluation does not scale.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
    """

    scaler: bool = False
    weighting: Weighting = "uniform"
    aggregator: Aggregator = field(init=False)

    def __post_init__(self) -> None:
        """Begin without the widths of the widest network."""
        super().__post_init__()
        self._widest: dict[str, int] = {}

    def own_aggregator(self) -> Aggregator:
        """Return the element-wise mean over the clients that hold an element."""
        return SliceMean(self.weighting)

    def start_group(self, first: nn.Module) -> None:
        """Store the widths of the widest network, before a narrower one is built.

        Args:
            first: The widest network.
        """
        self._widest = widths_of(first)

    def prepare_network(self, backbone: nn.Module) -> None:
        """With `scaler`, scale the outputs of the layers that are narrower than those of the widest network."""
        for name, width in widths_of(backbone).items() if self.scaler else ():
            ratio = width / self._widest.get(name, width)
            if ratio < 1:
                backbone.get_submodule(name).register_forward_hook(partial(scale_in_training, ratio=ratio))

    def start_slices(self, shapes: Sequence[Shapes], groups: Sequence[int]) -> None:
        """Store the shapes of the clients' weights. The experiment calls it before round 1 if networks differ.

        Args:
            shapes: The shapes of the weights that are sent, of each network. The first is the global model's.
            groups: The number of each client's network, those of held-out clients last.

        Raises:
            ConfigError: A network has other entries than the first, or an entry is larger; or clients are held out.
        """
        assert isinstance(self.aggregator, SliceMean)
        widest, fix = shapes[0], "HeteroFL needs networks that differ in width alone, the widest first"
        for number, other in enumerate(shapes):
            for name in {**widest, **other}:
                sizes, limits = other.get(name), widest.get(name)
                if not fits_into(sizes, limits):
                    forms = ["missing" if form is None else tuple(form) for form in (sizes, limits)]
                    raise ConfigError(f"model: {fix}. {name!r} is {forms[0]} in network {number}, {forms[1]} in 0.")
        if len(groups) > self.aggregator.clients:
            raise ConfigError("scenario.held_out_clients: HeteroFL has no width for a new client. Set it null.")
        self.aggregator.shapes = [shapes[group] for group in groups]
