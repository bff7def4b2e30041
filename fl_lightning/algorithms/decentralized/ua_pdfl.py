"""UA-PDFL: peers compare their models' outputs for a constant input. Similar peers share more parts of their models.

Zhu, Fan, Xie: "UA-PDFL: A Personalized Approach for Decentralized Federated Learning", 2024. Equations and algorithms
below are the paper's.

There is no server. The output of a model on a constant tensor, its unit representation, stands for its client's data.
If all peers are similar, a client takes over the model of one peer (client-wise dropout). Otherwise it averages feature
extractors with all peers and classifiers with similar peers (layer-wise personalisation). The term of Eq. 12,
`UnitAlignment`, also works in methods with a server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import field
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fl_lightning.algorithms.aggregators import Aggregator, Weighting
from fl_lightning.algorithms.decentralized.peers import PeerAlgorithm
from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.arguments import number
from fl_lightning.core.errors import check_number
from fl_lightning.core.message import Message, Tensors, Upload
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import weighted_mean
from fl_lightning.models import with_encoder

Divergence = Literal["jensen_shannon", "symmetric_kl"]

# --- Section 3.2: unit representation ----------------------------------------------------------------------------


def unit_input(inputs: Any, value: float = 1.0) -> Any:
    """Return the unit input `X_unit` (Eq. 4), a constant tensor in the shape of one input, as a batch of one.

    Args:
        inputs: Any batch `(B, ...)`, a tensor or `Inputs`.
        value: The constant.
    """
    return torch.full_like(inputs[:1], value)


def unit_representation(logits: Tensor) -> Tensor:
    """Return the class probabilities `I = softmax(f(X_unit))` (Eq. 5), from the logits for the unit input `X_unit`."""
    return at_least_float32(logits).softmax(dim=1)[0]


def symmetric_kl(one: Tensor, other: Tensor) -> float:
    """Return the symmetric KL divergence of two class distributions, `½ KL(I_i || I_j) + ½ KL(I_j || I_i)` (Eq. 6)."""
    p, q = clamp_probabilities(one), clamp_probabilities(other)
    return float(((p - q) * (p / q).log()).sum() / 2)


def jensen_shannon(one: Tensor, other: Tensor) -> float:
    """Return the Jensen-Shannon divergence of two class distributions `(C,)`, in nats. It is at most ln 2."""
    p, q = clamp_probabilities(one), clamp_probabilities(other)
    log_mixture = ((p + q) / 2).log()
    value = ((p * (p.log() - log_mixture)).sum() + (q * (q.log() - log_mixture)).sum()) / 2
    return max(float(value), 0.0)


def clamp_probabilities(distribution: Tensor) -> Tensor:
    """Return a class distribution in float64, with probabilities below 1e-8 raised to 1e-8."""
    return distribution.double().clamp(min=1e-8)


DIVERGENCES = {"jensen_shannon": jensen_shannon, "symmetric_kl": symmetric_kl}


class UnitRepresentation(SharedKnowledge):
    """Outputs of each client's model for a constant input (unit input): class probabilities `I` and features `I^Aux`.

    A client sends `I` (Eq. 5), `(C,)`, and `I^Aux = g(X_unit)` (Eq. 11), `(d,)`.

    Args:
        value: The constant in `X_unit`.
        reference: As in the authors' code, average `I^Aux` over the peers only, weighted by samples.
    """

    needs_classes = True
    name = "unit"

    def __init__(self, value: float = 1.0, reference: bool = False) -> None:
        super().__init__()
        check_number("algorithm.unit", value, "(-inf, inf)")
        self.value, self.reference = value, reference
        self.average: Tensor | None
        self.register_buffer("average", None, persistent=False)

    def initial(self, num_classes: int) -> Tensors:
        """Return no tensors, because there are no averaged features before round 1."""
        return {}

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the model's outputs for the constant unit input: class probabilities `I` and features `I^Aux`."""
        unit = unit_input(next(iter(batches))[0], self.value)
        features = with_encoder(module.backbone).encoder(unit)
        return {"distribution": unit_representation(module.backbone(unit)), "features": at_least_float32(features[0])}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return the average `I^Aux_avg` of the clients' features for the unit input.

        Between peers, the first upload is the client's own.
        """
        counted = [upload for upload in uploads if upload.client >= 0 or not self.reference]
        if not counted:
            return previous
        features = torch.stack([upload.message.section(self.name)["features"] for upload in counted])
        weights = torch.tensor([upload.n_samples if self.reference else 1 for upload in counted], dtype=torch.float64)
        return {"average": (weights / weights.sum() @ features.double()).to(features.dtype)}


# --- Eq. 12: the regulariser -------------------------------------------------------------------------------------


def alignment_loss(features: Tensor, average: Tensor) -> Tensor:
    """Return the squared distance of a client's features `I^Aux_i` to the average features `I^Aux_avg` (Eq. 12)."""
    return (features - average).square().sum()


