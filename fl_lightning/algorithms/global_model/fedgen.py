"""FedGen: the server trains a feature generator with the clients' heads, and clients train on generated features.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm 1.

The generator draws features of a class from noise. The server trains it such that the ensemble of the round's heads
recognises the class. No data are needed for that, only the heads and the clients' class counts.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.algorithms.aggregators import Weighting
from fl_lightning.algorithms.base import Aggregation, Algorithm
from fl_lightning.client.knowledge import SharedKnowledge
from fl_lightning.client.loss_term import LossTerm, Step
from fl_lightning.client.losses import distillation_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import descend, load_optimizer_tensors, optimizer_tensors
from fl_lightning.core.arguments import number
from fl_lightning.core.message import Tensors, Upload
from fl_lightning.core.precision import at_least_float32
from fl_lightning.core.round import Round
from fl_lightning.core.state_dicts import State, stack
from fl_lightning.models.base import with_encoder

HEAD = "head."
"""The prefix of the entries of the head."""

COUNTS = "label_counts"
"""The entry of the shared knowledge with the number of samples of each class, from which labels are drawn."""

TRAINING = "generator_training"
"""The section of the state with the generator's seed, the next round, and the state of the generator's optimizer."""

WEIGHT_DECAY = 0.01
"""Weight decay of the generator's optimizer, Adam, as in the authors' code."""


class Generator(nn.Module):
    """A network that turns noise and classes into features, with one hidden layer.

    Args:
        num_classes: C.
        feature_dim: Size `d` of a feature.
        noise_dim: Size of the noise.
        hidden_dim: Size of the hidden layer.
    """

    def __init__(self, num_classes: int, feature_dim: int, noise_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.num_classes, self.noise_dim = num_classes, noise_dim
        self.hidden = nn.Sequential(
            nn.Linear(noise_dim + num_classes, hidden_dim), nn.BatchNorm1d(hidden_dim), nn.ReLU()
        )
        self.output = nn.Linear(hidden_dim, feature_dim)

    @classmethod
    def of(cls, shared: Tensors) -> Generator:
        """Build a generator with a copy of the weights in `shared`.

        The layer sizes follow from the shapes of the weights.
        """
        weights, num_classes = (
            {name: value.clone() for name, value in shared.items() if name != COUNTS},
            len(shared[COUNTS]),
        )
        (hidden_dim, inputs), feature_dim = weights["hidden.0.weight"].shape, len(weights["output.bias"])
        with torch.device("meta"):  # without random initial weights
            generator = cls(num_classes, feature_dim, inputs - num_classes, hidden_dim)
        generator.load_state_dict(weights, assign=True)
        return generator

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        """Return features `(B, d)`, from noise `(B, noise_dim)` and classes `(B,)`."""
        one_hot = F.one_hot(labels, self.num_classes).to(noise.dtype)
        features: Tensor = self.output(self.hidden(torch.cat([noise, one_hot], dim=1)))
        return features


def label_bounds(counts: Tensor) -> Tensor:
    """Return the cumulative class shares, `(C - 1,)`, by which `draw_labels` turns uniform random numbers into classes.

    Args:
        counts: Weights of the classes, `(C,)`, such as numbers of samples. A class with weight 0 is never drawn.
    """
    return (counts.cpu().double().cumsum(dim=0) / counts.cpu().double().sum()).float()[:-1]


def draw_labels(bounds: Tensor, number: int, rng: torch.Generator | None = None) -> Tensor:
    """Draw random class labels, given the cumulative class probabilities `bounds`.

    Unlike `torch.multinomial`, this never waits for a GPU.

    Args:
        bounds: The result of `label_bounds`, `(C - 1,)`.
        number: The number of labels.
        rng: The random generator; None means torch's default generator.

    Returns:
        `(number,)`.
    """
    return (torch.rand(number, 1, dtype=bounds.dtype, device=bounds.device, generator=rng) >= bounds).sum(dim=1)


def ensemble_logits(head: nn.Module, heads: Tensors, features: Tensor) -> Tensor:
    """Return the logits of K heads, `(K, B, C)`, on features `(B, d)`.

    Args:
        head: A head, whose weights are not used.
        heads: The heads' weights, in one state dict with entries `(K, ...)`.
        features: `(B, d)`.
    """
    return torch.vmap(lambda own: torch.func.functional_call(head, own, (features,)))(heads)


def ensemble_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy between the labels `(B,)` and the mean logits of K heads, `(K, B, C)` (Eq. 4)."""
    return F.cross_entropy(logits.mean(dim=0), labels)


