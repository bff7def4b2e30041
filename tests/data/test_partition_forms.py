import hashlib
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import ConfigError
from fl_lightning.data import (
    IID,
    Arrays,
    Dirichlet,
    DisjointClasses,
    Partition,
    Pathological,
    QuantitySkew,
    Scenario,
    Shards,
)
from fl_lightning.data.assignment import draw_classes, equal_sizes

USES_ALL: dict[str, Partition] = {
    "IID": IID(),
    "class": Dirichlet(0.5, min_samples=3),
    "capped": Dirichlet(0.5, min_samples=3, form="capped"),
    "balanced": Dirichlet(0.1, min_samples=3, form="balanced"),
    "groups": Dirichlet(0.3, min_samples=3, form="groups"),
    "Shards": Shards(2),
    "QuantitySkew": QuantitySkew(1.0, min_samples=3),
}
ALL = {
    **USES_ALL,
    "DisjointClasses": DisjointClasses(2),
    "Pathological": Pathological(2),
    "Pathological, drawn": Pathological(2, sizes="drawn"),
}
EQUAL_SIZES = ("IID", "balanced", "groups")


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def some_labels(seed: int, n: int = 600, classes: int = 7) -> np.ndarray:
    """Labels of classes that are not equally frequent and not numbered without gaps."""
    shares = rng(seed).dirichlet(np.full(classes, 3.0))
    return rng(seed).choice(np.arange(classes) * 2 + 1, size=n, p=shares)


