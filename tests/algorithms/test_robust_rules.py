"""The robust rules: against loops and byzfl, identities with the mean, symmetries and breakdown points."""

from functools import partial
from math import ceil, inf

import numpy as np
import pytest
import torch

from fl_lightning.algorithms import (
    Bucketing,
    Bulyan,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    NearestNeighborMixing,
    NormBound,
    SignGuard,
    TrimmedMean,
    WeightedMean,
)
from fl_lightning.algorithms.aggregators import fold_all
from fl_lightning.algorithms.robust import vectors
from fl_lightning.algorithms.robust.bulyan import select_by_krum
from fl_lightning.algorithms.robust.krum import krum_order as ranking
from fl_lightning.algorithms.robust.rule import tolerated
from fl_lightning.algorithms.robust.signguard import largest_cluster, sign_shares
from fl_lightning.core.errors import ConfigError, TooFewClients
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round

SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (7,)}
SIZE = 22
EXACT = "donot_use_mm_for_euclid_dist"
RULES = {
    "Median": Median,
    "TrimmedMean": partial(TrimmedMean, 2),
    "Krum": partial(Krum, 2),
    "MultiKrum": partial(MultiKrum, 2),
    "MultiKrum of m": partial(MultiKrum, 2, 3),
    "Bulyan": partial(Bulyan, 2),
    "GeometricMedian": partial(GeometricMedian, 5, 0.1),
    "CenteredClipping": partial(CenteredClipping, 2.0, 3),
    "NormBound": partial(NormBound, 2.0),
    "SignGuard": partial(SignGuard, share=0.5),
    "Bucketing": lambda: Bucketing(Krum(1)),
    "NearestNeighborMixing": lambda: NearestNeighborMixing(TrimmedMean(2), 2),
}
N = 12


def split(vector):
    """Return a vector as a state dict."""
    parts = torch.as_tensor(vector).split([int(np.prod(shape)) for shape in SHAPES.values()])
    return {name: part.reshape(shape) for (name, shape), part in zip(SHAPES.items(), parts, strict=True)}


def join(state):
    return torch.cat([state[name].flatten() for name in SHAPES]).numpy()


def uploads_of(rows, origin=None, samples=None):
    received = None if origin is None else split(origin)
    return [
        Upload(k, Message.pack({"model": split(row)}, n_samples=1 if samples is None else samples[k]), received)
        for k, row in enumerate(rows)
    ]


def apply(rule, rows, origin=None, samples=None, centre=None, seed=0):
    """Return a rule's mean of the rows of a matrix. The origin is 0 by default."""
    origin = np.zeros(rows.shape[1]) if origin is None else origin
    before = {"model": split(origin)} | ({} if centre is None else {"centre": split(centre)})
    round = Round(1, before, seed)
    return join(rule.finish(fold_all(rule, uploads_of(rows, origin, samples), round), round, {})["model"])


def draw(n=N, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).normal(size=(n, SIZE)).astype(dtype)


# --- References -----------------------------------------------------------------------------------------------------


def krum_order(rows, f, neighbours=None):
    n = len(rows)
    k = n - f - 2 if neighbours is None else neighbours
    scores = []
    for i in range(n):
        gaps = sorted(sum((x - y) ** 2 for x, y in zip(rows[i], rows[j], strict=True)) for j in range(n) if j != i)
        scores.append((sum(gaps[:k]), sum(gaps)))
    return sorted(range(n), key=lambda i: scores[i])


def multi_krum(rows, f, m):
    return np.mean([rows[i] for i in krum_order(rows, f)[:m]], axis=0)


def trimmed(rows, f):
    return np.array([np.mean(sorted(column)[f : len(rows) - f]) for column in rows.T])


def bulyan_choice(rows, f):
    left, chosen = list(range(len(rows))), []
    while len(chosen) < len(rows) - 2 * f:
        chosen.append(left.pop(krum_order(rows[left], f, max(1, len(left) - f - 2))[0]))
    return chosen


def bulyan(rows, f):
    chosen = bulyan_choice(rows, f)
    keep = len(chosen) - 2 * f
    result = []
    for column in rows[chosen].T:
        middle = np.median(column)
        result.append(np.mean(sorted(column, key=lambda x: abs(x - middle))[:keep]))
    return np.array(result)


