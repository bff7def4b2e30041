import hashlib
from math import ceil, floor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigError
from fl_lightning.data import IID, Arrays, Dirichlet, Scenario
from fl_lightning.data.subsampling import long_tail_sizes, stratified_sample


@pytest.fixture
def arrays(tmp_path) -> Arrays:
    """Ten classes of 200 and a test set of 20 each; every input is its own number."""
    y = np.arange(2000) % 10
    x = np.arange(2200, dtype=np.float32)[:, None]
    np.savez(tmp_path / "a.npz", x_train=x[:2000], y_train=y, x_test=x[2000:], y_test=np.arange(200) % 10)
    return Arrays(str(tmp_path / "a.npz"))


def built(arrays: Arrays, rho: float, seed: int = 0, partition=None):
    return Scenario(arrays, partition or IID(), clients=4, long_tail=rho).build(seed)


@pytest.mark.parametrize(
    ("largest", "classes", "rho", "total"),
    [
        # Totals of CIFAR-10-LT and CIFAR-100-LT as the literature prints them.
        (5000, 10, 10, 20431),
        (5000, 10, 50, 13996),
        (5000, 10, 100, 12406),
        (500, 100, 10, 19573),
        (500, 100, 50, 12608),
        (500, 100, 100, 10847),
    ],
)
def test_long_tailed_cifar_has_the_published_sizes(largest: int, classes: int, rho: float, total: int) -> None:
    sizes = long_tail_sizes(largest, classes, rho)
    assert sizes.sum() == total
    assert sizes[0] == largest
    assert sizes[-1] == largest / rho


def test_cifar_10_lt_has_the_published_sizes_of_classes() -> None:
    assert long_tail_sizes(5000, 10, 100).tolist() == [5000, 2997, 1796, 1077, 645, 387, 232, 139, 83, 50]


@pytest.mark.parametrize("rho", [1, 7.5, 100])
def test_the_clients_together_have_the_long_tail(arrays: Arrays, rho: float) -> None:
    data = built(arrays, rho)
    counts = data.class_counts("train").sum(axis=0) + data.class_counts("test").sum(axis=0)
    expected = [int(200 * rho ** (-j / 9) + 1e-9) for j in range(10)]
    assert counts.tolist() == expected == torch.bincount(data.data.y_train).tolist()


def test_inputs_stay_with_their_labels_and_the_test_set_stays_whole(arrays: Arrays) -> None:
    whole, thin = arrays.load(), built(arrays, 20).data
    assert torch.equal(thin.y_train, thin.x_train[:, 0].long() % 10)
    assert len(thin.x_train.unique()) == len(thin.x_train)
    assert torch.equal(thin.x_test, whole.x_test)
    assert torch.equal(thin.y_test, whole.y_test)


def test_the_kept_samples_depend_on_the_seed_and_not_on_the_partition(arrays: Arrays) -> None:
    first, again, other = (built(arrays, 20, seed).data.x_train for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first, built(arrays, 20, partition=Dirichlet(0.5)).data.x_train)


@pytest.mark.parametrize(("sizes", "kept"), [([100, 5, 50], [100, 5, 25]), ([60, 100, 100], [60, 50, 25])])
def test_the_tail_falls_from_the_largest_class_and_small_classes_keep_all(tmp_path, sizes, kept) -> None:
    """Cao et al.: `n_max ρ^(-j / (C - 1))`, whichever class has most samples."""
    x, y = np.zeros((sum(sizes), 1)), np.repeat([0, 1, 2], sizes)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=np.zeros((3, 1)), y_test=np.arange(3))
    data = built(Arrays(str(tmp_path / "a.npz")), 4).data
    assert torch.bincount(data.y_train).tolist() == kept


def test_a_tail_with_empty_classes_is_refused(arrays: Arrays) -> None:
    with pytest.raises(ConfigError, match=r"^scenario.long_tail: 1000 "):
        built(arrays, 1000)