def class_counts(labels: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


# --- What holds for every partition ---


@pytest.mark.parametrize("name", ALL)
@given(seed=st.integers(0, 2**32 - 1), clients=st.integers(1, 23))
def test_no_sample_is_assigned_twice_and_each_part_ascends(name: str, seed: int, clients: int) -> None:
    labels = some_labels(seed)
    labels.flags.writeable = False
    try:
        parts = ALL[name].split(labels, clients, rng(seed))
    except ConfigError:
        assert name in (
            "Pathological",
            "Pathological, drawn",
            "class",
            "capped",
            "QuantitySkew",
        )  # drawn labels can be too few for these
        return
    assigned = np.concatenate(parts)
    assert len(parts) == clients
    assert len(np.unique(assigned)) == len(assigned)
    assert all((np.diff(part) > 0).all() for part in parts)
    if name in USES_ALL:
        assert len(assigned) == len(labels)
        assert min(map(len, parts)) >= (3 if name not in ("IID", "Shards") else 1)
    if name in EQUAL_SIZES:
        assert np.ptp([len(part) for part in parts]) <= 1


@pytest.mark.parametrize("name", ALL)
def test_the_split_depends_only_on_the_seed(name: str) -> None:
    labels = some_labels(3, n=2000)
    first, again, other = (ALL[name].split(labels, 6, rng(seed)) for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(first, other, strict=True))


# Digests of the splits as first released: a change would change published results.
FINGERPRINTS = {
    "IID": "ccf084223791",
    "class": "11002cc9bde8",
    "balanced": "cc16c47cd5bd",
    "capped": "c80db5efb3ed",
    "groups": "b0fceca1fd13",
    "Shards": "c059da0bb43c",
    "QuantitySkew": "015e5f3a2b74",
    "DisjointClasses": "072f263f7378",
    "Pathological": "e592acc7a82e",
    "Pathological, drawn": "c2e6ee7c90dc",
}


@pytest.mark.parametrize("name", ALL)
def test_a_seed_gives_the_same_split_on_any_machine(name: str) -> None:
    parts = ALL[name].split(np.arange(400) * 7 % 5, 6, rng(1))
    text = ";".join(",".join(map(str, part.tolist())) for part in parts)
    assert hashlib.sha256(text.encode()).hexdigest()[:12] == FINGERPRINTS[name]


@pytest.mark.parametrize("name", sorted(ALL.keys() - {"Shards"}))  # Shards keep the order of the file, as in the paper
def test_samples_of_a_class_are_assigned_at_random(name: str) -> None:
    labels = np.repeat([0, 1, 2, 3], 500)
    shares = [part[labels[part] == j] for part in ALL[name].split(labels, 9, rng(2)) for j in range(4)]
    divided = [share for share in shares if 20 <= len(share) <= 480]
    assert divided
    assert all((np.diff(share) > 1).any() for share in divided)


# --- Dirichlet, equal sizes ---


def test_the_first_balanced_client_draws_its_classes_from_a_dirichlet() -> None:
    alpha, clients, classes, each = 0.7, 40, 5, 800  # a client's 100 samples cannot use a class up
    labels = np.repeat(np.arange(classes), each)
    shares = []
    for seed in range(300):
        first = rng(seed).permutation(clients)[0]
        part = Dirichlet(alpha, form="balanced").split(labels, clients, rng(seed))[first]
        shares.append(np.bincount(labels[part], minlength=classes) / len(part))
    mean = 1 / classes
    dirichlet = mean * (1 - mean) / (classes * alpha + 1)
    variance = dirichlet + (mean * (1 - mean) - dirichlet) / 100  # 100 draws from those shares
    assert np.abs(np.mean(shares, axis=0) - mean).max() < 4 * np.sqrt(variance / len(shares))
    assert np.abs(np.var(shares, axis=0).mean() / variance - 1) < 0.15


@pytest.mark.thorough
def test_balanced_shares_follow_the_sizes_of_the_classes() -> None:
    """The shares of a client are drawn from Dirichlet(α C p), with p the classes' shares of all samples."""
    alpha, clients = 0.5, 40
    sizes = np.array([4000, 2000, 1200, 600, 200])  # a client's 200 samples cannot use a large class up
    labels, shares = np.repeat(np.arange(5), sizes), []
    for seed in range(500):
        first = rng(seed).permutation(clients)[0]
        part = Dirichlet(alpha, form="balanced").split(labels, clients, rng(seed))[first]
        shares.append(np.bincount(labels[part], minlength=5) / len(part))
    mean = sizes / sizes.sum()
    dirichlet = mean * (1 - mean) / (alpha * 5 + 1)
    variance = dirichlet + (mean * (1 - mean) - dirichlet) / 200  # 200 draws from those shares
    assert (np.abs(np.mean(shares, axis=0) - mean) < 4 * np.sqrt(variance / len(shares))).all()
    assert np.abs(np.var(shares, axis=0)[:3] / variance[:3] - 1).max() < 0.25


def test_any_balanced_client_can_be_the_last() -> None:
    """With a tiny alpha every client but the last has about one class; the last has the rest of several."""
    labels = np.repeat(np.arange(5), [70, 70, 70, 70, 20])
    mixed = np.zeros(6)
    for seed in range(300):
        parts = Dirichlet(1e-3, 1, "balanced").split(labels, 6, rng(seed))
        mixed[np.argmax((class_counts(labels, parts) > 0).sum(axis=1))] += 1
    assert (abs(mixed - 50) < 4 * np.sqrt(300 / 6 * 5 / 6)).all()


@given(seed=st.integers(0, 2**32 - 1), alpha=st.sampled_from([1e-3, 0.1, 10.0]))
def test_drawn_classes_do_not_exceed_the_samples_that_are_left(seed: int, alpha: float) -> None:
    left = rng(seed).integers(0, 30, size=6)
    size = int(rng(seed).integers(0, left.sum() + 1))
    drawn = draw_classes(rng(seed).dirichlet(np.full(6, alpha)), left, size, rng(seed))
    assert drawn.sum() == size
    assert (drawn >= 0).all()
    assert (drawn <= left).all()


def test_if_the_classes_of_a_client_are_used_up_the_rest_is_drawn_in_proportion() -> None:
    left, size, draws = np.array([0, 900, 100]), 100, 400
    drawn = sum(draw_classes(np.array([1.0, 0.0, 0.0]), left, size, rng(seed)) for seed in range(draws))
    assert drawn.sum() == draws * size
    assert abs(drawn[2] - draws * size * 0.1) < 4 * np.sqrt(draws * size * 0.1 * 0.9)


# --- Dirichlet, capped ---


def capped_counts_by_loop(labels: np.ndarray, clients: int, alpha: float, draw: np.random.Generator) -> np.ndarray:
    """Counts by client and class, from the rule in words: one class after another, sample lists, and the cap."""
    held: list[list[int]] = [[] for _ in range(clients)]
    for label in sorted(set(labels.tolist())):
        samples = [i for i, own in enumerate(labels) if own == label]
        shares = draw.dirichlet([alpha] * clients).tolist()
        shares = [share if len(own) < len(labels) / clients else 0.0 for share, own in zip(shares, held, strict=True)]
        total, begun, start = sum(shares), 0.0, 0
        for k, share in enumerate(shares):
            begun += share / total
            end = len(samples) if k == clients - 1 else int(begun * len(samples))
            held[k] += samples[start:end]
            start = end
    return class_counts(labels, [np.array(own, dtype=np.int64) for own in held])


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("seed", range(5))
def test_capped_counts_equal_those_of_a_loop_over_samples(alpha: float, seed: int) -> None:
    labels = some_labels(seed)
    parts = Dirichlet(alpha, min_samples=1, form="capped").split(labels, 6, rng(seed))
    draw = rng(seed)
    while (counts := capped_counts_by_loop(labels, 6, alpha, draw)).sum(axis=1).min() < 1:
        pass
    difference = np.abs(class_counts(labels, parts) - counts)
    assert difference.max() <= 1  # the last bit of a cumulative sum can move one sample


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("alpha", "printed"), [(0.1, 46), (1.0, 94), (0.01, 12), (0.05, 30), (0.25, 68), (0.5, 85)])
def test_capped_splits_have_the_classes_per_client_of_cwfedavgs_table_3(alpha: float, printed: int) -> None:
    """Each printed value could be one draw of 20 clients on CIFAR-100 with the cap, and none without it."""
    labels = np.repeat(np.arange(100), 600)  # they split the training and the test set together

    def classes_per_client(form: str, seed: int) -> float:
        return float(
            np.mean([len(np.unique(labels[part])) for part in Dirichlet(alpha, 1, form).split(labels, 20, rng(seed))])
        )

    for form in ("capped", "class"):
        drawn = [classes_per_client(form, seed) for seed in range(20)]
        deviations = abs(np.mean(drawn) - printed) / np.std(drawn, ddof=1)
        assert (deviations < 3) == (form == "capped")