def weiszfeld(rows, alphas, iterations, nu, start):
    point = start
    for _ in range(iterations):
        weights = [a / max(nu, np.linalg.norm(point - row)) for a, row in zip(alphas, rows, strict=True)]
        point = sum(w * row for w, row in zip(weights, rows, strict=True)) / sum(weights)
    return point


def clip(vector, bound):
    return vector * min(1.0, bound / np.linalg.norm(vector))


def centered(rows, tau, iterations, v):
    for _ in range(iterations):
        v = v + sum(clip(row - v, tau) for row in rows) / len(rows)
    return v


def mixed(rows, f):
    nearest = [sorted(rows, key=lambda other: np.linalg.norm(row - other))[: len(rows) - f] for row in rows]
    return np.array([np.mean(group, axis=0) for group in nearest])


def buckets(rows, size, seed=0):
    order = Round(1, {}, seed).rng.permutation(len(rows))
    return np.array([rows[order[i : i + size]].mean(axis=0) for i in range(0, len(rows), size)])


def mean_shift(points):
    """Return the members of the largest cluster by mean shift with a flat kernel (Comaniciu and Meer 2002)."""
    n = len(points)
    gaps = [[np.linalg.norm(x - y) for y in points] for x in points]
    width = np.mean([sorted(row)[max(1, n // 2) - 1] for row in gaps])
    modes = []
    for centre in points:
        while True:
            near = [x for x in points if np.linalg.norm(x - centre) <= width]
            old, centre = centre, np.mean(near, axis=0)
            if np.linalg.norm(centre - old) <= 1e-3 * width:
                break
        modes.append((len(near), tuple(centre)))
    centres = []
    for _, mode in sorted(set(modes), reverse=True):
        if all(np.linalg.norm(np.subtract(mode, other)) > width for other in centres):
            centres.append(mode)
    labels = [min(range(len(centres)), key=lambda c: np.linalg.norm(x - centres[c])) for x in points]
    return np.array(labels) == max(range(len(centres)), key=labels.count)


def sign_guard(gaps, lower, upper, share, seed=0):
    """Return the mean of the clipped updates that both filters keep, and which these are."""
    norms = [np.sqrt(sum(x * x for x in gap)) for gap in gaps]
    middle = np.median(norms)
    count = round(share * SIZE)
    used = Round(1, {}, seed).rng.choice(SIZE, count, replace=False, shuffle=False)
    signs = [[sum(np.sign(gap[i]) == s for i in used) / count for s in (1, 0, -1)] for gap in gaps]
    kept = mean_shift(np.array(signs)) & [lower * middle <= norm <= upper * middle for norm in norms]
    return np.mean([clip(gap, middle) for gap, keep in zip(gaps, kept, strict=True) if keep], axis=0), kept


@pytest.mark.parametrize("n", [11, 12])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_rule_is_that_of_its_equation(n, seed, monkeypatch):
    monkeypatch.setattr(vectors, "PIECE", 5 * n)  # several chunks per entry
    rows, origin = draw(n, seed), draw(1, seed + 9)[0]
    samples = list(range(1, n + 1))
    gaps = rows - origin
    expected = {
        Median(): np.median(rows, axis=0),
        TrimmedMean(3): trimmed(rows, 3),
        Krum(2): rows[krum_order(rows, 2)[0]],
        MultiKrum(2): multi_krum(rows, 2, n - 2),
        MultiKrum(3, 4): multi_krum(rows, 3, 4),
        Bulyan(1): bulyan(rows, 1),
        Bulyan(2): bulyan(rows, 2),
        GeometricMedian(4, 0.5): weiszfeld(rows, [1] * n, 4, 0.5, origin),
        GeometricMedian(4, 5.5, "samples"): weiszfeld(rows, samples, 4, 5.5, origin),
        NormBound(4.0): origin + sum(clip(gap, 4.0) for gap in gaps) / n,
        NormBound(4.0, "samples"): origin
        + sum(s * clip(gap, 4.0) for s, gap in zip(samples, gaps, strict=True)) / sum(samples),
        CenteredClipping(4.0): origin + centered(gaps, 4.0, 1, np.zeros(SIZE)),
        CenteredClipping(3.0, 4): origin + centered(gaps, 3.0, 4, np.zeros(SIZE)),
        SignGuard(share=0.5): origin + sign_guard(gaps, 0.1, 3.0, 0.5)[0],
        SignGuard(0.9, 1.1): origin + sign_guard(gaps, 0.9, 1.1, 0.1)[0],
        NearestNeighborMixing(Krum(2), 3): mixed(rows, 3)[krum_order(mixed(rows, 3), 2)[0]],
        Bucketing(TrimmedMean(1), 3): trimmed(buckets(rows, 3), 1),
        Bucketing(NormBound(1.0), 2): origin + sum(clip(gap, 1.0) for gap in buckets(rows, 2) - origin) / ceil(n / 2),
        Bucketing(NearestNeighborMixing(Median(), 1), 2): np.median(mixed(buckets(rows, 2), 1), axis=0),
    }
    for rule, value in expected.items():
        assert np.abs(apply(rule, rows, origin, samples) - value).max() < 1e-12, rule


def test_the_clusters_of_signguard_are_those_of_a_loop():
    for seed in range(20):
        points = np.random.default_rng(seed).normal(size=(9, 3))
        assert np.array_equal(largest_cluster(torch.from_numpy(points)), mean_shift(points))
    assert largest_cluster(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])).tolist() == [True, False, True]
    assert largest_cluster(torch.ones(1, 3)).tolist() == [True]


def test_the_signs_of_updates_are_counted():
    rows = np.array([[1.0] * 5 + [0.0] * 6 + [-1.0] * 11, [-1.0] * SIZE])
    models = vectors.Vectors([split(row + 2) for row in rows], list(SHAPES), split(np.full(SIZE, 2.0)), {}, None)
    shares = sign_shares(models, 1.0, np.random.default_rng(0)).numpy()
    np.testing.assert_allclose(shares, [[5 / 22, 6 / 22, 0.5], [0, 0, 1]])


def test_signguard_leaves_out_other_norms_and_other_signs():
    """Three clients reverse their signs, one sends a long update and one a short one. The others stay."""
    gaps = np.abs(draw(N, 4)) + 0.5
    gaps[:3] *= -1
    gaps[3] *= 1e6
    gaps[4] *= 1e-3
    value, kept = sign_guard(gaps, 0.1, 3.0, 1.0)
    assert kept.tolist() == [False] * 5 + [True] * (N - 5)
    assert np.abs(apply(SignGuard(share=1.0), gaps) - value).max() < 1e-12


def test_signguard_keeps_the_model_if_no_update_passes_both_filters():
    """Most updates have few positive elements and large norms, the others many and the median norm."""
    gaps = np.ones((5, SIZE))
    gaps[:3] *= -1
    gaps *= np.array([9.0, 9.0, 0.01, 1.0, 1.0])[:, None]
    origin = draw(1, 3)[0]
    assert np.array_equal(apply(SignGuard(), gaps + origin, origin), origin)
    assert np.array_equal(apply(SignGuard(), np.zeros((4, SIZE)) + origin, origin), origin)


def test_signguard_draws_other_coordinates_in_other_rounds():
    rows = draw(N, 2)
    results = {apply(SignGuard(share=0.2), rows, seed=seed).tobytes() for seed in range(8)}
    assert len(results) > 1
    assert len({apply(SignGuard(share=1.0), rows, seed=seed).tobytes() for seed in range(8)}) == 1


def test_the_order_of_krum_and_the_choice_of_bulyan_are_those_of_loops():
    for seed in range(20):
        rows = np.random.default_rng(seed).normal(size=(9, 3))
        gaps = torch.cdist(torch.from_numpy(rows), torch.from_numpy(rows), compute_mode=EXACT).square()
        for f in (0, 1, 2):
            assert ranking(gaps, 9 - f - 2) == krum_order(rows, f)
        for f in (1, 2):
            assert select_by_krum(gaps, f) == sorted(bulyan_choice(rows, f))
        models = draw(9, seed)
        assert np.array_equal(apply(Krum(2), models), models[krum_order(models, 2)[0]])


def test_centred_clipping_starts_from_the_last_aggregated_update_which_it_keeps():
    rows, origin, centre = draw(), draw(1, 8)[0], draw(1, 9)[0]
    rule = CenteredClipping(2.0, 2)
    round = Round(1, {"model": split(origin), "centre": split(centre)})
    state = rule.finish(fold_all(rule, uploads_of(rows, origin), round), round, {})
    expected = centered(rows - origin, 2.0, 2, centre)
    assert np.abs(join(state["centre"]) - expected).max() < 1e-12
    assert np.abs(join(state["model"]) - origin - expected).max() < 1e-12
    assert all(not value.any() for value in rule.initial(split(origin), 10)["centre"].values())
    assert Bucketing(rule).initial(split(origin), 10)["centre"].keys() == split(origin).keys()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_rule_is_that_of_byzfl(seed, monkeypatch):
    """byzfl's Krum of f has n - f - 1 neighbours, as ours (and the paper's) of f - 1."""
    byzfl = pytest.importorskip("byzfl")
    rows = draw(11, seed)
    pairs = [
        (Median(), byzfl.Median()),
        (TrimmedMean(3), byzfl.TrMean(3)),
        (Krum(1), byzfl.Krum(2)),
        (MultiKrum(1, 9), byzfl.MultiKrum(2)),
        (GeometricMedian(3, 0.1), byzfl.GeometricMedian(0.1, 3)),
        (CenteredClipping(2.0, 3), byzfl.CenteredClipping(L=3, tau=2.0)),
        (NormBound(2.0), lambda x: byzfl.Average()(byzfl.Clipping(2.0)(x.copy()))),
        (NearestNeighborMixing(TrimmedMean(2), 2), lambda x: byzfl.TrMean(2)(byzfl.NNM(2)(x))),
        (NearestNeighborMixing(GeometricMedian(3, 0.1), 3), lambda x: byzfl.GeometricMedian(0.1, 3)(byzfl.NNM(3)(x))),
        (Bucketing(CenteredClipping(2.0), 2), lambda x: byzfl.CenteredClipping(tau=2.0)(byzfl.Bucketing(2)(x))),
        (Bucketing(Median(), 3), lambda x: byzfl.Median()(byzfl.Bucketing(3)(x))),
    ]
    monkeypatch.setattr(np.random, "permutation", lambda x: x[Round(1, {}, 0).rng.permutation(len(x))])
    for ours, theirs in pairs:
        assert np.abs(apply(ours, rows) - theirs(rows.copy())).max() < 1e-9, ours


# --- Identities -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        TrimmedMean(0),
        MultiKrum(0),
        MultiKrum(2, N),
        Bulyan(0),
        NormBound(inf),
        CenteredClipping(inf),
        CenteredClipping(inf, 3),
        Bucketing(NormBound(inf), 1),
        Bucketing(Bucketing(TrimmedMean(0), 1), 1),
    ],
)
def test_a_rule_without_attackers_is_the_mean_bit_for_bit(rule):
    rows, origin = draw(dtype=np.float32), draw(1, 3, np.float32)[0]
    rows[:, 0] = -0.0
    samples = list(range(3, 3 + N))
    mean = apply(WeightedMean("uniform"), rows, origin)
    assert apply(rule, rows, origin, samples, centre=origin).tobytes() == mean.tobytes()