def share_weighted_loss(logits: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    """Return the cross-entropy of the clients' heads, weighted by each client's share of the samples of the class.

    It is summed over clients and averaged over the batch. The authors' code uses this loss instead of `ensemble_loss`.

    Args:
        logits: The K heads' logits, `(K, B, C)`.
        labels: `(B,)`.
        shares: Each client's share of the samples of each class, `(K, C)`.
    """
    losses = F.cross_entropy(logits.movedim(2, 1), labels.expand(len(logits), -1), reduction="none")
    return (shares[:, labels] * losses).sum(dim=0).mean()


def diversity_loss(noise: Tensor, features: Tensor) -> Tensor:
    """Return the diversity loss, which is small if different noise vectors give different features.

    It is `exp(-mean_ij(δ_ij · Δ_ij))`. `δ_ij` is the mean squared difference of the noise of samples i and j, `Δ_ij`
    the mean absolute difference of their features.

    Args:
        noise: `(B, noise_dim)`.
        features: `(B, d)`.
    """
    of_noise = (noise[:, None] - noise).square().mean(dim=2)
    of_features = (features[:, None] - features).abs().mean(dim=2)
    return (-of_noise * of_features).mean().exp()


class SharedGenerator(SharedKnowledge):
    """The server's generator of features, and the number of samples of each class, from which labels are drawn.

    A client uploads its number of samples of each class. `FedGen.aggregate` trains the generator. Before it is trained,
    in round 1, nothing is sent.

    Attributes:
        tensors: The weights of the generator, and `label_counts`, `(C,)`; empty before a generator is received.
    """

    name = "generator"
    needs_classes = True

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Tensors = {}

    def initial(self, num_classes: int) -> Tensors:
        """Return no tensors, because there is no trained generator before round 1."""
        return {}

    def load(self, shared: Tensors) -> None:
        """Keep the received generator."""
        self.tensors = dict(shared)

    def summarize(self, module: ClientModule, batches: Iterable[tuple[Tensor, Tensor]], num_classes: int) -> Tensors:
        """Return the client's number of samples of each class, `(C,)`."""
        assert module.context.class_counts is not None
        return {COUNTS: module.context.class_counts.float()}

    def merge(self, previous: Tensors, uploads: Sequence[Upload], round: Round) -> Tensors:
        """Return the previous generator unchanged, because `FedGen.aggregate` trains it."""
        return previous


class GeneratedFeatures(LossTerm):
    """Trains the head on features from the server's generator, by cross-entropy and by distillation.

    The term is `α CE(h(G(ŷ)), ŷ) + β KL(h(G(y)) || p(x))` with the client's head `h`. The labels `ŷ` are drawn from the
    participants' distribution of labels. `p(x)` is the prediction on the batch, and the prediction on generated
    features of the batch's classes `y` is a constant teacher. Without a generator, as in round 1, the term is zero.

    Args:
        alpha: α (Eq. 5), 0 or more.
        beta: β, 0 or more. The paper does not have this part, the authors' code does.
        decay: Factor on α and β after each round, in (0, 1].
        uniform_noise: Draw uniform noise from [0, 1] instead of normal noise.
    """

    alpha: float = number(1.0, "[0, inf)", "the paper uses 1, the authors' code 10")
    beta: float = number(0.0, "[0, inf)", "the paper uses 0, the authors' code 10")
    decay: float = number(1.0, "(0, 1]", "the paper uses 1, the authors' code 0.98")
    uniform_noise: bool = False

    needs_classes = True
    only_in = "FedGen"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.active = self.alpha + self.beta > 0
        self.shared = SharedGenerator()
        self.scale = 1.0
        self._generator: list[Generator] | None = None  # a list keeps it out of the client's module
        self._bounds: Tensor | None = None

    def begin(self, module: ClientModule) -> None:
        """Check that the model has an encoder and a head, and build the received generator."""
        weight = next(with_encoder(module.backbone).head.parameters())
        self.scale = self.decay ** (module.context.round - 1)
        self._generator = []
        if self.active and self.shared.tensors:
            generator = Generator.of(self.shared.tensors).eval().requires_grad_(False)
            self._generator = [generator.to(device=weight.device, dtype=weight.dtype)]
            self._bounds = label_bounds(self.shared.tensors[COUNTS]).to(weight.device)

    def forward(self, step: Step) -> Tensor:
        """Return the loss on as many generated features as the batch has samples, or zero without a generator."""
        loss = step.logits.new_zeros(())
        if self._generator is None or step.backbone is None:
            return self.outside_fit(loss)
        if not self._generator:
            return loss
        assert self._bounds is not None
        if self.alpha:
            labels = draw_labels(self._bounds, len(step.targets))
            loss = loss + self.alpha * F.cross_entropy(self._logits(step.backbone, labels), labels)
        if self.beta:
            teacher = self._logits(step.backbone, step.targets).detach()
            loss = loss + self.beta * distillation_loss(at_least_float32(step.logits), teacher)
        return self.scale * loss

    def draw_noise(self, generator: Generator, number: int, rng: torch.Generator | None = None) -> Tensor:
        """Draw the noise from which the generator makes `number` feature vectors: `(number, noise_dim)`."""
        draw, like = torch.rand if self.uniform_noise else torch.randn, generator.output.bias
        return draw(number, generator.noise_dim, generator=rng, dtype=like.dtype, device=like.device)

    def _logits(self, backbone: nn.Module, labels: Tensor) -> Tensor:
        assert self._generator is not None
        features = self._generator[0](self.draw_noise(self._generator[0], len(labels)), labels)
        return at_least_float32(with_encoder(backbone).head(features))


class FedGen(Algorithm):
    """FedAvg whose clients also train their heads on generated features. The server trains the feature generator.

    With `alpha` and `beta` 0 this is FedAvg, bit for bit.

    Bytes a round, each participant: down `model + 4 * (hidden_dim * (noise_dim + C + d + 5) + d + C) + 8`, up
    `model + 4 * C + 8`, and only `model` down in round 1.

    Kept by the server: the generator and its optimizer.

    Args:
        alpha: α, the weight of the loss on generated features. The authors' code uses 10.
        beta: β, the weight of the distillation from generated features of a batch's classes. The paper does not have
            it, and the authors' code uses 10.
        decay: Factor on α, β and the generator's learning rate after each round, in (0, 1]. The authors' code uses
            0.98.
        diversity: Weight of the loss that keeps the features of a class different, 0 or more.
        generator_steps: Number of the generator's training steps in each round, 1 or more.
        generator_lr: Learning rate of the generator's optimizer, Adam, above 0.
        generator_batch_size: Number of features in a training step of the generator, 2 or more.
        noise_dim: Size of the generator's noise, 1 or more.
        hidden_dim: Size of the generator's hidden layer, 1 or more.
        weighting: Weight clients by their number of `samples`, or equally (`uniform`).
        reference: As in the authors' code, weight each head's loss by the client's share of the class, and draw labels
            and noise uniformly.
    """

    alpha: float = 1.0
    beta: float = 0.0
    decay: float = 1.0
    diversity: float = number(1.0, "[0, inf)", "0 is without the diversity loss")
    generator_steps: int = number(50, "[1, inf)")
    generator_lr: float = number(3e-4, "(0, inf)")
    generator_batch_size: int = number(32, "[2, inf)")
    noise_dim: int = number(32, "[1, inf)")
    hidden_dim: int = number(256, "[1, inf)")
    weighting: Weighting = "samples"
    reference: bool = False

    search_space: ClassVar = {  # our choice, around the values of the paper and the authors' code
        "alpha": {"distribution": "log_uniform_values", "min": 0.1, "max": 10.0},
        "beta": {"values": [0.0, 0.1, 1.0, 10.0]},
    }

    def __post_init__(self) -> None:
        """Create the loss term on generated features."""
        self.term = GeneratedFeatures(self.alpha, self.beta, self.decay, uniform_noise=self.reference)
        super().__post_init__()

    def own_terms(self) -> list[LossTerm]:
        """Return the loss on generated features."""
        return [self.term]

    def initial_state(self, backbone: nn.Module, num_classes: int, clients: int, rng: np.random.Generator) -> State:
        """Return the initial weights, and a random seed for the feature generator's weights and training.

        Raises:
            ConfigError: The model has no separate encoder and head.
        """
        network = with_encoder(backbone)
        self.head, self.feature_dim = copy.deepcopy(network.head).eval(), network.feature_dim
        training = {"seed": torch.tensor(int(rng.integers(2**62))), "round": torch.tensor(1)}
        return super().initial_state(backbone, num_classes, clients, rng) | {TRAINING: training}

    def aggregation(self, round: Round) -> Aggregation:
        """Return the aggregation of a round, which also trains the generator."""
        return GeneratorAggregation(self, round)

    def train_generator(self, state: State, heads: Tensors, counts: Tensor) -> State:
        """Train the generator. Return its new weights and its training state: optimizer, seed and next round.

        Args:
            state: The state before the round.
            heads: The K participants' heads, in one state dict with entries `(K, ...)`.
            counts: The participants' numbers of samples of each class, `(K, C)`.
        """
        seed, round, totals = state[TRAINING]["seed"], state[TRAINING]["round"], counts.sum(dim=0)
        heads = {name: at_least_float32(value) for name, value in heads.items()}
        dtype = next(iter(heads.values())).dtype
        generator = self.generator_before(state, len(totals)).to(dtype).train()
        lr = self.generator_lr * self.term.decay ** (int(round) - 1)
        optimizer = torch.optim.Adam(generator.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)
        load_optimizer_tensors(optimizer, {name: v for name, v in state[TRAINING].items() if "/" in name})
        labelled = (totals > 0).float() if self.reference else totals
        bounds, shares = label_bounds(labelled), counts.to(dtype) / totals.clamp(min=1)
        draws = torch.Generator().manual_seed(int(seed + round))
        for _ in range(self.generator_steps):
            labels = draw_labels(bounds, self.generator_batch_size, draws)
            noise = self.term.draw_noise(generator, len(labels), draws)
            features = generator(noise, labels)
            logits = ensemble_logits(self.head, heads, features)
            loss = share_weighted_loss(logits, labels, shares) if self.reference else ensemble_loss(logits, labels)
            descend(optimizer, loss + self.diversity * diversity_loss(noise, features))
        trained = {name: value.detach() for name, value in generator.state_dict().items()}
        training = {"seed": seed, "round": round + 1} | optimizer_tensors(optimizer)
        return {SharedGenerator.name: trained | {COUNTS: labelled}, TRAINING: training}

    def generator_before(self, state: State, num_classes: int) -> Generator:
        """Return the generator that the server trained last. Before its first training, its weights are random."""
        if shared := state[SharedGenerator.name]:
            return Generator.of(shared)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int(state[TRAINING]["seed"]))
            return Generator(num_classes, self.feature_dim, self.noise_dim, self.hidden_dim)


class GeneratorAggregation(Aggregation):
    """The mean of a round's models, and the training of the generator on the ensemble of the uploaded heads."""

    algorithm: FedGen

    def __init__(self, algorithm: FedGen, round: Round) -> None:
        super().__init__(algorithm, round)
        self.heads: list[Tensors] = []
        self.counts: list[Tensor] = []

    def add(self, upload: Upload) -> None:
        """Add an upload's weights to the mean, and keep its head and its numbers of samples."""
        model = upload.message.section("model")
        own = {name.removeprefix(HEAD): v.clone() for name, v in model.items() if name.startswith(HEAD)}
        self.heads.append(self.algorithm.head.state_dict() | own)  # frozen entries are not sent
        self.counts.append(upload.message.section(SharedGenerator.name)[COUNTS])
        super().add(upload)

    def finish(self) -> State:
        """Return the next weights, and the generator after its training."""
        after, before = super().finish(), self.round.before
        return after | self.algorithm.train_generator(before, stack(self.heads), torch.stack(self.counts))
