from math import ceil, floor, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from fl_lightning.data import IID, Dirichlet, Pathological
from fl_lightning.data.assignment import top_up_clients

seeds = st.integers(0, 2**32)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def shuffled_labels(sizes: dict[int, int], seed: int = 0) -> np.ndarray:
    """Labels in random order, so many of each class."""
    return rng(seed).permutation(np.repeat(list(sizes), list(sizes.values())))


def used(parts: list[np.ndarray]) -> list[int]:
    return sorted(np.concatenate(parts).tolist())


def assert_each_part_ascends(parts: list[np.ndarray]) -> None:
    for part in parts:
        assert np.issubdtype(part.dtype, np.integer)
        assert (np.diff(part) > 0).all()


# --- IID ---


def test_iid_gives_every_client_equally_many_of_each_class() -> None:
    labels = np.repeat(np.arange(10), 1000)  # in order: dealing without a shuffle would give one class each
    for part in IID().split(labels, 10, rng()):
        counts = np.bincount(labels[part], minlength=10)
        sd = sqrt(1000 * 0.1 * 0.9 * 9000 / 9999)  # hypergeometric
        assert (abs(counts - 100) < 4 * sd).all()


# --- Dirichlet ---


@pytest.mark.parametrize("alpha", [0.1, 0.5, 5.0])
@pytest.mark.parametrize("clients", [3, 8])
def test_dirichlet_shares_have_the_mean_and_variance_of_the_distribution(alpha: float, clients: int) -> None:
    classes, size = 2000, 500
    labels = np.repeat(np.arange(classes), size)
    parts = Dirichlet(alpha, min_samples=1).split(labels, clients, rng(1))
    shares = np.stack([np.bincount(labels[part], minlength=classes) for part in parts]) / size
    mean, variance, _, excess = beta(alpha, (clients - 1) * alpha).stats("mvsk")
    assert mean == pytest.approx(1 / clients)
    assert variance == pytest.approx((1 / clients) * (1 - 1 / clients) / (clients * alpha + 1))
    assert (abs(shares.mean(axis=1) - mean) < 4 * sqrt(variance / classes)).all()
    spread = ((shares - mean) ** 2).mean()
    assert abs(spread - variance) < 4 * variance * sqrt((excess + 2) / (classes * (clients - 1)))


@pytest.mark.parametrize(("clients", "alpha"), [(6, 1e-6), (60, 0.1), (1000, 0.2)])
def test_dirichlet_corrects_the_last_draw_if_none_has_min_samples(clients: int, alpha: float) -> None:
    labels = shuffled_labels(dict.fromkeys(range(5), 4 * clients))
    parts = Dirichlet(alpha, 10).split(labels, clients, rng(3))
    assert used(parts) == list(range(len(labels)))
    assert min(map(len, parts)) == 10
    again = Dirichlet(alpha, 10).split(labels, clients, rng(3))
    assert all((one == other).all() for one, other in zip(parts, again, strict=True))
    held = np.stack([np.bincount(labels[part], minlength=5) for part in parts])
    assert (held > 0).sum(axis=1).mean() < 3.5  # 20 samples of 5 classes in equal shares would show them all


def test_dirichlet_repeats_the_draw_while_few_clients_are_short() -> None:
    """A valid draw must be used as it is, however late it comes."""
    labels = shuffled_labels(dict.fromkeys(range(4), 300))
    chance, draws = rng(5), 0
    while True:
        draws += 1
        shares = chance.dirichlet(np.full(12, 0.5), size=4)
        cuts = (np.cumsum(shares, axis=1)[:, :-1] * 300).astype(int)
        counts = np.diff(cuts, axis=1, prepend=0, append=300)
        if counts.sum(axis=0).min() >= 40:
            break
    assert draws > 10
    parts = Dirichlet(0.5, 40).split(labels, 12, rng(5))
    assert [np.bincount(labels[part], minlength=4).tolist() for part in parts] == counts.T.tolist()