def test_signguard_is_the_mean_bit_for_bit_if_updates_have_the_same_norm_and_signs():
    numbers = np.random.default_rng(0)
    rows = np.array([numbers.permutation(np.arange(SIZE) - 7.0) for _ in range(N)])
    assert apply(SignGuard(share=1.0), rows).tobytes() == apply(WeightedMean("uniform"), rows).tobytes()


def test_an_unbounded_norm_is_the_weighted_mean_bit_for_bit():
    rows, samples = draw(dtype=np.float32), list(range(3, 3 + N))
    mean = apply(WeightedMean(), rows, samples=samples)
    assert apply(NormBound(inf, "samples"), rows, samples=samples).tobytes() == mean.tobytes()


@pytest.mark.parametrize("name", ["Median", "TrimmedMean", "Krum", "Bulyan", "GeometricMedian", "CenteredClipping"])
def test_buckets_of_one_client_are_the_rule_bit_for_bit(name):
    rows = draw(dtype=np.float32)
    assert apply(Bucketing(RULES[name](), 1), rows).tobytes() == apply(RULES[name](), rows).tobytes()


def test_krum_returns_the_model_of_one_client_bit_for_bit():
    rows = draw(dtype=np.float32)
    assert apply(Krum(2), rows).tobytes() in [row.tobytes() for row in rows]


