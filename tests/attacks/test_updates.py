"""Attacks on updates against closed forms, brute force and byzfl, in float64."""

import math
import warnings
from statistics import NormalDist

import numpy as np
import pytest
import torch
from scipy.stats import norm

from fl_lightning import Message, Upload
from fl_lightning.attacks import ALIE, IPM, GaussianNoise, MinMax, MinSum, ModelReplacement, SignFlip
from fl_lightning.attacks.base import fault_of, update_entries, update_of, with_update
from fl_lightning.attacks.updates import largest_deviation
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import Stream, generator

BUFFERS = ("norm.running_mean",)


def updates(n, m, size=7, seed=0):
    """Return honest updates and the attackers' own, with a mean far from 0."""
    rng = np.random.default_rng(seed)
    both = torch.from_numpy(rng.normal(rng.normal(size=size), 0.5, (n, size)))
    return both[m:], both[:m]


def generators(m):
    return [np.random.default_rng(k) for k in range(m)]


def crafted(attack, honest, own):
    return attack.craft(honest, own, generators(len(own))).expand_as(own)


def started(attack, attackers=(1,), seed=0, clients=10):
    attack.clients = [*attackers]
    attack.start(clients, seed)
    return attack


# --- Each attack ---


def test_sign_flip_reverses_each_attackers_own_update():
    honest, own = updates(6, 2)
    np.testing.assert_array_equal(crafted(SignFlip(scale=2.5), honest, own), -2.5 * own)


def test_gaussian_noise_has_the_standard_deviation_and_each_attackers_own_numbers():
    honest, own = updates(4, 2, size=100_000)
    sent = crafted(GaussianNoise(std=3.0), honest, own)
    expected = [3.0 * np.random.default_rng(k).standard_normal(100_000) for k in range(2)]
    np.testing.assert_array_equal(sent, np.stack(expected))
    assert sent.mean().abs() < 0.05
    assert abs(sent.std() - 3.0) < 0.05


def test_ipm_is_the_negative_mean_of_the_honest_updates():
    honest, own = updates(9, 3)
    expected = -0.7 * np.mean(honest.numpy(), axis=0)
    np.testing.assert_allclose(crafted(IPM(epsilon=0.7), honest, own), np.stack([expected] * 3), rtol=1e-12)


@pytest.mark.parametrize("epsilon", [1.99, 2.01])
def test_ipm_reverses_the_mean_of_all_updates_only_above_the_documented_epsilon(epsilon):
    honest, own = updates(9, 3)
    mean = torch.cat([honest, crafted(IPM(epsilon=epsilon), honest, own)]).mean(dim=0)
    assert (mean @ honest.mean(dim=0) > 0) == (epsilon < 9 / 3 - 1)


@pytest.mark.parametrize(("n", "m"), [(50, 12), (50, 24), (25, 5), (100, 20), (11, 4)])
def test_alie_subtracts_the_normal_quantile_of_standard_deviations(n, m):
    honest, own = updates(n, m)
    supporters = math.floor(n / 2 + 1) - m
    z = norm.ppf((n - m - supporters) / (n - m))
    assert z > 0
    values = honest.numpy()
    expected = values.mean(axis=0) - z * np.sqrt(((values - values.mean(axis=0)) ** 2).mean(axis=0))
    np.testing.assert_allclose(crafted(ALIE(), honest, own), np.stack([expected] * m), rtol=1e-9)


def test_alie_with_a_given_z():
    honest, own = updates(5, 1)
    values = honest.numpy()
    np.testing.assert_allclose(crafted(ALIE(z=1.5), honest, own)[0], values.mean(0) - 1.5 * values.std(0), rtol=1e-12)


def test_alies_z_is_defined_for_all_numbers_of_attackers():
    for n in range(2, 30):
        values = [largest_deviation(n, m) for m in range(1, n)]
        assert all(0 <= z < math.inf for z in values)
    assert largest_deviation(10, 2) == 0.0
    assert largest_deviation(10, 6) == NormalDist().inv_cdf(3 / 4)  # attackers are a majority: one supporter


