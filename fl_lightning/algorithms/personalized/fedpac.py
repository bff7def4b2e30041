"""FedPAC: clients align their features to global class centroids, and each gets its own mixture of all heads.

Xu, Tong, Huang: "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023,
Algorithm 1.

The two phases of a fit are FedRep's, and the alignment is FedProto's with centroids in place of prototypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.base import Algorithm, Batches
from fl_lightning.algorithms.personalized.fedproto import PrototypeAlignment, Prototypes
from fl_lightning.algorithms.personalized.fedrep import HeadThenBody
from fl_lightning.client.knowledge import Seen, SharedKnowledge, class_sums_over, with_previous
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, combine, stack, weighted_mean
from fl_lightning.models.base import with_encoder

HEAD = "head."
"""The prefix of the entries of the head."""


class Centroids(Prototypes):
    """The mean feature of each class, `(C, d)`, over all samples of the round's participants."""

    name = "centroids"

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's sum of features and number of samples for each class, `(C, d)` and `(C,)`."""
        sums, counts = self.output_sums(module, batches, num_classes)
        return {"sums": sums, "counts": counts}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return the mean feature of each class over all samples of the round's participants.

        A class without samples in this round keeps its previous mean.
        """
        sections = [upload.message.section(self.name) for upload in uploads]
        sums, counts = (torch.stack([own[name] for own in sections]).double().sum(dim=0) for name in ("sums", "counts"))
        means = (sums / counts.clamp(min=1)[:, None]).to(sections[0]["sums"].dtype)
        return with_previous(means, counts > 0, previous)


class FeatureAlignment(PrototypeAlignment):
    """Pulls features towards the global centroid of their class: `λ` times the mean squared distance.

    The term is off before there are centroids.

    Args:
        lam: λ, 0 or more; 0 switches the term off.
    """

    seen: Seen = field(default="after", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prototypes = Centroids()

    def begin(self, module: ClientModule) -> None:
        """Check that the model has an encoder and a head."""
        with_encoder(module.backbone)


def feature_statistics(sums: Tensor, squares: Tensor, samples: Tensor) -> tuple[Tensor, Tensor]:
    """Return a client's class means times class shares, `h_k = p_k μ_k`, `(C, d)`, and the variance of `h`, a scalar.

    The variance is `V / n` with `V = Σ_k p_k E_k||f||² - Σ_k p_k² ||μ_k||²`. The client's class shares are `p_k`, and
    its class means are `μ_k`.

    Args:
        sums: The sums of the client's features by class, `(C, d)`.
        squares: The sum of `||f||²` over all its samples.
        samples: n, the number of its samples.
    """
    means = sums / samples
    return means, (squares / samples - means.square().sum()).clamp(min=0) / samples


def collaboration_weights(means: Tensor, variances: Tensor) -> Tensor:
    """Return each participant's weights for mixing the heads of all participants, `(K, K)`.

    Row i minimises `||h_i - Σ_j a_j h_j||² + Σ_j a_j² V_j / n_j` over `a_j ≥ 0` with sum 1.

    Args:
        means: The participants' `h` from `feature_statistics`, `(K, C, d)`.
        variances: The participants' `V / n`, `(K,)`.
    """
    flat = means.double().flatten(start_dim=1)
    noise = variances.double().diag()
    return torch.stack([simplex_minimum((own - flat) @ (own - flat).T + noise) for own in flat])


def simplex_minimum(matrix: Tensor) -> Tensor:
    """Return the weights `a` that minimise `a' P a` for a given matrix `P`, with `a ≥ 0` and sum 1.

    It is a problem of non-negative least squares: for `P = R'R`, the `x ≥ 0` that minimises `||R x||² + (Σ x - 1)²` is
    a multiple of `a`.

    Args:
        matrix: `P`, symmetric and positive semi-definite, `(K, K)`, float64.
    """
    from scipy.optimize import nnls  # takes a third of a second to import

    values, vectors = torch.linalg.eigh(matrix / matrix.diagonal().mean().clamp(min=1e-300))
    root = values.clamp(min=0).sqrt()[:, None] * vectors.T
    target = torch.zeros(len(matrix) + 1, dtype=matrix.dtype)
    target[-1] = 1
    solution, _ = nnls(torch.cat([root, torch.ones_like(root[:1])]).numpy(), target.numpy(), maxiter=30 * len(matrix))
    weights = torch.from_numpy(solution)
    return weights / weights.sum()


class FeatureStatistics(SharedKnowledge):
    """Class means and variance of a client's features under the received model. They are sent to the server only.

    `FedPAC.prepare` computes them before training, with `feature_statistics`.
    """

    needs_classes = True
    name = "feature_statistics"

    def initial(self, num_classes: int) -> Tensors:
        """Return no tensors to broadcast in round 1, because the statistics are sent to the server only."""
        return {}

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's class means times its class shares, `(C, d)`, and the variance of the products, a scalar.

        `FedPAC.prepare` has computed them with `feature_statistics`.
        """
        return module.notes[self.name]

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return no tensors: the aggregator reads the uploaded statistics, and nothing is sent to the clients."""
        return {}


class ClassifierCollaboration(Aggregator):
    """Average the clients' bodies, and compute a mixture of all heads for each participant from feature statistics.

    The state keeps the mixed head of every client that has taken part. Other clients have the initial head.

    Args:
        weighting: Weight bodies by the clients' number of `samples`, or equally (`uniform`).
    """

    weighting: Weighting = "samples"

    needs_classes = True
    only_in = "FedPAC"

    @property
    def knowledge(self) -> tuple[SharedKnowledge, ...]:
        """The `FeatureStatistics` that clients send to the server together with the weights."""
        return (FeatureStatistics(),)

    def model_for(self, state: State, client: int) -> Tensors:
        """Return the shared body with the client's own mixture of heads."""
        return state["model"] | state.get(head_section(client), {})

    def finish(self, folded: list[Upload], round: Round, knowledge: State) -> State:
        """Return the mean body, and each participant's mixture of all heads."""
        models = [upload.message.section("model") for upload in folded]
        heads, bodies = ([entries_of(model, head) for model in models] for head in (True, False))
        statistics = stack([upload.message.section(FeatureStatistics.name) for upload in folded])
        combined = combine(collaboration_weights(statistics["means"], statistics["variance"]), stack(heads))
        weights = [upload.n_samples if self.weighting == "samples" else 1 for upload in folded]
        own = {
            head_section(upload.client): {name: value[i].clone() for name, value in combined.items()}
            for i, upload in enumerate(folded)
        }
        return {"model": round.before["model"] | weighted_mean(bodies, weights)} | own


