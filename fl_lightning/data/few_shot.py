"""Few-shot learning: the dataset FC100, episodes of a few classes and samples, and scoring by prototypes.

The prototype of a class is the mean feature of its support samples: Snell, Swersky, Zemel, "Prototypical Networks for
Few-shot Learning", NeurIPS 2017, whose equations are cited below. FedSKC uses it on FC100, 5 ways and 5 shots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fl_lightning.core.errors import ConfigError, check_number
from fl_lightning.core.inputs import Batch
from fl_lightning.core.task import Score
from fl_lightning.data.assignment import indices_by_class
from fl_lightning.data.images import CIFAR100, Augment
from fl_lightning.data.loaded_data import LoadedData
from fl_lightning.data.loaders import Batches

# The splits of FC100 (Oreshkin et al. 2018) by CIFAR-100's fine labels, five of each superclass.
CLASSES = {
    "train": """
        aquarium_fish flatfish ray shark trout orchid poppy rose sunflower tulip bottle bowl can cup plate apple
        mushroom orange pear sweet_pepper clock keyboard lamp telephone television bed chair couch table
        wardrobe bridge castle house road skyscraper cloud forest mountain plain sea crocodile dinosaur lizard
        snake turtle maple_tree oak_tree palm_tree pine_tree willow_tree bicycle bus motorcycle pickup_truck
        train lawn_mower rocket streetcar tank tractor
    """,
    "val": """
        bear leopard lion tiger wolf camel cattle chimpanzee elephant kangaroo crab lobster snail spider worm
        hamster mouse rabbit shrew squirrel
    """,
    "test": """
        beaver dolphin otter seal whale bee beetle butterfly caterpillar cockroach fox porcupine possum raccoon
        skunk baby boy girl man woman
    """,
}


def fc100_classes(part: str) -> list[int]:
    """Return the CIFAR-100 fine labels of FC100's split `train` (60 labels), `val` (20) or `test` (20), ascending."""
    alphabet = sorted(" ".join(CLASSES.values()).split())
    return sorted(map(alphabet.index, CLASSES[part].split()))


@dataclass(frozen=True)
class FewShot:
    """Options of few-shot learning: size of an episode, and number of test episodes.

    Args:
        ways: Classes per episode.
        shots: Support samples per class, whose mean feature is the prototype.
        queries: Samples per class to classify.
        episodes: Number of test episodes. They are the same for every model.

    Raises:
        ConfigError: A number is out of range.
    """

    ways: int = 5
    shots: int = 5
    queries: int = 15
    episodes: int = 600

    def __post_init__(self) -> None:
        for name, least in (("ways", 2), ("shots", 1), ("queries", 1), ("episodes", 2)):
            check_number(f"scenario.dataset.few_shot.{name}", getattr(self, name), f"[{least}, inf)")

    def cut(self, x: Tensor, y: Tensor, index: Tensor, batch_size: int, seed: int, min_batch: int) -> EpisodeBatches:
        """Return a client's training batches: each batch is one few-shot episode.

        `batch_size` and `min_batch` are ignored.
        """
        return EpisodeBatches(x, y, index, self, seed)

    def evaluate(self, module: Any, batches: Iterable[tuple[Tensor, Tensor]]) -> Score:
        """Return the accuracy and loss of a module's encoder on few-shot episodes of the test set."""
        return few_shot_score(module.encoder, batches, self)


class FC100(CIFAR100):
    """FC100 (Oreshkin et al. 2018): CIFAR-100 for few-shot learning, 60 classes to train on and 20 others to test on.

    Its splits have no superclass in common. All 600 images of a class are used. Labels count from 0 within each
    split, so the model has 60 classes.

    Args:
        data_dir: Folder that contains CIFAR-100's folder.
        download: Download missing files.
        augment: Random crop and flip of training batches: `none`, `per_sample` or `per_batch`; or a transform of
            single images, such as `torchvision.transforms.v2.RandAugment`.
        evaluate_on: Split with the classes of the test episodes: `test`, or `val` to choose hyperparameters.
        few_shot: Size and number of episodes.
    """

    num_classes = 60

    def __init__(
        self,
        data_dir: str = "data",
        download: bool = False,
        augment: Augment = "none",
        evaluate_on: Literal["val", "test"] = "test",
        few_shot: FewShot = FewShot(),
    ) -> None:
        super().__init__(data_dir, download, augment)
        self.evaluate_on, self.few_shot = evaluate_on, few_shot

    def load(self) -> LoadedData:
        """Read CIFAR-100; return FC100's training split and, as the test set, the split that `evaluate_on` names."""
        (x_train, y_train), (x_test, y_test) = self._read_both()
        x, y = torch.cat([x_train, x_test]), torch.cat([y_train, y_test])
        train, test = (self._part(x, y, part) for part in ("train", self.evaluate_on))
        assert self.class_names
        self.class_names = [self.class_names[label] for label in fc100_classes("train")]
        members_by_class(test[1], self.few_shot)
        return self._loaded(train, test, cut=self.few_shot.cut, evaluate=self.few_shot.evaluate)

    @staticmethod
    def _part(x: Tensor, y: Tensor, part: str) -> tuple[Tensor, Tensor]:
        classes = torch.tensor(fc100_classes(part))
        kept = torch.isin(y, classes)
        return x[kept], torch.searchsorted(classes, y[kept])