def test_alie_warns_once_if_z_is_0():
    attack, (honest, own) = ALIE(), updates(10, 2)
    with pytest.warns(UserWarning, match="^adversary: .* 10 .* 2 .* z is 0"):
        np.testing.assert_allclose(crafted(attack, honest, own)[0], honest.mean(0), rtol=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        crafted(attack, honest, own)
        crafted(ALIE(z=0.0), honest, own)


def direction(honest, kind):
    """Return the direction of MinMax and MinSum in numpy."""
    mean = honest.numpy().mean(axis=0)
    return {"unit": -mean / np.linalg.norm(mean), "std": -honest.numpy().std(axis=0), "sign": -np.sign(mean)}[kind]


def largest_factor(honest, p, excess):
    """Return the largest factor with which `excess` of the moved mean is at most 0, by a scan and bisection."""
    mean, step = honest.numpy().mean(axis=0), 0.05
    allowed = [k * step for k in range(1000) if excess(mean + k * step * p) <= 0]
    low, high = allowed[-1], allowed[-1] + step
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(mean + middle * p) <= 0 else (low, middle)
    return low


@pytest.mark.parametrize("kind", ["unit", "std", "sign"])
@pytest.mark.parametrize("seed", [0, 1])
def test_min_max_goes_as_far_as_the_largest_honest_distance(kind, seed):
    honest, own = updates(8, 2, seed=seed)
    values = honest.numpy()
    bound = max(np.sum((a - b) ** 2) for a in values for b in values)
    p = direction(honest, kind)
    factor = largest_factor(honest, p, lambda x: ((x - values) ** 2).sum(axis=1).max() - bound)
    sent = crafted(MinMax(perturbation=kind), honest, own)
    assert factor > 0.1
    np.testing.assert_allclose(sent, np.stack([values.mean(axis=0) + factor * p] * 2), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["unit", "std", "sign"])
@pytest.mark.parametrize("seed", [0, 1])
def test_min_sum_goes_as_far_as_the_largest_honest_sum_of_squared_distances(kind, seed):
    honest, own = updates(8, 2, seed=seed)
    values = honest.numpy()

    def total(x):
        return ((x - values) ** 2).sum()

    bound, p = max(map(total, values)), direction(honest, kind)
    factor = largest_factor(honest, p, lambda x: total(x) - bound)
    sent = crafted(MinSum(perturbation=kind), honest, own)
    assert factor > 0.1
    np.testing.assert_allclose(sent, np.stack([values.mean(axis=0) + factor * p] * 2), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("attack", [MinMax, MinSum])
@pytest.mark.parametrize("kind", ["unit", "std", "sign"])
def test_without_a_direction_attackers_send_the_mean(attack, kind):
    honest = torch.zeros(3, 4, dtype=torch.float64)
    assert not crafted(attack(perturbation=kind), honest, honest[:1] + 1).any()
    alone = torch.ones(1, 4, dtype=torch.float64)  # no honest distance allows to move
    np.testing.assert_allclose(crafted(attack(perturbation=kind), alone, alone), alone, atol=1e-7)
    for seed in range(20):  # the distances to the mean are rounding errors, and those of honest updates 0
        same = updates(1, 0, seed=seed)[0].expand(7, -1)
        np.testing.assert_allclose(
            crafted(attack(perturbation=kind), same, alone[:, :1].expand(1, 7)), same[:1], atol=1e-7
        )


def test_model_replacement_boosts_by_the_uploads_per_attacker():
    honest, own = updates(8, 2)
    np.testing.assert_array_equal(crafted(ModelReplacement(), honest, own), 4 * own)
    np.testing.assert_array_equal(crafted(ModelReplacement(scale=3.0), honest, own), 3 * own)


def test_the_mean_of_a_replacing_and_idle_clients_is_the_attackers_model():
    start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    model = start + torch.tensor([0.25, 4.0, -1.0])
    sent = [upload(k, model if k == 1 else start, start) for k in range(4)]
    received = started(ModelReplacement()).replace_uploads(sent, 1, ())
    mean = torch.stack([each.message.section("model")["w"] for each in received]).mean(dim=0)
    assert torch.equal(mean, model)


# --- byzfl ---


def test_byzfl_computes_the_same():
    attacks = pytest.importorskip("byzfl.attacks.attacks")
    honest, own = updates(9, 2)
    n = len(honest)
    ipm = attacks.InnerProductManipulation(tau=0.3)(honest.numpy())
    np.testing.assert_allclose(crafted(IPM(epsilon=0.3), honest, own)[0], ipm, rtol=1e-9)
    flip = attacks.SignFlipping()(honest.numpy())
    np.testing.assert_allclose(crafted(IPM(epsilon=1.0), honest, own)[0], flip, rtol=1e-9)
    alie = attacks.ALittleIsEnough(tau=-1.2)(honest.numpy())  # byzfl adds, with the deviation of a sample
    np.testing.assert_allclose(crafted(ALIE(z=1.2 * math.sqrt(n / (n - 1))), honest, own)[0], alie, rtol=1e-9)


# --- From uploads to updates and back ---


def upload(client, weights, received, **numbers):
    return Upload(client, Message.pack({"model": {"w": weights}}, n_samples=5, **numbers), {"w": received})


def full_upload(client, seed, dtype=torch.float32):
    """Return an upload with parameters of two shapes, buffers, an integer and another section, and what was received.

    The client uploads one entry that it has not received, and has received one that it does not upload.
    """
    rng = torch.Generator().manual_seed(seed)
    model = {
        "w": torch.randn(2, 3, generator=rng).to(dtype),
        "b": torch.randn(2, generator=rng).to(dtype),
        "norm.running_mean": torch.randn(2, generator=rng),
        "norm.num_batches_tracked": torch.tensor(seed),
        "new": torch.randn(2, generator=rng),
    }
    received = {name: value + 1 for name, value in model.items() if name != "new"} | {"old": torch.zeros(1)}
    return Upload(client, Message.pack({"model": model, "prototypes": {"c": torch.ones(1)}}, n_samples=seed), received)


def test_an_update_has_the_parameters_that_are_received_and_uploaded():
    one = full_upload(0, 3)
    entries = update_entries(one, BUFFERS)
    assert [name for name, _ in entries] == ["w", "b"]
    np.testing.assert_allclose(update_of(one, entries), -np.ones(8), rtol=1e-6)
    assert update_of(one, entries).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_crafted_update_replaces_only_the_parameters_and_is_rounded_once(dtype):
    one = full_upload(0, 3, dtype)
    update = torch.linspace(-1, 1, 8, dtype=torch.float64)
    changed = with_update(one, update_entries(one, BUFFERS), update)
    model, before = changed.message.section("model"), one.message.section("model")
    assert [*model] == [*before]
    for name, part in (("w", update[:6].view(2, 3)), ("b", update[6:])):
        assert torch.equal(model[name], (one.received[name].double() + part).to(dtype))
    assert all(model[name] is before[name] for name in before if name not in ("w", "b"))
    assert changed.message.section("prototypes") == one.message.section("prototypes")
    assert changed.message.numbers == {"n_samples": 3}
    assert (changed.client, changed.received) == (0, one.received)


ALL = [SignFlip, GaussianNoise, IPM, lambda: ALIE(z=1.0), MinMax, MinSum, ModelReplacement]
OMNISCIENT = [IPM, lambda: ALIE(z=1.0), MinMax, MinSum]


def sent_by(attack, uploads, round=1):
    return started(attack, (1, 3)).replace_uploads(uploads, round, BUFFERS)


def weights_of(one):
    return one.message.section("model")["w"]


@pytest.mark.parametrize("attack", ALL)
def test_only_the_uploads_of_attackers_are_replaced(attack):
    uploads = [full_upload(k, k) for k in range(5)]
    received = sent_by(attack(), uploads)
    assert [one is other for one, other in zip(uploads, received, strict=True)] == [True, False, True, False, True]
    for k in (1, 3):
        assert not torch.equal(weights_of(received[k]), weights_of(uploads[k]))


@pytest.mark.parametrize("attack", OMNISCIENT)
def test_omniscient_attacks_read_the_honest_updates_and_nothing_else(attack):
    uploads = [full_upload(k, k) for k in range(5)]
    before = sent_by(attack(), uploads)
    other = [full_upload(k, 100 + k) if k in (1, 3) else uploads[k] for k in range(5)]
    for k in (1, 3):  # the attackers' own updates change, but they receive the same
        other[k] = other[k]._replace(received=uploads[k].received)
    for one, two in zip(before, sent_by(attack(), other), strict=True):
        assert torch.equal(weights_of(one), weights_of(two))
    moved = [uploads[0]._replace(received={k: v + 1 for k, v in uploads[0].received.items()}), *uploads[1:]]
    assert not torch.equal(weights_of(before[1]), weights_of(sent_by(attack(), moved)[1]))


@pytest.mark.parametrize("attack", OMNISCIENT)
def test_omniscient_attackers_without_an_honest_upload_are_honest(attack):
    uploads = [full_upload(k, k) for k in (1, 3)]
    assert all(one is other for one, other in zip(uploads, sent_by(attack(), uploads), strict=True))


@pytest.mark.parametrize("attack", ALL)
def test_a_round_without_attackers_or_honest_clients_works(attack):
    honest = [full_upload(k, k) for k in (0, 2)]
    assert all(one is other for one, other in zip(honest, sent_by(attack(), honest), strict=True))
    assert len(sent_by(attack(), [full_upload(1, 1)])) == 1
    assert sent_by(attack(), []) == []


def test_noise_depends_on_seed_round_and_client_only():
    uploads = [full_upload(k, k) for k in range(5)]
    received = sent_by(GaussianNoise(std=0.5), uploads, round=4)
    update = update_of(received[3], update_entries(uploads[3], BUFFERS)).numpy()
    expected = 0.5 * generator(0, Stream.ATTACKS, 4, 3).standard_normal(8)
    np.testing.assert_allclose(update, expected, atol=1e-6)
    alone = sent_by(GaussianNoise(std=0.5), uploads[3:], round=4)
    assert torch.equal(weights_of(alone[0]), weights_of(received[3]))
    assert not torch.equal(weights_of(received[1]), weights_of(received[3]))


def test_clients_with_other_shapes_are_attacked_apart():
    def two(client, size, value):
        return upload(client, torch.full((size,), value), torch.zeros(size))

    uploads = [two(0, 2, 1.0), two(1, 3, 5.0), two(2, 3, 2.0), two(3, 2, 7.0)]
    received = sent_by(IPM(epsilon=1.0), uploads)
    assert weights_of(received[1]).tolist() == [-2.0] * 3
    assert weights_of(received[3]).tolist() == [-1.0] * 2


@pytest.mark.parametrize("received", [None, {}, {"w": torch.zeros(5)}])
def test_an_attacker_that_uploads_no_received_weights_is_refused(received):
    uploads = [Upload(1, Message.pack({"model": {"w": torch.zeros(2)}}, n_samples=1), received)]
    with pytest.raises(ConfigError, match=r"^adversary: SignFlip .* client 1 "):
        sent_by(SignFlip(), uploads)


# --- The server's check ---


def message(numbers=None, **tensors):
    sections = {"model": {"w": torch.zeros(2), "b": torch.zeros(1)} | tensors}
    return Message.pack(sections, **(numbers or {"n_samples": 1}))


@pytest.mark.parametrize(
    ("crafted", "fault"),
    [
        (message(w=torch.tensor([0.0, math.nan])), "'model/w' contains NaN or Inf"),
        (message(b=torch.tensor([math.inf])), "'model/b' contains NaN or Inf"),
        (message(w=torch.zeros(3)), "'model/w' has another shape or dtype"),
        (message(w=torch.zeros(2).double()), "'model/w' has another shape or dtype"),
        (message(c=torch.zeros(1)), "'model/c' is unknown"),
        (Message.pack({"model": {"w": torch.zeros(2)}}, n_samples=1), "'model/b' is missing"),
        (message({"n_samples": math.nan}), "a number is NaN or Inf"),
        (message({"samples": 1}), "its numbers have other names"),
        (message(w=torch.full((2,), 1e38)), None),
    ],
)
def test_faults_of_crafted_messages(crafted, fault):
    assert fault_of(crafted, message()) == fault


@pytest.mark.parametrize(
    ("attack", "key"),
    [
        (lambda: SignFlip(scale=0.0), "scale"),
        (lambda: GaussianNoise(std=-1.0), "std"),
        (lambda: IPM(epsilon=0.0), "epsilon"),
        (lambda: MinMax(perturbation="cos"), "perturbation"),
        (lambda: MinSum(perturbation="cos"), "perturbation"),
        (lambda: ModelReplacement(scale=0.0), "scale"),
    ],
)
def test_bad_options_are_refused(attack, key):
    with pytest.raises(ConfigError, match=f"^adversary.{key}: "):
        attack()
