"""DisPFL: peers with sparse personalised models. Each model has a mask that changes during training.

Dai, Shen, He, Tian, Tao: "DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized
Sparse Training", ICML 2022, Algorithms 1 and 2. Densities of layers by ERK: Evci, Gale, Menick, Castro, Elsen:
"Rigging the Lottery: Making All Tickets Winners", ICML 2020.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Batches
from fl_lightning.algorithms.decentralized.peers import LAID_OUT, PeerAlgorithm
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Message, Tensors, Upload, tensors_to_message
from fl_lightning.core.state_dicts import State, pack_mask, unpack_mask, weighted_mean

Regrow = Literal["gradient", "random", "none"]

NEXT = "next_masks"
"""The section of the client state with the mask of the client's next round."""

# --- Masks -------------------------------------------------------------------------------------------------------


def erk_densities(shapes: Mapping[str, torch.Size], dense_ratio: float) -> dict[str, float]:
    """Return the density (share of true entries) of each tensor's mask. Smaller tensors usually get denser masks.

    The densities follow the Erdős-Rényi kernel (ERK), `min(1, ε Σ shape / Π shape)`. ε is chosen so that the masks
    contain the share `dense_ratio` of all entries.
    """
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    if dense_ratio >= 1:
        return dict.fromkeys(sizes, 1.0)
    full = {name for name, size in sizes.items() if not size}
    raw = {name: (sum(shape) or 1) / sizes[name] for name, shape in shapes.items() if name not in full}
    while True:
        budget = dense_ratio * sum(sizes.values()) - sum(sizes[name] for name in full)
        epsilon = budget / sum(raw[name] * sizes[name] for name in sizes if name not in full)
        over = {name for name in sizes if name not in full and epsilon * raw[name] > 1}
        if not over:
            return {name: 1.0 if name in full else epsilon * raw[name] for name in sizes}
        full |= over


def random_mask(shape: torch.Size, density: float) -> Tensor:
    """Return a random boolean mask. A share `density` of its entries is true, but at least one entry."""
    mask = torch.zeros(shape.numel(), dtype=torch.bool)
    mask[torch.randperm(len(mask))[: max(1, round(density * len(mask)))]] = True
    return mask.view(shape)


def search_rate(round: int, prune_rate: float, rounds: int) -> float:
    """Return the share of mask entries to replace in a round. It falls from `prune_rate` to 0 along a cosine.

    It is `α_t = a/2 (1 + cos(π t / T))` in round `t`, with `a` the `prune_rate` and `T` the `rounds`; 0 from `T` on.
    """
    return prune_rate / 2 * (1 + math.cos(math.pi * min(round, rounds) / rounds))


def next_mask(weights: Tensor, mask: Tensor, score: Tensor, rate: float) -> Tensor:
    """Return the next mask (Alg. 2): drop the entries with the smallest weights, add as many with the highest scores.

    `⌈α nnz⌉` of the mask's `nnz` entries are replaced. An entry that was just dropped can come back.

    Args:
        weights: `(...)`, zero outside the mask.
        mask: `(...)` bool.
        score: `(...)`; the entries with the highest scores are added.
        rate: α.
    """
    kept, count = mask.flatten().clone(), math.ceil(rate * int(mask.sum()))
    size = weights.abs().flatten().where(kept, torch.inf)
    kept[size.topk(count, largest=False).indices] = False
    kept[score.flatten().where(~kept, -torch.inf).topk(count).indices] = True
    return kept.view(mask.shape)


def scatter_values(values: Tensor, mask: Tensor) -> Tensor:
    """Return a tensor with the given values `(nnz,)` where a mask is True, and zero elsewhere."""
    return torch.zeros(mask.shape, dtype=values.dtype).masked_scatter_(mask, values)


