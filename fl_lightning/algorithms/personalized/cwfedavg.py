"""cwFedAVG: one global model for each class, a mixture of them for each client, and a regularizer (WDR).

Lee, Choi: "Regularizing and Aggregating Clients with Class Distribution for Personalized Federated Learning", 2024.
Sections, equations and tables below are the paper's.

The server estimates each client's class distribution from the row norms of its classification layer, so clients upload
only weights and sample counts. The weight distribution regularizer (WDR, a loss term) improves that estimate. Both
parts also work in other methods: `WeightDistribution` in `loss_terms`, `ClassWise` as `aggregator`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator
from fl_lightning.algorithms.base import UNSET, Algorithm, Buffers
from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.precision import at_least_float32, without_autocast
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, combine, stack, to_float64, weighted_mean
from fl_lightning.models import classification_layer

Distribution = Literal["weights", "true"]

BLOCK_BYTES = 64 << 20
"""Memory limit of the initial models that are computed together, in float64."""

# --- Section 4: class distributions, in the data and in the weights ----------------------------------------------


def class_shares(counts: Tensor) -> Tensor:
    """Return the class shares `p_i` of a client's data, `(C,)`, from its class counts."""
    counts = counts.float()
    return counts / counts.sum().clamp(min=1)


def weight_distribution(weight: Tensor) -> Tensor:
    """Return a client's class distribution, `(C,)`, estimated from the row norms of its classification layer (Eq. 9).

    It is `p̃_ij = ||θ_ij||_2 / Σ_j ||θ_ij||_2` for client i and class j, and uniform if every row is zero.

    Args:
        weight: The classification layer's weights, `(C, d)`; row j is `θ_ij`.
    """
    norms = weight.norm(dim=1)
    total = norms.sum()
    return torch.where(total > 0, norms / total.where(total > 0, 1.0), 1 / len(norms))


def distribution_gap(shares: Tensor, weight: Tensor) -> Tensor:
    """Return the distance `||p_i - p̃_i||_2` between a client's true and estimated class distributions (WDR).

    Args:
        shares: `p_i`, `(C,)`.
        weight: `(C, d)`.
    """
    return (shares - weight_distribution(weight)).norm()


class WeightDistribution(LossTerm):
    """Regularizer WDR, `λ ||p_i - p̃_i||_2`: pulls the last layer's row norms towards the client's class shares.

    The true shares stay on the client: they come from the module's `class_counts`.

    Args:
        lam: λ, 0 or more; 0 switches the term off.
        reference: As in the authors' code, use half of λ.

    Raises:
        ConfigError: A fit begins in a module without `class_counts`.

    Example:
        >>> term = WeightDistribution(lam=1.0)
        >>> term.shares = torch.tensor([1.0, 0.0])
        >>> layer = torch.nn.Linear(4, 2)
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> round(term(Step(torch.zeros(1, 2), torch.tensor([0]), backbone=layer)).item(), 4)
        0.7071
    """

    lam: float = number(10.0, "[0, inf)", "the paper's code uses 10")
    reference: bool = False

    needs_classes = True
    name = "wdr"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.scale = self.lam / 2 if self.reference else self.lam
        self.active = self.lam > 0
        self.shares: Tensor | None = None

    def begin(self, module: ClientModule) -> None:
        """Keep the client's class shares `p_i` for the fit."""
        self.shares = class_shares(module.class_counts_for(self))

    def forward(self, step: Step) -> Tensor:
        """Return the regularizer `λ ||p_i - p̃_i||_2` at the current weights, or zero outside a fit."""
        if self.shares is None or step.backbone is None:
            return self.outside_fit(step.logits.new_zeros(()))
        weight = classification_layer(step.backbone).weight
        with without_autocast(weight.device):
            return self.scale * distribution_gap(self.shares, at_least_float32(weight))


# --- Section 3: class-wise aggregation ---------------------------------------------------------------------------


def class_weights(samples: Tensor, distributions: Tensor) -> Tensor:
    """Return each client's weight in the model of each class, `(K, C)`, normalised over the clients (Eq. 4-5).

    That is `q_ij = p_i p̃_ij / Σ_i p_i p̃_ij`, in float64. A column with sum zero stays zero.

    Args:
        samples: `N_i`, `(K,)`; `p_i = N_i / N`.
        distributions: `p̃_ij`, `(K, C)`.
    """
    mass = samples.double()[:, None] / samples.sum() * distributions.double()
    total = mass.sum(dim=0)
    return torch.where(total > 0, mass / total.where(total > 0, 1.0), 0.0)