class UnitAlignment(LossTerm):
    """Loss term: keep a client's features of a constant input (unit input) near the mean of all clients' features.

    It is `μ ||I^Aux_i - I^Aux_avg||²`. `I^Aux_i` is computed in each step, with the encoder in eval mode. The average
    does not change during the fit.

    Args:
        mu: μ, 0 or more; 0 switches the term off.
        value: The constant in `X_unit`.
        reference: As in the authors' code, use the mean squared distance of the batch's features to the average.
        knowledge: Use this instance instead of a new one from `value` and `reference`.
    """

    name = "unit"

    def __init__(
        self,
        mu: float = 0.1,
        value: float = 1.0,
        reference: bool = False,
        knowledge: UnitRepresentation | None = None,
    ) -> None:
        super().__init__()
        check_number("algorithm.mu", mu, "[0, inf)")
        self.mu, self.reference, self.active = mu, reference, mu > 0
        self.unit = knowledge or UnitRepresentation(value, reference)

    def begin(self, module: ClientModule) -> None:
        """Check that the backbone has an encoder."""
        with_encoder(module.backbone)

    def forward(self, step: Step) -> Tensor:
        """Return the penalty on the distance between the client's and the average features of the constant input.

        It is `μ ||I^Aux_i - I^Aux_avg||²` (Eq. 12), or zero before average features are known.
        """
        average = self.unit.average
        if average is None:
            return step.logits.new_zeros(())
        if step.inputs is None:
            return self.outside_fit(step.logits.new_zeros(()))
        if self.reference:
            assert step.features is not None
            return self.mu * (at_least_float32(step.features) - average).square().mean()
        encoder = with_encoder(step.backbone).encoder
        return self.mu * alignment_loss(run_in_eval_mode(encoder, unit_input(step.inputs, self.unit.value))[0], average)