# --- Symmetries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in RULES if name != "Bucketing"])
def test_the_order_of_the_clients_does_not_matter(name):
    rows, rule = draw(), RULES[name]()
    for seed in range(3):
        order = np.random.default_rng(seed).permutation(N)
        assert np.abs(apply(rule, rows[order]) - apply(rule, rows)).max() < 1e-12


@pytest.mark.parametrize("name", RULES)
def test_a_rule_moves_with_all_models(name):
    rows, origin, step = draw(), draw(1, 5)[0], 10 * draw(1, 6)[0]
    moved = apply(RULES[name](), rows + step, origin + step)
    assert np.abs(moved - step - apply(RULES[name](), rows, origin)).max() < 1e-12


EQUIVARIANT = ["Median", "TrimmedMean", "Krum", "MultiKrum", "Bulyan", "Bucketing", "NearestNeighborMixing"]


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_only_some_rules_depend_on_the_received_weights(name):
    rows, origin = draw(), draw(1, 5)[0]
    assert apply(RULES[name](), rows, origin).tobytes() == apply(RULES[name](), rows).tobytes()


@pytest.mark.parametrize("name", RULES)
def test_only_the_rules_that_say_so_use_numbers_of_samples(name):
    rows, samples = draw(), list(range(1, N + 1))
    assert apply(RULES[name](), rows, samples=samples).tobytes() == apply(RULES[name](), rows).tobytes()
    for weighted in (GeometricMedian(weighting="samples"), NormBound(2.0, "samples")):
        assert np.abs(apply(weighted, rows, samples=samples) - apply(weighted, rows)).max() > 1e-3