def test_a_client_with_an_equal_share_gets_no_samples_of_the_next_classes() -> None:
    labels = some_labels(3, n=5000)
    counts = class_counts(labels, Dirichlet(0.3, form="capped").split(labels, 8, rng(0)))
    reached = 0
    for row in counts:
        before = np.cumsum(row) - row
        assert not row[before >= len(labels) / 8].any()
        reached += (before[row == 0] >= len(labels) / 8).any()
    assert reached


@pytest.mark.parametrize("form", ["capped", "groups"])
def test_a_tiny_alpha_still_ends(form: str) -> None:
    labels = np.repeat(np.arange(10), 60)
    counts = class_counts(labels, Dirichlet(1e-5, min_samples=10, form=form).split(labels, 10, rng(0)))
    assert (counts.sum(axis=0) == 60).all()


# --- Pathological, drawn sizes ---


def test_drawn_shards_are_uniform_between_a_tenth_of_an_equal_shard_and_the_whole() -> None:
    labels = np.repeat(np.arange(10), 400)  # 20 clients with two classes: 4 holders, an equal shard has 100
    drawn, rests = [], []
    for seed in range(200):
        counts = class_counts(labels, Pathological(2, sizes="drawn").split(labels, 20, rng(seed)))
        assert ((counts > 0).sum(axis=1) == 2).all()
        assert (counts.sum(axis=0) == 400).all()
        for held in counts.T:
            *sizes, rest = sorted(held[held > 0])
            drawn += sizes
            rests.append(rest)
    assert min(drawn) == 10
    assert max(drawn) == 99
    assert np.abs(np.mean(drawn) - 54.5) < 4 * np.sqrt((90**2 - 1) / 12 / len(drawn))
    assert np.mean(rests) == pytest.approx(400 - 3 * np.mean(drawn))


# --- Dirichlet, FedSKC's groups ---


def test_each_group_of_ten_has_its_own_part_of_the_shuffled_samples() -> None:
    labels = np.repeat(np.arange(10), 600)
    parts = Dirichlet(0.1, form="groups").split(labels, 30, rng(0))
    shuffled = rng(0).permutation(len(labels))
    for group in range(3):
        own = np.concatenate(parts[10 * group : 10 * group + 10])
        assert set(own) == set(shuffled[2000 * group : 2000 * group + 2000])


def test_a_smaller_alpha_gives_more_skewed_groups() -> None:
    labels = np.repeat(np.arange(10), 500)
    spread = [
        np.mean([class_counts(labels, Dirichlet(alpha, form="groups").split(labels, 20, rng(s))).std() for s in (0, 1)])
        for alpha in (0.05, 0.5, 5.0, 500.0)
    ]
    assert spread == sorted(spread, reverse=True)


def test_each_client_of_a_group_draws_at_least_half_an_equal_share() -> None:
    """Their samples, one client after the other, are then cut into equal parts."""
    labels, repeated = np.repeat(np.arange(10), 60), 0
    for seed in range(5):
        draw = rng(seed)
        draw.permutation(len(labels))
        while (counts := capped_counts_by_loop(labels, 10, 0.2, draw)).sum(axis=1).min() < 30:
            repeated += 1
        drawn = np.concatenate([np.repeat(np.arange(10), own) for own in counts]).reshape(10, 60)
        parts = Dirichlet(0.2, form="groups").split(labels, 10, rng(seed))
        difference = class_counts(labels, parts) - [np.bincount(own, minlength=10) for own in drawn]
        assert np.abs(difference).max() <= 2  # the last bit of a cumulative sum can move one sample
    assert repeated


def test_clients_can_have_exactly_min_samples() -> None:
    labels = np.repeat(np.arange(3), 20)
    assert [len(part) for part in Dirichlet(0.5, min_samples=10).split(labels, 6, rng(0))] == [10] * 6


# --- The others ---