def mixing_weights(distribution: Tensor, q: Tensor) -> Tensor:
    """Return the weight of each uploaded model in a client's initial model of a round, `(K,)` (Eq. 3 and 7).

    The initial model of client i is `Σ_m (Σ_j p̃_ij q_mj) w_m`.

    Args:
        distribution: `p̃_i`, `(C,)`, or `(n, C)` for n clients, which gives `(n, K)`.
        q: `(K, C)`.
    """
    return distribution.double() @ q.double().T


def class_models(state: State) -> Tensors:
    """Compute the class models `w_j^G = Σ_i q_ij w_i` (Eq. 3) from the server's state. Each tensor is `(C, ...)`."""
    return combine(state["weights"]["value"].T, state["sources"])


class ClassShares(SharedKnowledge):
    """The clients' true class shares. They are uploaded with `distribution: true`, and never broadcast."""

    needs_classes = True
    name = "class_shares"

    def initial(self, num_classes: int) -> Tensors:
        """Return no tensors, because class shares are never broadcast."""
        return {}

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's class shares `p_i`, `(C,)`."""
        assert module.context.class_counts is not None
        return {"values": class_shares(module.context.class_counts)}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return no tensors, because class shares are only read by the aggregator."""
        return {}


class ClassWise(Aggregator):
    """Average one model per class. Send each client a mixture of these models, weighted by its class distribution.

    Class models are not stored. The state keeps the round's uploads and `q`, from which the initial model of any client
    is a weighted sum. All uploads of a round are therefore in memory at once. The shared `model` is FedAvg's mean of
    the uploads, for evaluation only. A client that has never taken part has a uniform class distribution (Algorithm 1,
    line 4).

    Args:
        distribution: `weights` estimates class distributions from the classification layer, as in the paper. With
            `true`, clients upload their class shares (Table 1, "w/ Dist.").

    Raises:
        ConfigError: The model does not have a classification layer in a part called `head`.
    """

    distribution: Distribution = "weights"

    needs_classes = True
    leaves = ("weights",)

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The clients' true class shares if the aggregation uses them, otherwise nothing."""
        return (ClassShares(),) if self.distribution == "true" else ()

    def initial(self, model: Tensors, num_classes: int) -> State:
        """Return the aggregator's state before round 1, in which every class model is the initial model."""
        if self.distribution == "weights":
            class_layer_name(model)  # before round 1, refuse a model without a classification layer
        q = torch.ones(1, num_classes, dtype=torch.float64)
        return {
            "sources": stack([model]),
            "weights": {"client": torch.tensor([-1]), "value": q},
            "distributions": {},
        }

    def model_for(self, state: State, client: int) -> Tensors:
        """Return the model from which a client starts: class models mixed by its latest class distribution (Eq. 7)."""
        name = start_section(client)
        return state[name] if name in state else next(self.ahead(state, [client]))[name]

    def ahead(self, state: State, clients: Iterable[int]) -> Iterator[State]:
        """For each client, yield a copy of the server state that also contains the client's start model as a section.

        The models are computed for a block of clients at a time. The product of a block always has the same shape, so
        its rounding does not depend on the number of clients. The models are mixed from class models or uploads,
        whichever are fewer, in float64.
        """
        sources, q, known = state["sources"], state["weights"]["value"], state["distributions"]
        unknown = torch.full((q.shape[1],), 1 / q.shape[1], dtype=q.dtype)
        by_class = q.shape[1] < len(q)
        basis = combine(q.T, sources, rounded=False) if by_class else to_float64(sources)
        rows = block_rows(sources)
        for block in blocks(clients, rows):
            shares = torch.zeros(rows, q.shape[1], dtype=q.dtype)
            for client in block:
                shares[client % rows] = known.get(str(client), unknown)
            mixed = combine(shares if by_class else mixing_weights(shares, q), basis, rounded=False)
            for client in block:
                own = {name: value[client % rows].to(sources[name].dtype, copy=True) for name, value in mixed.items()}
                yield state | {start_section(client): own}

    def finish(self, folded: list[Upload], round: Round, knowledge: State) -> State:
        """Return the uploads and their weights in each class model (Eq. 4-5).

        A class of weight 0 keeps its model.
        """
        models = [upload.message.section("model") for upload in folded]
        samples = torch.tensor([upload.n_samples for upload in folded])
        distributions = torch.stack([self._distribution(upload) for upload in folded])
        q = class_weights(samples, distributions)
        clients = [upload.client for upload in folded]
        kept = (q.sum(dim=0) == 0).nonzero()[:, 0]
        if len(kept):
            old = combine(round.before["weights"]["value"].T[kept], round.before["sources"])
            models += [{name: value[i] for name, value in old.items()} for i in range(len(kept))]
            q = torch.cat([q, torch.eye(q.shape[1], dtype=q.dtype)[kept]])
        latest = {str(client): row for client, row in zip(clients, distributions, strict=True)}
        return {
            "model": weighted_mean(models[: len(clients)], samples.tolist()),
            "sources": stack(models),
            "weights": {"client": torch.tensor(clients + [-1] * len(kept)), "value": q},
            "distributions": round.before["distributions"] | latest,
        }

    def _distribution(self, upload: Upload) -> Tensor:
        if self.distribution == "true":
            shares = upload.message.section(ClassShares.name)["values"].double()
            return shares / shares.sum()
        return weight_distribution(class_layer(upload.message.section("model")).double())