# --- Attackers ------------------------------------------------------------------------------------------------------


def attacked(f, size=1e6, n=N):
    """Return honest models and f attackers that send the same model, far away."""
    rows = draw(n)
    rows[:f] = size
    return rows, rows[f:]


def inside_box(value, honest):
    return bool(((honest.min(axis=0) - 1e-9 <= value) & (value <= honest.max(axis=0) + 1e-9)).all())


@pytest.mark.parametrize(
    ("rule", "f"),
    [
        (Median(), 5),
        (TrimmedMean(3), 3),
        (TrimmedMean(5), 5),
        (Krum(4), 4),
        (MultiKrum(4), 4),
        (Bulyan(2), 2),
        (NearestNeighborMixing(Median(), 5), 5),
        (NearestNeighborMixing(MultiKrum(4), 4), 4),
        (Bucketing(Median(), 2), 2),
        (Bucketing(TrimmedMean(2), 2), 2),
        (SignGuard(share=1.0), 5),
    ],
)
def test_f_attackers_leave_the_result_between_the_honest_models(rule, f):
    for size in (1e6, -1e6):
        rows, honest = attacked(f, size)
        assert inside_box(apply(rule, rows), honest)


@pytest.mark.parametrize(
    ("rule", "f"),
    [(WeightedMean("uniform"), 1), (Median(), 7), (TrimmedMean(3), 4), (MultiKrum(2), 3), (GeometricMedian(99), 7)],
)
def test_one_attacker_more_moves_the_result_away(rule, f):
    rows, honest = attacked(f)
    assert not inside_box(apply(rule, rows), honest)
    assert np.abs(apply(rule, rows)).max() > 1e4