def mean_inside_masks(weights: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """Return the mean of each weight over the clients whose mask contains it (Eq. 4); 0 if no mask contains it.

    Args:
        weights: The weights of each client, zero outside its mask.
        masks: The masks that they were trained with.
    """
    total = torch.stack([one.double() for one in weights]).sum(dim=0)
    count = torch.stack(list(masks)).sum(dim=0)
    return (total / count.clamp(min=1)).to(weights[0].dtype)


# --- The method --------------------------------------------------------------------------------------------------


class MaskedModule(ClientModule):
    """A client's module that trains only the weights inside a sparse mask.

    Attributes:
        masks: The masks of the backbone's parameters by name. Parameters without a mask are trained completely.
        next_masks: The masks of the client's next round.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.masks: Tensors = {}
        self.next_masks: Tensors = {}

    def on_fit_start(self) -> None:
        """Set the weights outside the mask to zero before the fit."""
        self.masks = {name: mask.to(self.device) for name, mask in self.masks.items()}
        apply_masks(self.backbone, self.masks)
        super().on_fit_start()

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the gradient outside the mask to zero, `g ⊙ m` (Algorithm 1, line 9)."""
        for name, parameter in self.backbone.named_parameters():
            if parameter.grad is not None and name in self.masks:
                parameter.grad.mul_(self.masks[name])

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Set the weights outside the mask to zero. Momentum from rounds with other masks may have moved them."""
        apply_masks(self.backbone, self.masks)


def apply_masks(backbone: nn.Module, masks: Tensors) -> None:
    """Set a backbone's weights outside their masks to zero, in place."""
    with torch.no_grad():
        for name, parameter in backbone.named_parameters():
            if name in masks:
                parameter.mul_(masks[name].to(parameter.device))


class DisPFL(PeerAlgorithm):
    """Peers with sparse personalised models, averaged where their masks overlap. Masks change every round.

    In each round a client averages every entry of its mask over itself and the peers that have it. It trains within the
    mask, drops the smallest weights and adds other entries for the next round. The layers' densities are those of ERK.
    With `dense_ratio` 1 this is `PeerAlgorithm` with `weighting: uniform`. There is no global model.

    Bytes a round, each participant, at most: down
    `(n_com or N - 1) * (4 * dense_ratio * P + P / 8 + 5 * T + buffers + 8)`, up `0`.

    Kept by a client: its model and its masks.

    Args:
        dense_ratio: Share of the parameters that are in a mask, above 0; 1 or more keeps all.
        prune_rate: a, the initial share of a tensor's entries that is replaced, in [0, 1].
        search_rounds: T, the number of rounds over which that share falls to 0 by a cosine, such as `rounds`.
        regrow: Which entries are added: those with the largest `gradient` of the cross-entropy over the client's data,
            or `random` ones. With `none`, masks do not change.
    """

    dense_ratio: float = number(0.5, "(0, inf)", "the paper uses 0.5")
    prune_rate: float = number(0.5, "[0, 1]", "the paper uses 0.5")
    search_rounds: int = number(500, "[1, inf)")
    regrow: Regrow = "gradient"
    aggregator: Aggregator = field(init=False)
    weighting: Weighting = field(default="samples", init=False)

    search_space: ClassVar = {  # Dai et al.: 0.2 to 0.8
        "dense_ratio": {"distribution": "uniform", "min": 0.2, "max": 0.8},
    }
    one_model = False
    whole = False
    uploads_vary = True
    module_class = MaskedModule

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.dense_ratio = min(self.dense_ratio, 1.0)

    def receive(self, module: ClientModule, download: Message, memory: State) -> None:
        """Load the masked mean of the client's and its peers' models. A client without a mask gets a random one.

        These are lines 5-6 of Algorithm 1. If nothing was collected, the trained weights stay unmasked until the next
        fit begins.
        """
        assert isinstance(module, MaskedModule)
        super().receive(module, download, memory)
        parameters = module.backbone.named_parameters()
        shapes = {name: parameter.shape for name, parameter in parameters if name not in self.fixed}
        masks = memory.get(NEXT) or tensors_to_message(memory.get(LAID_OUT, {})).section("masks")
        if masks:
            module.masks = {name: unpack_mask(masks[name], shape) for name, shape in shapes.items()}
        else:
            densities = erk_densities(shapes, self.dense_ratio)
            module.masks = {name: random_mask(shape, densities[name]) for name, shape in shapes.items()}
        if download.numbers or not masks:
            apply_masks(module.backbone, module.masks)

    def mix(self, own: Message, received: Sequence[Upload]) -> Tensors:
        """Return each weight's mean over the clients whose mask contains it, and the mean BatchNorm statistics."""
        messages = [own, *(upload.message for upload in received)]
        shapes = {name: value.shape for name, value in own.section("model").items()}
        masks = [message.section("masks") for message in messages]
        values = [message.section("values") for message in messages]
        mixed: Tensors = {}
        for name in masks[0]:
            unpacked = [unpack_mask(mask[name], shapes[name]) for mask in masks]
            weights = [scatter_values(v[name], mask) for v, mask in zip(values, unpacked, strict=True)]
            mixed[name] = mean_inside_masks(weights, unpacked)
        statistics = [message.section("model") for message in messages]
        # the client's own message also has its masked weights there, see `receive`
        statistics[0] = {name: value for name, value in statistics[0].items() if name not in mixed}
        return mixed | weighted_mean(statistics, [1.0] * len(messages))

    def upload(self, module: ClientModule, batches: Batches, n_samples: int, num_classes: int) -> Message:
        """Return the client's mask and the weights inside it, and compute the mask of its next round."""
        assert isinstance(module, MaskedModule)
        message = super().upload(module, batches, n_samples, num_classes)
        model = message.section("model")
        masks = {name: mask.cpu() for name, mask in module.masks.items()}
        sections = {
            "model": {name: value for name, value in model.items() if name not in masks},
            "values": {name: model[name][mask] for name, mask in masks.items()},
            "masks": {name: pack_mask(mask) for name, mask in masks.items()},
        }
        module.next_masks = self.search_mask(module, batches)
        return message.without("model").plus(sections)

    def remember(self, module: ClientModule, upload: Message) -> State:
        """Return the client state: the weights that peers may collect, and the mask of the client's next round."""
        assert isinstance(module, MaskedModule)
        kept = super().remember(module, upload)
        masks = {name: pack_mask(mask) for name, mask in module.next_masks.items()}
        return kept | {NEXT: masks} if module.context.round else kept  # before round 1, it is the published mask

    def is_untrained(self, module: ClientModule, memory: State) -> bool:
        """Return whether the client has never trained, so that its weights are initial ones."""
        return NEXT not in memory

    def search_mask(self, module: MaskedModule, batches: Batches) -> Tensors:
        """Return the masks of the client's next round: the current ones, with some entries replaced.

        They do not change before round 1, at a rate of 0, or if `regrow` is `none`.
        """
        rate = search_rate(module.context.round - 1, self.prune_rate, self.search_rounds)
        if not module.context.round or not rate or self.regrow == "none":
            return module.masks
        weights = {name: parameter.detach() for name, parameter in module.backbone.named_parameters()}
        if self.regrow == "gradient":
            scores = gradient_sizes(module, batches)
        else:
            scores = {name: torch.rand(weight.shape) for name, weight in weights.items()}
        return {
            name: next_mask(weights[name].cpu(), mask.cpu(), scores[name].cpu(), rate)
            for name, mask in module.masks.items()
        }


def gradient_sizes(module: ClientModule, batches: Batches) -> Tensors:
    """Return the absolute value of each weight's gradient, for the sum of the loss over a client's data.

    Weights outside the mask are included.
    """
    parameters = dict(module.backbone.named_parameters())
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for x, y in batches:
        with torch.enable_grad():
            loss = module.objective.loss(module(x), y, "sum")
            parts = torch.autograd.grad(loss, [parameters[name] for name in trained], materialize_grads=True)
        for name, part in zip(trained, parts, strict=True):
            sums[name] += part
    return {name: total.abs() for name, total in sums.items()}
