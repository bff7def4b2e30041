from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from layouts import write_cifar
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.algorithms import FedAvg, FedSKC, Prototypical
from fl_lightning.client.loss_term import Step
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import FC100, FewShot
from fl_lightning.data.few_shot import (
    EpisodeBatches,
    episode_scores,
    fc100_classes,
    few_shot_score,
    mean_and_interval,
    prototype_logits,
    sample_episode,
)
from fl_lightning.engines.trainer import quiet_lightning
from fl_lightning.models import MLP

PARTS = ("train", "val", "test")


def blobs(classes: int, each: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Points around the corners of a simplex."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(classes).repeat(each)
    return 3 * F.one_hot(y, 12).float() + spread * torch.randn(len(y), 12, generator=generator), y


# --- FC100 ---


def test_the_parts_have_no_common_class_and_the_published_sizes() -> None:
    labels = [fc100_classes(part) for part in PARTS]
    assert [len(own) for own in labels] == [60, 20, 20]
    assert sorted(label for own in labels for label in own) == list(range(100))


def test_classes_are_numbered_as_in_cifar_100() -> None:
    # A few of CIFAR-100's fine labels: apple 0, aquarium_fish 1, baby 2, bear 3, beaver 4, bowl 10, tank 85, worm 99.
    assert {0, 1, 10, 85} <= set(fc100_classes("train"))
    assert {3, 99} <= set(fc100_classes("val"))
    assert {2, 4} <= set(fc100_classes("test"))


@pytest.mark.parametrize("part", ["val", "test"])
def test_fc100_trains_on_one_part_and_is_tested_on_another(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, test = write_cifar(tmp_path, 100, monkeypatch)
    x, y = np.concatenate([train.x, test.x]), np.array(train.y + test.y)
    data = FC100(str(tmp_path), evaluate_on=part, few_shot=FewShot(shots=1)).load()
    for images, labels, name in ((data.x_train, data.y_train, "train"), (data.x_test, data.y_test, part)):
        classes = np.array(fc100_classes(name))
        kept = np.isin(y, classes)
        assert np.array_equal(images.numpy(), x[kept])
        assert np.array_equal(classes[labels.numpy()], y[kept])
    assert data.num_classes == 60 == len(data.y_train.unique())
    assert data.class_names == [f"class {j}" for j in fc100_classes("train")]
    assert data.cut.__self__ == data.evaluate.__self__ == FewShot(ways=5, shots=1, queries=15, episodes=600)


# --- Episodes ---


def test_an_episode_has_different_samples_of_different_classes() -> None:
    members = [np.arange(10 * j, 10 * j + 10) for j in range(8)]
    episode = sample_episode(members, FewShot(5, 2, 3), np.random.default_rng(0))
    assert [len(own) for own in episode] == [5] * 5
    assert len({int(own[0]) // 10 for own in episode}) == 5
    assert all(len(set(own)) == 5 and len(set(own // 10)) == 1 for own in episode)


def test_episodes_of_a_client_have_only_its_samples() -> None:
    _, y = blobs(8, 40, 0.1)
    index = torch.from_numpy(np.flatnonzero(np.isin(y.numpy(), [1, 4, 6])))[:-3]
    batches = EpisodeBatches(torch.arange(len(y)), y, index, FewShot(2, 3, 5), seed=1)
    assert len(batches) == 8  # 117 samples in episodes of 16, the last one whole too
    passes = [list(batches), list(batches)]
    for chosen, labels in passes[0]:
        assert set(chosen.tolist()) <= set(index.tolist())
        assert torch.equal(y[chosen], labels)
        assert torch.bincount(labels).sort(descending=True).values[:3].tolist()[:2] == [8, 8]
    assert not torch.equal(passes[0][0][0], passes[1][0][0])
    again = EpisodeBatches(torch.arange(len(y)), y, index, FewShot(2, 3, 5), seed=1)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(passes[0], again, strict=True))


def test_an_unfinished_pass_does_not_change_the_next() -> None:
    """A fit may end within a pass, wherever its engine has got by then."""
    y = torch.arange(400) % 4
    one, other = (EpisodeBatches(torch.arange(400), y, torch.arange(400), FewShot(2, 3, 5), seed=1) for _ in range(2))
    next(iter(one))
    other.indices()
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("min_batch", [1, 2, 64])
def test_min_batch_does_not_drop_an_episode(min_batch):
    y = torch.arange(19) % 3
    batches = FewShot(5, 3, 4).cut(torch.arange(19), y, torch.arange(19), 64, 0, min_batch)
    assert len(batches) == len(list(batches)) == 1


def test_a_client_of_few_classes_uses_all_of_them() -> None:
    y = torch.tensor([0] * 9 + [1] * 7 + [2] * 3)
    batches = EpisodeBatches(torch.arange(19), y, torch.arange(19), FewShot(5, 3, 4), seed=0)
    assert all(torch.bincount(labels).tolist() == [7, 7] for _, labels in batches)


def test_a_client_of_one_class_cannot_make_an_episode() -> None:
    y = torch.zeros(20, dtype=torch.long)
    with pytest.raises(ConfigError, match=r"^scenario.partition: a client has 1 class"):
        EpisodeBatches(y, y, torch.arange(20), FewShot(), seed=0)


@pytest.mark.parametrize("option", ["ways", "shots", "queries", "episodes"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^scenario.dataset.few_shot.{option}: 0 is below"):
        FewShot(**{option: 0})


# --- ProtoNet ---


def test_logits_are_negative_squared_distances_to_class_means() -> None:
    support, labels, queries = torch.randn(7, 4), torch.tensor([0, 1, 2, 0, 1, 2, 2]), torch.randn(3, 4)
    means = torch.stack([support[labels == j].mean(dim=0) for j in range(3)])
    torch.testing.assert_close(prototype_logits(queries, support, labels, 3), -(torch.cdist(queries, means) ** 2))


def test_the_loss_is_the_cross_entropy_of_the_queries() -> None:
    targets = torch.tensor([9, 3, 9, 9, 3, 3, 9, 3, 5])
    features = torch.randn(9, 4)
    support, queries = [0, 2, 1, 4, 8], [3, 6, 5, 7]  # the first two of each class; class 5 has one and no query
    labels = torch.tensor([2, 2, 0, 0, 1])
    logits = prototype_logits(features[queries], features[support], labels, 3)
    expected = F.cross_entropy(logits, torch.tensor([2, 2, 0, 0]))
    loss = Prototypical(shots=2, weight=0.5)(Step(features, targets, features))
    torch.testing.assert_close(loss, 0.5 * expected)


@pytest.mark.parametrize("targets", [[0, 1, 2], [0, 0, 1], [4]])
def test_a_batch_without_queries_adds_nothing(targets: list[int]) -> None:
    features = torch.randn(len(targets), 4, requires_grad=True)
    assert Prototypical(shots=2)(Step(features, torch.tensor(targets), features)) == 0


def test_support_and_queries_both_get_gradients() -> None:
    features = torch.randn(8, 4, requires_grad=True)
    Prototypical(shots=2)(Step(features, torch.arange(8) % 2, features)).backward()
    assert (features.grad.abs().sum(dim=1) > 0).all()


# --- Scores ---


def test_accuracy_equals_that_of_sklearns_nearest_centroid() -> None:
    from sklearn.neighbors import NearestCentroid

    x, y = blobs(7, 25, 2.0)
    task = FewShot(ways=4, shots=3, queries=6, episodes=20)
    rng, members, expected = np.random.default_rng(0), [np.flatnonzero(y == j) for j in range(7)], []
    for _ in range(task.episodes):
        episode = sample_episode(members, task, rng)
        support, queries = (np.concatenate([own[part] for own in episode]) for part in (slice(0, 3), slice(3, None)))
        expected.append(NearestCentroid().fit(x[support], y[support]).score(x[queries], y[queries]))
    assert episode_scores(x, y, task)[:, 0].tolist() == pytest.approx(expected)


def test_every_model_has_the_same_test_episodes() -> None:
    x, y = blobs(8, 30, 2.0)
    torch.manual_seed(1)
    first = episode_scores(x, y, FewShot(episodes=10))
    np.random.seed(2)
    assert torch.equal(first, episode_scores(x, y, FewShot(episodes=10)))


def test_the_interval_is_the_95_percent_interval_of_a_mean() -> None:
    values = torch.tensor([0.2, 0.4, 0.4, 0.8], dtype=torch.float64)
    mean, half = mean_and_interval(values)
    assert mean == pytest.approx(0.45)
    assert half == pytest.approx(1.96 * np.std([0.2, 0.4, 0.4, 0.8], ddof=1) / 2)


def test_a_test_set_too_small_for_an_episode_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 classes, .* 30 samples"):
        episode_scores(*blobs(4, 30, 1.0), FewShot())
    with pytest.raises(ConfigError, match="the smallest with 5 samples"):
        episode_scores(*blobs(6, 5, 1.0), FewShot())


# --- With a federated method's client module ---


@pytest.mark.parametrize("method", [FedAvg, FedSKC])
def test_training_on_episodes_helps_on_unseen_classes(method: type) -> None:
    """Nuisance dimensions hide the classes; an encoder trained on other classes learns to leave them out."""
    generator = torch.Generator().manual_seed(0)
    x, y = blobs(12, 60, 0.3)
    x = torch.cat([x, 6 * torch.randn(len(x), 12, generator=generator)], dim=1)
    seen = y < 8
    task = FewShot(ways=4, shots=3, queries=6, episodes=100)
    torch.manual_seed(0)
    module = method(loss_terms=[Prototypical(shots=3)]).client_module(
        MLP((24,), 8, hidden=(32,)), partial(torch.optim.Adam, lr=0.01)
    )
    before = few_shot_score(module.backbone.encoder.eval(), [(x[~seen], y[~seen])], task)
    batches = EpisodeBatches(x, y, torch.nonzero(seen)[:, 0], task, seed=0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with quiet_lightning():
        L.Trainer(max_epochs=10, accelerator="cpu", limit_val_batches=0, **quiet).fit(module.train(), batches)
    after = few_shot_score(module.backbone.encoder.eval(), [(x[~seen], y[~seen])], task)
    assert after.values["acc"] - after.values["acc_interval"] > before.values["acc"] + 0.1
    assert after.values["loss"] < before.values["loss"]
    assert {"ce", "prototypical"} <= set(module.train_losses())