def entries_of(model: Tensors, head: bool) -> Tensors:
    """Return the head's entries of a model's state dict; if `head` is false, return all other entries."""
    return {name: value for name, value in model.items() if name.startswith(HEAD) == head}


def head_section(client: int) -> str:
    """Return the key under which the server's state stores a client's mixed head."""
    return f"head_{client}"


class FedPAC(Algorithm):
    """FedRep that also aligns features to global class centroids, and gives each client its own mixture of all heads.

    Clients train the head on the received body, then the body under the new head with the alignment. Before that, they
    compute the statistics of their features by which the server weights the heads.

    Bytes a round, each participant: down `model + 4 * C * d + C`, up `model + 8 * C * d + 4 * C + 12`, and only `model`
    down in round 1.

    Kept by the server: the body, the centroids, and the mixed head of each client.

    Args:
        lam: λ, the weight of the alignment, 0 or more. The distance is averaged over samples and features.
        head_epochs: Number of epochs that train the head, 0 or more. The rest of the fit trains the body.
        weighting: Weight bodies by the clients' number of `samples`, or equally (`uniform`).
    """

    lam: float = 1.0
    head_epochs: int = number(1, "[0, inf)")
    weighting: Weighting = "samples"
    aggregator: Aggregator = field(init=False)

    search_space: ClassVar = {"lam": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0}}  # Xu et al.: 1
    one_model = False

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        self.module_class = partial(HeadThenBody, personal=(HEAD,), head_epochs=self.head_epochs)

    def own_terms(self) -> list[LossTerm]:
        """Return the alignment of features with class centroids."""
        return [FeatureAlignment(self.lam)]

    def own_aggregator(self) -> Aggregator:
        """Return the aggregator that mixes the clients' heads."""
        return ClassifierCollaboration(self.weighting)

    def prepare(self, module: ClientModule, batches: Batches, validation: Batches) -> None:
        """Compute statistics of the client's features under the received model, and keep them for the upload."""
        assert module.context.class_counts is not None

        def features_and_squares(x: Tensor) -> Tensor:
            features = at_least_float32(module.encoder(x))
            return torch.cat([features, features.square().sum(dim=1, keepdim=True)], dim=1)

        with torch.no_grad():
            sums, counts = class_sums_over(batches, features_and_squares, len(module.context.class_counts))
        means, variance = feature_statistics(sums[:, :-1], sums[:, -1].sum(), counts.sum())
        module.notes = {FeatureStatistics.name: {"means": means, "variance": variance}}