@pytest.mark.parametrize("seed", range(2))
def test_dirichlet_accepts_a_draw_with_exactly_min_samples(seed: int) -> None:
    labels = shuffled_labels(dict.fromkeys(range(4), 300))
    cuts = (np.cumsum(rng(seed).dirichlet(np.full(5, 2.0), size=4), axis=1)[:, :-1] * 300).astype(int)
    first_draw = np.diff(cuts, axis=1, prepend=0, append=300).T
    parts = Dirichlet(2.0, int(first_draw.sum(axis=1).min())).split(labels, 5, rng(seed))
    assert [np.bincount(labels[part], minlength=4).tolist() for part in parts] == first_draw.tolist()


def even_out(sizes: list[int], least: int) -> list[int]:
    """Move one sample at a time from the largest client to the smallest."""
    sizes = sorted(sizes)
    while sizes[0] < least:
        sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
        sizes.sort()
    return sizes


@given(st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=12), st.integers(1, 20))
def test_topping_up_takes_only_missing_samples_from_the_largest_clients(rows: list[list[int]], least: int) -> None:
    counts = np.array(rows)
    least = min(least, counts.sum() // len(counts))
    after = top_up_clients(counts, least)
    assert (after.sum(axis=0) == counts.sum(axis=0)).all()
    assert (after >= 0).all()
    before, sizes = counts.sum(axis=1), after.sum(axis=1)
    assert sorted(sizes) == even_out(before.tolist(), least)
    assert (sizes[before < least] == least).all()
    took, gave = before < sizes, before > sizes
    assert (after[took] >= counts[took]).all()
    assert (after[~took] <= counts[~took]).all()
    assert (after[~took & ~gave] == counts[~took & ~gave]).all()
    exact = counts[gave] * (before - sizes)[gave][:, None] / before[gave][:, None]
    assert (abs(counts[gave] - after[gave] - exact) < 1).all()


def test_topping_up_prefers_the_classes_of_the_short_client() -> None:
    counts = np.array([[0, 1, 0], [40, 0, 0], [1, 0, 0], [0, 40, 0]])
    assert top_up_clients(counts, 11).tolist() == [[0, 11, 0], [30, 0, 0], [11, 0, 0], [0, 30, 0]]


# --- Pathological ---


@given(data=st.data(), classes=st.integers(1, 8), clients=st.integers(1, 9), seed=seeds)
def test_pathological_gives_each_client_equal_shards_of_exactly_k_classes(
    data: st.DataObject, classes: int, clients: int, seed: int
) -> None:
    k = data.draw(st.integers(1, classes))
    sizes = {2 * label + 1: data.draw(st.integers(clients, 30)) for label in range(classes)}
    labels = shuffled_labels(sizes, seed)
    parts = Pathological(k).split(labels, clients, rng(seed))

    assert [len(np.unique(labels[part])) for part in parts] == [k] * clients
    assert len(used(parts)) == len(set(used(parts)))
    assert_each_part_ascends(parts)

    shards = {label: [n for part in parts if (n := int((labels[part] == label).sum()))] for label in sizes}
    holders = clients * k / classes
    assert {len(sizes_held) for sizes_held in shards.values()} <= {floor(holders), ceil(holders)}
    for label, held in shards.items():
        if held:
            assert sum(held) == sizes[label]
            assert max(held) - min(held) <= 1


def test_pathological_draws_every_pair_of_classes() -> None:
    labels = shuffled_labels(dict.fromkeys(range(6), 20))
    pairs = {
        frozenset(np.unique(labels[part]).tolist())
        for seed in range(60)
        for part in Pathological(2).split(labels, 3, rng(seed))
    }
    assert len(pairs) == 15  # every pair of six classes


def test_pathological_lets_any_two_clients_share_classes() -> None:
    """Six clients with two of six classes each: a client shares its classes with one other, drawn at random."""
    labels = shuffled_labels(dict.fromkeys(range(6), 20))
    partners = []
    for seed in range(200):
        own, *others = (set(labels[part]) for part in Pathological(2).split(labels, 6, rng(seed)))
        partners.append(others.index(own))
    counts = np.bincount(partners, minlength=5)
    assert (abs(counts - 40) < 4 * sqrt(200 * 0.2 * 0.8)).all()
