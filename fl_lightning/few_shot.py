"""ProtoNet: classify by the nearest class mean of a few samples.

Snell, Swersky, Zemel: "Prototypical Networks for Few-shot Learning", NeurIPS 2017. The equations are the paper's.
FedSKC trains it on FC100, 5 ways and 5 shots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.client import LossTerm, Step
from fl_lightning.data.few_shot import FewShot, sample_episode
from fl_lightning.data.partitions import by_class
from fl_lightning.errors import ConfigError
from fl_lightning.evaluation import Score


def prototype_logits(queries: Tensor, support: Tensor, labels: Tensor, ways: int) -> Tensor:
    """Eq. 1 and 2: minus the squared distances to each class's mean feature, in float32.

    Args:
        queries: `(Q, d)` features to classify.
        support: `(S, d)` features that make the prototypes.
        labels: `(S,)` class of each, in `[0, ways)`, every class at least once.
        ways: Number of classes.

    Returns:
        `(Q, ways)`, the logits of a softmax.
    """
    members = F.one_hot(labels, ways).float()
    prototypes = members.T @ support.float() / members.sum(dim=0)[:, None]
    return -(queries.float()[:, None] - prototypes[None]).square().sum(dim=2)


class Prototypical(LossTerm):
    """Algorithm 1: cross-entropy of an episode's queries under the prototypes of its support.

    Any batch is an episode: of each class, the first `shots` samples are the support, the others queries. Zero for
    a batch without queries. It is added to the cross-entropy of the classification layer, whose logits FedSKC's
    knowledge is made of.

    Args:
        shots: Support samples a class.
        weight: Factor on the loss.

    Raises:
        ConfigError: `shots` is below 1.

    Example:
        >>> features, targets = torch.tensor([[0.0], [2.0], [1.0]]), torch.tensor([4, 7, 7])
        >>> round(float(Prototypical(shots=1)(Step(features, targets, features))), 4)
        0.6931
    """

    def __init__(self, shots: int = 5, weight: float = 1.0) -> None:
        super().__init__()
        if shots < 1:
            raise ConfigError(f"algorithm.loss_terms.shots: {shots} is below 1")
        self.shots, self.weight = shots, weight

    def forward(self, step: Step) -> Tensor:
        """The mean over the queries."""
        assert step.features is not None
        classes, labels = torch.unique(step.targets, return_inverse=True)
        members = F.one_hot(labels, len(classes))
        earlier = (members.cumsum(dim=0) * members).sum(dim=1) - 1  # samples of the same class before this one
        support = earlier < self.shots
        if bool(support.all()):
            return step.features.new_zeros(())
        with torch.autocast(step.features.device.type, enabled=False):
            logits = prototype_logits(step.features[~support], step.features[support], labels[support], len(classes))
            return self.weight * F.cross_entropy(logits, labels[~support])


def episode_scores(features: Tensor, labels: Tensor, task: FewShot) -> Tensor:
    """Accuracy and cross-entropy on each of a fixed set of test episodes.

    Args:
        features: `(n, d)` features of the whole test set.
        labels: `(n,)` their classes.
        task: What an episode is, and how many there are.

    Returns:
        `(episodes, 2)`, float64, on the CPU.

    Raises:
        ConfigError: There are fewer classes than `ways`, or one has no sample left to be a query.
    """
    members = by_class(labels.cpu().numpy())
    if len(members) < task.ways or min(map(len, members)) <= task.shots:
        raise ConfigError(
            f"scenario.dataset.few_shot: the test set has {len(members)} classes, the smallest of "
            f"{min(map(len, members))} samples: too few for {task.ways} ways and {task.shots} shots"
        )
    rng = np.random.default_rng(0)  # not the run's seed: every model meets the same episodes
    episodes = (sample_episode(members, task, rng) for _ in range(task.episodes))
    return torch.stack([_episode_score(features, episode, task) for episode in episodes]).double().cpu()


def _episode_score(features: Tensor, episode: list[np.ndarray], task: FewShot) -> Tensor:
    ways = torch.arange(len(episode))
    support = torch.from_numpy(np.concatenate([own[: task.shots] for own in episode]))
    queries = torch.from_numpy(np.concatenate([own[task.shots :] for own in episode]))
    labels = ways.repeat_interleave(task.shots).to(features.device)
    targets = ways.repeat_interleave(torch.tensor([len(own) - task.shots for own in episode])).to(features.device)
    logits = prototype_logits(features[queries], features[support], labels, task.ways)
    return torch.stack([(logits.argmax(dim=1) == targets).float().mean(), F.cross_entropy(logits, targets)])


def mean_and_interval(values: Tensor) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval, `1.96 · s / √n`, with `s` the sample's standard deviation."""
    return float(values.mean()), float(1.96 * values.std() / math.sqrt(len(values)))


def few_shot_score(encoder: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], task: FewShot) -> Score:
    """Score an encoder on the test episodes, in the mode and on the device it is in.

    Args:
        encoder: Maps inputs to features.
        batches: The whole test set, in fixed order.
        task: What an episode is, and how many there are.
    """
    with torch.no_grad():
        features, labels = zip(*((encoder(x).float(), y) for x, y in batches), strict=True)
    accuracies, losses = episode_scores(torch.cat(features), torch.cat(labels), task).T
    acc, interval = mean_and_interval(accuracies)
    return Score(acc, float(losses.mean()), task.episodes, interval)
