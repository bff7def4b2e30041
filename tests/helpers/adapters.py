"""Small networks with LoRA adapters in plain torch, named as peft names them, and the exact mean of their products."""

import copy
from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import torch
from loops import State, cross_entropy_steps, steps_of
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning import FederatedOrchestrator
from fl_lightning.models import Backbone


class Adapter(nn.Module):
    """A frozen layer plus `s B A`, with the attributes of peft's layers that the methods read.

    Args:
        base: A linear layer.
        rank: The rank r.
        scaling: The factor s.
        transposed: Whether the weight of the layer is stored as `(n, m)`.
    """

    def __init__(self, base: nn.Linear, rank: int = 2, scaling: float = 0.5, transposed: bool = False) -> None:
        super().__init__()
        m, n = base.weight.shape
        self.base_layer, self.fan_in_fan_out = base.requires_grad_(False), transposed
        if transposed:
            base.weight.data = base.weight.data.T.contiguous()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(n, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, m, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)
        self.scaling = {"default": scaling}

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base_layer.weight.T if self.fan_in_fan_out else self.base_layer.weight
        change = self.lora_B["default"](self.lora_A["default"](x))
        return F.linear(x, weight, self.base_layer.bias) + self.scaling["default"] * change


class LowRankMLP(Backbone):
    """Two adapted layers (the second is square and stored transposed), BatchNorm, and a trained head."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int, rank: int = 3, dropout: float = 0.2) -> None:
        encoder = nn.Sequential(
            nn.Flatten(),
            Adapter(nn.Linear(prod(in_shape), 12), rank),
            nn.ReLU(),
            Adapter(nn.Linear(12, 12), rank, transposed=True),
            nn.BatchNorm1d(12, affine=False) if dropout else nn.Identity(),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        super().__init__(encoder, nn.Linear(12, num_classes), 12)


PLAIN = partial(LowRankMLP, dropout=0.0)
"""Without BatchNorm and dropout, for comparisons with loops."""

ADAPTED = {"encoder.1": 0.5, "encoder.3": 0.5}
"""The layers of a `LowRankMLP` that have adapters, with their scaling."""


def factor(path: str, part: str) -> str:
    """Return the name of a layer's factor, `A` or `B`."""
    return f"{path}.lora_{part}.default.weight"


def weight_of(model: State, path: str) -> Tensor:
    """Return a layer's whole weight `W + s B A`, in float64 and of shape `(m, n)`."""
    base = model[f"{path}.base_layer.weight"].double()
    product = model[factor(path, "B")].double() @ model[factor(path, "A")].double()
    return (base.T if path == "encoder.3" else base) + ADAPTED[path] * product


def mean_product(models: Sequence[State], path: str, sizes: Sequence[float]) -> Tensor:
    """Return the weighted mean of the clients' products `B_k A_k` of a layer, in float64, one by one."""
    total = sum(sizes)
    products = (one[factor(path, "B")].double() @ one[factor(path, "A")].double() for one in models)
    return sum(size / total * product for size, product in zip(sizes, products, strict=True))


def adapters_by_hand(
    run: FederatedOrchestrator,
    serve: Callable[..., State],
    is_frozen: Callable[[int, str], bool] = lambda round, name: False,
    rank: Callable[[int], int | None] = lambda client: None,
) -> State:
    """Return the shared model after the rounds of a loop that is written by hand.

    Args:
        run: The experiment. It gives the initial model, the participants and the batches.
        serve: Returns the entries of the next model that change, from the model, the clients' trained models, their
            numbers of samples and the round.
        is_frozen: Whether a parameter is not trained in a round.
        rank: A client's rank: the further rows of `A` and columns of `B` are zero.
    """
    run.load()
    model = copy.deepcopy(run.worker.template.backbone).train()
    for round in range(1, run.rounds + 1):
        ends, sizes = [], []
        for client in run.server.participants(round):
            local = copy.deepcopy(model)
            for name, parameter in local.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and not is_frozen(round, name))
                with torch.no_grad():
                    if "lora_A" in name and (limit := rank(client)):
                        parameter[limit:] = 0
                    if "lora_B" in name and (limit := rank(client)):
                        parameter[:, limit:] = 0
            cross_entropy_steps(local, steps_of(run, round, client))
            ends.append(local.state_dict())
            sizes.append(len(run.data.shards[client].train))
        before = copy.deepcopy(model.state_dict())
        model.load_state_dict(serve(before, ends, sizes, round), strict=False)
    return model.state_dict()


def whole_weights(model: State) -> State:
    """Return a model with the weight `W + s B A` in place of each layer's weight and factors."""
    others = {name: value for name, value in model.items() if "lora" not in name and "base_layer.weight" not in name}
    return others | {path: weight_of(model, path) for path in ADAPTED}