def test_a_minority_moves_the_geometric_median_by_a_bounded_distance():
    """It is at most 2(1 - f/n)/(1 - 2f/n) times the largest honest distance from an honest point (Pillutla et al.)."""
    for f in (1, 3, 5):
        rows, honest = attacked(f)
        radius = np.linalg.norm(honest, axis=1).max()
        bound = 2 * (N - f) / (N - 2 * f) * radius
        assert np.linalg.norm(apply(GeometricMedian(200), rows)) <= bound


@pytest.mark.parametrize("rule", [NormBound(0.5), CenteredClipping(0.5)])
def test_an_attacker_moves_a_clipped_mean_by_the_bound_at_most(rule):
    rows, _ = attacked(1)
    without = np.vstack([np.zeros(SIZE), rows[1:]])
    assert np.linalg.norm(apply(rule, rows) - apply(rule, without)) <= 0.5 / N + 1e-12


# --- Buffers, integers and types ------------------------------------------------------------------------------------


def with_buffers(weight, mean, count):
    tensors = {"w": torch.tensor([weight]), "bn.running_mean": torch.tensor([mean]), "bn.count": torch.tensor(count)}
    return Message.pack({"model": tensors}, n_samples=1)


def test_a_distance_rule_chooses_parameters_and_buffers_separately():
    """An attacker with ordinary parameters cannot send extreme statistics."""
    models = [(1.0, 0.9), (1.1, 1.0), (1.15, 1e6), (1.2, 1.1), (9.0, 1.05)]
    uploads, round = [Upload(k, with_buffers(w, mean, 5)) for k, (w, mean) in enumerate(models)], Round(1, {})
    model = Krum(1).finish(fold_all(Krum(1), uploads, round), round, {})["model"]
    assert (model["w"].item(), model["bn.running_mean"].item()) == (pytest.approx(1.15), pytest.approx(1.05))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [(Krum(0), 2**40), (Krum(1), 7), (TrimmedMean(2), 6), (Median(), 6), (Bucketing(Krum(0), 1), 2**40)],
)
def test_the_largest_integers_are_left_out(rule, expected):
    counts = [7, 6, 2**40, 5, 5]
    uploads, round = [Upload(k, with_buffers(0.1 * k, 0.0, c)) for k, c in enumerate(counts)], Round(1, {})
    count = rule.finish(fold_all(rule, uploads, round), round, {})["model"]["bn.count"]
    assert (count.item(), count.dtype) == (expected, torch.int64)


def test_of_an_even_number_of_integers_fewer_than_half_are_left_out():
    uploads = [Upload(k, with_buffers(0.1 * k, 0.0, count)) for k, count in enumerate([7, 6, 5, 4])]
    round = Round(1, {})
    assert Median().finish(fold_all(Median(), uploads, round), round, {})["model"]["bn.count"].item() == 6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", RULES)
def test_a_rule_keeps_types_and_shapes(name, dtype):
    states = [{"w": torch.randn(2, 3).to(dtype), "s": torch.tensor(1.0, dtype=dtype), "e": torch.zeros(0)}] * N
    uploads, round = [Upload(k, Message.pack({"model": s}, n_samples=1)) for k, s in enumerate(states)], Round(1, {})
    rule = RULES[name]()
    model = fold_all(rule, uploads, round).value()
    assert {name: (v.dtype, v.shape) for name, v in model.items()} == {
        name: (v.dtype, v.shape) for name, v in states[0].items()
    }


def test_large_models_with_small_differences_keep_their_distances():
    rows = 1e8 + 1e-3 * draw()
    assert np.abs(apply(Krum(2), rows) - rows[krum_order(rows, 2)[0]]).max() == 0


# --- Errors ---------------------------------------------------------------------------------------------------------

LEAST = {Median(): 1, TrimmedMean(2): 5, Krum(2): 7, MultiKrum(1): 5, MultiKrum(0, 9): 9, Bulyan(2): 11}
LEAST |= {NearestNeighborMixing(Median(), 2): 5, NearestNeighborMixing(Krum(3), 2): 9, Bucketing(Krum(1), 2): 9}


SHARES = {
    "TrimmedMean": TrimmedMean,
    "Krum": Krum,
    "MultiKrum": MultiKrum,
    "Bulyan": Bulyan,
    "NearestNeighborMixing": lambda f: NearestNeighborMixing(TrimmedMean(f), f),
    "Bucketing": lambda f: Bucketing(TrimmedMean(f), 2),
}