class EpisodeBatches(Batches):
    """Training batches for few-shot learning: each is an episode of support and query samples from a few classes.

    A client with fewer classes than `ways` uses all of them. Classes with at most `shots` samples are left out.

    Args:
        x: Inputs of the whole split.
        y: Labels of the whole split.
        index: Indices of the client's samples.
        task: Size of an episode.
        seed: Random seed of the episodes. Each pass draws new ones.

    Raises:
        ConfigError: Fewer than two classes have more than `shots` samples.
    """

    def __init__(self, x: Tensor, y: Tensor, index: Tensor, task: FewShot, seed: int) -> None:
        super().__init__(x, y, index, batch_size=task.ways * (task.shots + task.queries))
        self.task, self.rng = task, np.random.default_rng(seed)
        self.members = [rows for rows in indices_by_class(y[index].cpu().numpy()) if len(rows) > task.shots]
        if len(self.members) < 2:
            raise ConfigError(
                f"scenario.partition: a client has {len(self.members)} class(es) with more than {task.shots} samples, "
                "but an episode needs two. Use a larger alpha or fewer scenario.clients"
            )

    def indices(self) -> list[Tensor]:
        """Draw the episodes of one local epoch at random, and return the sample indices of each episode."""
        episodes = (np.concatenate(sample_episode(self.members, self.task, self.rng)) for _ in range(len(self)))
        return [self.index[torch.from_numpy(episode)].to(self.x.device) for episode in episodes]

    def __iter__(self) -> Iterator[Batch]:
        for index in self.indices():  # a generator: Lightning also calls `iter` to check a loader, which must not draw
            yield self.x[index], self.y[index]


def sample_episode(members: list[np.ndarray], task: FewShot, rng: np.random.Generator) -> list[np.ndarray]:
    """Draw one few-shot episode from arrays of sample indices by class; return the drawn indices of each class.

    It has `ways` classes, or as many as there are. Support samples come first; a small class may have fewer queries.
    """
    classes = rng.permutation(len(members))[: task.ways]
    return [rng.permutation(members[j])[: task.shots + task.queries] for j in classes]


def prototype_logits(queries: Tensor, support: Tensor, labels: Tensor, ways: int) -> Tensor:
    """Return logits `(Q, ways)` in float32: negative squared distances of features to the class means (prototypes).

    Args:
        queries: `(Q, d)` features to classify.
        support: `(S, d)` features of the support samples.
        labels: `(S,)` their classes in `[0, ways)`; every class occurs.
        ways: Number of classes.
    """
    members = F.one_hot(labels, ways).float()
    prototypes = members.T @ support.float() / members.sum(dim=0)[:, None]
    return -(queries.float()[:, None] - prototypes[None]).square().sum(dim=2)


def episode_scores(features: Tensor, labels: Tensor, task: FewShot) -> Tensor:
    """Return accuracy and cross-entropy of prototype classification on each test episode: `(episodes, 2)`, float64."""
    members = members_by_class(labels, task)
    rng = np.random.default_rng(0)  # not the run's seed: the episodes are the same for every model
    episodes = (sample_episode(members, task, rng) for _ in range(task.episodes))
    return torch.stack([_episode_score(features, episode, task) for episode in episodes]).double().cpu()


def members_by_class(labels: Tensor, task: FewShot) -> list[np.ndarray]:
    """Return the test set's sample indices by class. Raise an error if the test set is too small for an episode."""
    members = indices_by_class(labels.cpu().numpy())
    if len(members) < task.ways or min(map(len, members)) <= task.shots:
        raise ConfigError(
            f"scenario.dataset.few_shot: the test set has {len(members)} classes, the smallest with "
            f"{min(map(len, members))} samples: too few for {task.ways} ways and {task.shots} shots. Lower them"
        )
    return members


def _episode_score(features: Tensor, episode: list[np.ndarray], task: FewShot) -> Tensor:
    ways = torch.arange(len(episode))
    support = torch.from_numpy(np.concatenate([rows[: task.shots] for rows in episode]))
    queries = torch.from_numpy(np.concatenate([rows[task.shots :] for rows in episode]))
    labels = ways.repeat_interleave(task.shots).to(features.device)
    targets = ways.repeat_interleave(torch.tensor([len(rows) - task.shots for rows in episode])).to(features.device)
    logits = prototype_logits(features[queries], features[support], labels, task.ways)
    return torch.stack([(logits.argmax(dim=1) == targets).float().mean(), F.cross_entropy(logits, targets)])


def mean_and_interval(values: Tensor) -> tuple[float, float]:
    """Return the mean of n values and the half-width of its 95 % confidence interval, `1.96 · std / √n`."""
    return float(values.mean()), float(1.96 * values.std() / math.sqrt(len(values)))


def few_shot_score(encoder: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], task: FewShot) -> Score:
    """Return an encoder's accuracy and loss on few-shot episodes of the test set; its mode and device do not change."""
    with torch.no_grad():
        features, labels = zip(*((encoder(x).float(), y) for x, y in batches), strict=True)
    accuracies, losses = episode_scores(torch.cat(features), torch.cat(labels), task).T
    acc, interval = mean_and_interval(accuracies)
    return Score(task.episodes, {"acc": acc, "loss": float(losses.mean()), "acc_interval": interval})