def run_in_eval_mode(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return a module's output in eval mode, with gradients, then restore the modes of its submodules."""
    training = [part for part in module.modules() if part.training]
    recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
    module.eval()
    try:
        # cuDNN has no backward pass for a recurrent layer in eval mode.
        with torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext():
            return module(inputs)
    finally:
        for part in training:
            part.training = True


# --- Algorithm 2 -------------------------------------------------------------------------------------------------


class UAPDFL(PeerAlgorithm):
    """Peers share their feature extractors. Peers with similar model outputs also share classifiers or whole models.

    In each round a client collects unit representations from `n_com` peers. If all divergences are within `th_i`, it
    continues from the model of one random peer (client-wise dropout). Otherwise its feature extractor becomes the mean,
    by samples, over itself and all peers, and its classifier the mean over itself and the similar peers (layer-wise
    personalisation).

    Bytes a round, each participant, at most: down `n_com * (model + 4 * (C + d) + 8)`, up `0`.

    Kept by a client: its model and its unit representation.

    Args:
        th_i: Threshold on the divergence, 0 or more; 0 finds no similar peer, `.inf` only similar ones. The paper does
            not report its value. Choose it below the divergence of clients with other classes after one round; a higher
            one makes such clients take over each other's models.
        mu: μ of Eq. 12. The paper does not report its value.
        n_com: Number of peers that a client collects from in a round.
        divergence: `jensen_shannon` (the text and the authors' code) or `symmetric_kl` (Eq. 6 as printed).
        dropout: Client-wise dropout.
        layerwise: Layer-wise personalisation. Without it, whole models are averaged with all peers.
        unit: The constant in the unit input.
        preset: `paper`, or `reference` for the authors' published code. There, dropout needs divergences below the
            threshold, a classifier is also shared at the threshold, and a client's optimizer keeps its state from round
            to round. See also `UnitAlignment` and `UnitRepresentation`.
    """

    th_i: float = number(0.002, "[0, inf]")
    mu: float = 0.1
    n_com: int | None = number(5, "[1, inf)")
    divergence: Divergence = "jensen_shannon"
    dropout: bool = True
    layerwise: bool = True
    unit: float = 1.0
    preset: Literal["paper", "reference"] = "paper"
    aggregator: Aggregator = field(init=False)
    weighting: Weighting = field(default="samples", init=False)

    search_space: ClassVar = {  # our choice, as the paper has neither; a divergence is at most ln 2
        "th_i": {"distribution": "log_uniform_values", "min": 0.0005, "max": 0.69},
        "mu": {"distribution": "log_uniform_values", "min": 1e-4, "max": 1.0},
    }

    def __post_init__(self) -> None:
        """Keep the optimizers' states if the preset is the authors' code."""
        super().__post_init__()
        if self.reference:
            self.optimizer_state = "kept"

    @property
    def reference(self) -> bool:
        """Whether to follow the authors' code."""
        return self.preset == "reference"

    def own_terms(self) -> list[LossTerm]:
        """Return the loss term that aligns unit representations."""
        return [UnitAlignment(self.mu, self.unit, self.reference)]

    def collect(self, own: Message, peers: Mapping[int, Message], rng: np.random.Generator) -> dict[int, Message]:
        """Return the peers' messages, with only the parts of their models that the client averages.

        If all peers are similar to the client, it collects the whole model of a random peer. Otherwise it collects
        every feature extractor, and the classifiers of similar peers.
        """
        gaps = self.divergences(own, peers.values())
        if self.drops_out(gaps):
            chosen = int(rng.choice(list(peers)))
            return {j: peers[j] if j == chosen else peers[j].without("model") for j in peers}
        return {
            j: message if self.shares_head(gap) else without_head(message)
            for (j, message), gap in zip(peers.items(), gaps, strict=True)
        }

    def mix(self, own: Message, received: Sequence[Upload]) -> Tensors:
        """Return the weights that a client starts training from: averages of model parts, or a random peer's model.

        It is the peer's model if `drops_out` is true: the models of all peers are similar to the client's.
        """
        if self.drops_out(self.divergences(own, [upload.message for upload in received])):
            return next(model for upload in received if (model := upload.message.section("model")))
        messages = [own, *(upload.message for upload in received)]
        models = [message.section("model") for message in messages]
        samples = [message.numbers["n_samples"] for message in messages]
        extractor = weighted_mean((model_part(model, head=False) for model in models), samples)
        heads = [(head, n) for model, n in zip(models, samples, strict=True) if (head := model_part(model, head=True))]
        return extractor | weighted_mean(*zip(*heads, strict=True))

    def divergences(self, own: Message, peers: Iterable[Message]) -> list[float]:
        """Return a list with each peer's divergence `Div(i, j)` from the client, in the output for the unit input."""
        mine = own.section("unit")["distribution"]
        return [DIVERGENCES[self.divergence](mine, peer.section("unit")["distribution"]) for peer in peers]

    def drops_out(self, gaps: Sequence[float]) -> bool:
        """Return whether the client continues from a random peer's model instead of averaging (client-wise dropout).

        It does so if all peers' models are similar to its own.

        Args:
            gaps: The divergence between the client's and each peer's output for the unit input.
        """
        if not self.dropout or not gaps or self.th_i == 0:
            return False
        return all(gap < self.th_i if self.reference else gap <= self.th_i for gap in gaps)

    def shares_head(self, gap: float) -> bool:
        """Return whether a client averages its classifier with a peer's, given the divergence of their outputs."""
        if not self.layerwise:
            return True
        return self.th_i > 0 and (gap <= self.th_i if self.reference else gap < self.th_i)


def model_part(model: Tensors, head: bool) -> Tensors:
    """Return the classifier `h` of a model if `head` is true, otherwise its feature extractor `g` (encoder)."""
    return {name: value for name, value in model.items() if name.startswith("encoder.") != head}


def without_head(message: Message) -> Message:
    """Return a peer's message without the tensors of the classifier `h`."""
    kept = model_part(message.section("model"), head=False)
    return message.without("model").plus({"model": kept})