def start_section(client: int) -> str:
    """Return the key under which the server's state stores the model that a client starts a round from.

    `ClassWise.ahead` adds this key.
    """
    return f"start_{client}"


def block_rows(stacked: Tensors) -> int:
    """Return the size of a block: the number of clients whose start models are computed together in one array.

    It is at most 16, and smaller for large models.
    """
    numbers = sum(value[0].numel() for value in stacked.values())
    return max(1, min(16, BLOCK_BYTES // (8 * numbers)))


def blocks(clients: Iterable[int], rows: int) -> Iterator[list[int]]:
    """Split client ids, in order, into blocks. Within a block, all values of `client % rows` are different.

    This value is the client's row in the arrays of its block.
    """
    block: dict[int, int] = {}
    for client in clients:
        if client % rows in block:
            yield list(block.values())
            block = {}
        block[client % rows] = client
    if block:
        yield list(block.values())


def class_layer(model: Tensors) -> Tensor:
    """Return the classification layer's weights `(C, d)` among the entries of a model's state dict."""
    return model[class_layer_name(model)]


def class_layer_name(model: Tensors) -> str:
    """Return the state-dict key of the classification layer's weights: the last matrix of the `head`.

    Raises:
        ConfigError: There is no such entry.
    """
    matrices = [name for name, value in model.items() if name.startswith("head.") and value.ndim == 2]
    if not matrices:
        raise ConfigError("model: class-wise averaging needs a `head` that ends with a linear layer. Use such a model.")
    return matrices[-1]


# --- The method --------------------------------------------------------------------------------------------------


class CwFedAvg(Algorithm):
    """Class-wise averaging with the regularizer WDR. Every client starts from its own mix of class models.

    Variants of Table 1: `lam: 0` is "w/o WDR", and `distribution: true` with `lam: 0` is "w/ Dist.".

    Bytes a round, each participant: down `model`, up `model + 8`, and `4 * C` more with `distribution: true`.

    Kept by the server: the uploads of the round, and each client's class distribution.

    Args:
        lam: λ, the weight of the regularizer.
        distribution: Source of the class distributions: the `weights`, or the `true` class shares.
        preset: `paper`, or `reference` for the authors' published code: half of λ, no training on an incomplete last
            batch, and BatchNorm's statistics never leave the client (`buffers: local`).
        buffers: BatchNorm's running statistics: `average`, `local` or `drop`. The default depends on the preset.
    """

    lam: float = 10.0
    distribution: Distribution = "weights"
    preset: Literal["paper", "reference"] = "paper"
    buffers: Buffers = UNSET

    search_space: ClassVar = {  # around Fig. 3, without its 0
        "lam": {"distribution": "log_uniform_values", "min": 0.1, "max": 50.0},
    }
    trains_new_clients = True
    aggregator_options = ("distribution",)

    def __post_init__(self) -> None:
        """Follow the paper or the authors' code, as `preset` says."""
        super().__post_init__()
        self.drop_last = self.preset == "reference"
        self.buffers = self.buffers or ("local" if self.drop_last else "average")

    def own_terms(self) -> list[LossTerm]:
        """Return the regularizer WDR."""
        return [WeightDistribution(self.lam, self.preset == "reference")]

    def own_aggregator(self) -> Aggregator:
        """Return the average of one model per class."""
        return ClassWise(self.distribution)