@pytest.mark.parametrize("name", SHARES)
def test_f_can_be_a_share_of_the_rounds_clients_rounded_up(name):
    """0.15 of 12 clients are 2, in buckets of two, too; integers are left out by the same number."""
    rows = np.random.default_rng(3).normal(size=(N, SIZE)) + np.arange(N)[:, None] ** 2
    np.testing.assert_array_equal(apply(SHARES[name](0.15), rows), apply(SHARES[name](2), rows))
    assert name == "Krum" or not np.array_equal(apply(SHARES[name](0.05), rows), apply(SHARES[name](2), rows))
    assert SHARES[name](0.15).extremes(N) == SHARES[name](2).extremes(N) == 2


def test_a_share_is_rounded_up_without_rounding_errors():
    for share, clients, count in ((0.1, 30, 3), (0.2, 5, 1), (0.2, 6, 2), (0.0, 9, 0), (0.29, 100, 29), (0.07, 100, 7)):
        assert tolerated(share, clients) == count
    assert (tolerated(3, 5), tolerated(2.0, 5), tolerated(None, 5)) == (3, 2, 0)


@pytest.mark.parametrize(
    ("rule", "enough", "words"),
    [
        (Krum(0.2), 7, r"Krum with f 2, 0.2 of 6 clients, needs at least 7 models a round \(2f \+ 3\), not 6"),
        (Bucketing(TrimmedMean(0.2), 2), 5, "TrimmedMean with f 2, 0.2 of 6 clients, needs at least 5 .* not 3, the b"),
        (NearestNeighborMixing(Median(), 0.4), 5, "NearestNeighborMixing with f 3, 0.4 of 6 clients, needs"),
    ],
)
def test_a_share_of_too_many_attackers_is_refused_with_both_numbers(rule, enough, words):
    rule.require_uploads(enough)
    with pytest.raises(ConfigError, match=rf"^algorithm\.aggregator: {words}"):
        rule.require_uploads(6)


def test_too_few_models_are_refused_before_round_1_and_in_a_round():
    for rule, least in LEAST.items():
        rule.require_uploads(least)
        apply(rule, draw(least))
        with pytest.raises(ConfigError, match=r"^algorithm\.aggregator: .* needs at least"):
            rule.require_uploads(least - 1)
        round = Round(7, {})
        with pytest.raises(TooFewClients, match=rf"^round 7: {type(rule).__name__[:4] if least == 1 else ''}.*"):
            fold_all(rule, uploads_of(draw(least - 1)), round).value()


@pytest.mark.parametrize(
    ("build", "key"),
    [
        (lambda: TrimmedMean(-1), "f"),
        (lambda: Krum(-1), "f"),
        (lambda: MultiKrum(1, 0), "m"),
        (lambda: Bulyan(-1), "f"),
        (lambda: GeometricMedian(0), "iterations"),
        (lambda: GeometricMedian(3, 0.0), "smoothing"),
        (lambda: CenteredClipping(0.0), "tau"),
        (lambda: CenteredClipping(1.0, 0), "iterations"),
        (lambda: NormBound(0.0), "bound"),
        (lambda: SignGuard(lower=1.1), "lower"),
        (lambda: SignGuard(upper=0.9), "upper"),
        (lambda: SignGuard(share=0.0), "share"),
        (lambda: Bucketing(size=0), "size"),
        (lambda: NearestNeighborMixing(f=-1), "f"),
        (lambda: TrimmedMean(1.5), "f"),
        (lambda: Bucketing(WeightedMean()), "inner"),
        (lambda: NearestNeighborMixing(GeometricMedian(weighting="samples")), "inner.weighting"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(build, key):
    with pytest.raises(ConfigError, match=rf"^algorithm\.aggregator\.{key}: "):
        build()


def test_models_with_different_entries_are_refused():
    mean = Median().begin(Round(1, {}))
    mean.add({"w": torch.zeros(1)}, 1)
    with pytest.raises(ValueError, match="'v'"):
        mean.add({"w": torch.zeros(1), "v": torch.zeros(1)}, 1)