@pytest.mark.parametrize("n", [1000, 995, 2000])
def test_fewer_training_samples_are_drawn_in_the_classes_proportions(arrays: Arrays, n: int) -> None:
    def load(seed, partition):
        data = Scenario(arrays, partition, clients=1, local_test=0, train_samples=n).build(seed).data
        assert len(data.x_test) == 200
        return data

    data = load(0, IID())
    x = data.x_train[:, 0].long()
    assert len(x) == len(set(x.tolist())) == n
    assert torch.equal(x % 10, data.y_train)
    counts = torch.bincount(data.y_train, minlength=10)
    assert counts.max() - counts.min() <= (n % 10 > 0)
    assert torch.equal(load(0, Dirichlet(0.5)).x_train, data.x_train)
    assert n == 2000 or not torch.equal(load(1, IID()).x_train, data.x_train)


@pytest.mark.parametrize(
    ("share", "n"), [(0.5, 1000), (0.07, 140), (0.0001, 1), (0.00051, 2), (0.9999, 2000), (1e-13, 1)]
)
def test_a_share_of_the_training_samples_is_rounded_up(arrays: Arrays, share: float, n: int) -> None:
    by_share, by_number = (
        Scenario(arrays, IID(), clients=1, local_test=0, train_samples=given).build(3).data for given in (share, n)
    )
    assert len(by_share.x_train) == n
    assert torch.equal(by_share.x_train, by_number.x_train)


def test_more_training_samples_than_there_are_are_refused(arrays: Arrays) -> None:
    with pytest.raises(ConfigError, match=r"scenario.train_samples: 2001 .* 2000 "):
        Scenario(arrays, IID(), clients=1, train_samples=2001).build(0)


# --- stratified_sample ---


labels_of_a_client = st.lists(st.sampled_from([0, 1, 2, 5, 9]), min_size=1, max_size=80)


@given(labels_of_a_client, st.floats(0, 0.999), st.integers(0, 2**32))
def test_quotas_are_rounded_by_largest_remainder(labels: list[int], share: float, seed: int) -> None:
    y = np.array(labels)
    chosen = stratified_sample(y, share, np.random.default_rng(seed))
    assert chosen.dtype == bool
    assert chosen.shape == y.shape
    wanted = min(round(share * len(y)), len(y) - 1)
    assert chosen.sum() == wanted
    remainders: dict[bool, list[float]] = {False: [], True: []}
    for label in set(labels):
        size, quota = labels.count(label), int(chosen[y == label].sum())
        exact, left_over = divmod(wanted * size, len(y))
        assert quota in (exact, exact + (left_over > 0))
        assert quota in (floor(wanted * size / len(y)), ceil(wanted * size / len(y)))
        remainders[quota > exact].append(left_over)
    if remainders[True] and remainders[False]:
        assert min(remainders[True]) >= max(remainders[False])


def test_every_sample_of_a_class_is_equally_likely() -> None:
    labels, draws = np.repeat([0, 1], [8, 4]), 2000
    chosen = sum(stratified_sample(labels, 0.5, np.random.default_rng(seed)).astype(int) for seed in range(draws))
    assert (abs(chosen - draws / 2) < 4 * np.sqrt(draws / 4)).all()


def test_ties_between_classes_are_broken_at_random() -> None:
    draws = 2000
    chosen = sum(stratified_sample(np.arange(5), 0.2, np.random.default_rng(seed)).astype(int) for seed in range(draws))
    assert chosen.sum() == draws
    assert (abs(chosen - draws / 5) < 4 * np.sqrt(draws * 0.2 * 0.8)).all()


# --- Fingerprints ---

# Digests of the samples of each client as first released: a change would change published results.
FINGERPRINTS = {
    "train_samples": ({"train_samples": 600}, "21493ca99d35"),
    "long_tail": ({"long_tail": 10}, "d6d2e6666675"),
    "both": ({"train_samples": 0.5, "long_tail": 10}, "a3ff087bc95a"),
    "official": ({"local_test": "official"}, "8d0d4b1d2eb1"),
    "held_out_clients": ({"held_out_clients": 0.3}, "764e18e4f8c1"),
    "validation_share": ({"validation_share": 0.2, "held_out_clients": 1}, "f2e3638fe467"),
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_a_seed_gives_the_same_samples_on_any_machine(arrays: Arrays, name: str) -> None:
    options, digest = FINGERPRINTS[name]
    built = Scenario(arrays, Dirichlet(0.5), clients=6, **options).build(3)
    shards = [*built.shards, *built.held_out]
    parts = [built.data.x_train[part][:, 0].tolist() for shard in shards for part in (shard.train, shard.test)]
    assert hashlib.sha256(str(parts).encode()).hexdigest()[:12] == digest