@pytest.mark.parametrize(("total", "parts"), [(10, 3), (9, 3), (2, 5), (0, 2)])
def test_equal_sizes_equal_those_of_numpys_array_split(total: int, parts: int) -> None:
    assert equal_sizes(total, parts).tolist() == [len(part) for part in np.array_split(np.arange(total), parts)]


@given(seed=st.integers(0, 2**32 - 1))
def test_shards_are_cut_from_the_sorted_labels(seed: int) -> None:
    labels = rng(seed).permutation(np.repeat(np.arange(10), 60))
    counts = class_counts(labels, Shards(2).split(labels, 10, rng(seed)))
    # 20 shards of 30: two of each class, so that a client holds 30 or 60 of one and nothing between.
    assert set(np.unique(counts)) <= {0, 30, 60}
    assert (counts.sum(axis=1) == 60).all()
    assert ((counts > 0).sum(axis=1) <= 2).all()


def test_quantity_skew_changes_sizes_and_not_classes() -> None:
    labels = np.repeat(np.arange(4), 25_000)
    parts = QuantitySkew(0.5).split(labels, 10, rng(0))
    sizes = np.array([len(part) for part in parts])
    assert sizes.max() > 5 * sizes.min()
    shares = class_counts(labels, parts) / sizes[:, None]
    standard_error = np.sqrt(0.25 * 0.75 / sizes)
    assert (np.abs(shares - 0.25) < 4 * standard_error[:, None]).all()


def test_sizes_under_quantity_skew_have_the_moments_of_a_dirichlet() -> None:
    labels, clients, alpha = np.zeros(10_000, dtype=int), 4, 1.0
    shares = np.array(
        [[len(part) for part in QuantitySkew(alpha, 1).split(labels, clients, rng(s))] for s in range(500)]
    )
    variance = (clients - 1) / clients**2 / (clients * alpha + 1)
    assert np.abs((shares / 10_000).var(axis=0) / variance - 1).max() < 0.2


@given(seed=st.integers(0, 2**32 - 1), per_client=st.integers(1, 4), clients=st.integers(1, 12))
def test_two_clients_have_the_same_classes_or_none_in_common(seed: int, per_client: int, clients: int) -> None:
    labels = some_labels(seed)
    held = class_counts(labels, DisjointClasses(per_client).split(labels, clients, rng(seed))) > 0
    assert (held.sum(axis=1) <= per_client).all()
    assert held.any(axis=1).all()
    for one, other in combinations(held, 2):
        assert np.array_equal(one, other) or not (one & other).any()


def test_a_block_of_classes_is_split_equally_and_completely() -> None:
    labels = np.repeat(np.arange(9), 100)
    counts = class_counts(labels, DisjointClasses(3).split(labels, 6, rng(0)))
    assert (counts.sum(axis=0) == 100).all()
    assert (counts.sum(axis=1) == 150).all()


# --- Local test data ---


@pytest.fixture
def arrays(tmp_path) -> Arrays:
    train, test = some_labels(0, 900) // 2, some_labels(0, 300) // 2
    x = np.arange(1200, dtype=np.float32)[:, None]
    np.savez(tmp_path / "a.npz", x_train=x[:900], y_train=train, x_test=x[900:], y_test=test)
    return Arrays(str(tmp_path / "a.npz"))


def test_clients_are_tested_on_their_share_of_the_official_test_set(arrays: Arrays) -> None:
    official = arrays.load()
    built = Scenario(arrays, Dirichlet(0.3), clients=5, local_test="official").build(seed=0)
    assigned = torch.cat([shard.train for shard in built.shards])
    tested = torch.cat([shard.test for shard in built.shards])
    assert sorted(assigned.tolist()) == list(range(900))
    assert torch.equal(built.data.x_train[tested].sort(dim=0).values, official.x_test)
    assert torch.equal(built.data.x_test, official.x_test)
    assert torch.equal(built.data.y_test, official.y_test)
    train, test = built.class_counts("train"), built.class_counts("test")
    exact = test.sum(axis=0) * train / train.sum(axis=0)
    assert np.abs(test - exact).max() < 1  # largest remainder


def test_a_test_class_without_training_samples_is_unused(arrays: Arrays) -> None:
    built = Scenario(arrays, DisjointClasses(2), clients=2, local_test="official").build(seed=0)
    train, test = built.class_counts("train"), built.class_counts("test")
    assert (train.sum(axis=0) == 0).any()
    assert ((test > 0) == (train > 0)).all()


def test_local_test_does_not_change_the_partition(arrays: Arrays) -> None:
    ways = [Scenario(arrays, Dirichlet(0.3), 5, local_test=way).build(0) for way in (0.0, 0.25, "official")]
    whole = [[sorted([*s.train.tolist(), *s.test[s.test < 900].tolist()]) for s in built.shards] for built in ways]
    assert whole[0] == whole[1] == whole[2]
