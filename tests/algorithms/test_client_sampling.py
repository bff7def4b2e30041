"""Client samplers: frequencies against theory, independence of the method and of a resume, refusals."""

import csv
import re
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from experiments import digits, experiment, finished, in_two_parts, same_bytes, untimed

from fl_lightning.algorithms import (
    UAPDFL,
    AvailabilityFile,
    FedAvg,
    FedAvgM,
    MarkovAvailability,
    PoissonSampling,
    RoundRobin,
    UniformSampling,
    WeightedMean,
    WeightedSampling,
)
from fl_lightning.algorithms.client_sampling import inclusion_probabilities
from fl_lightning.callbacks import RoundCallback
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.engines import StackedEngine

SIZES = [10, 20, 30, 40, 50, 50]
ROUNDS = 2000


def started(sampler, samples=SIZES, seed=0, min_clients=1, weighting="uniform"):
    sampler.start(SimpleNamespace(samples=samples, aggregator=WeightedMean(weighting)), seed, min_clients)
    return sampler


def rounds_of(sampler, size, rounds=ROUNDS):
    """Return which clients take part in each round, `(rounds, K)` bool."""
    taking_part = np.zeros((rounds, sampler.clients), dtype=bool)
    for round in range(1, rounds + 1):
        clients = sampler.sample(round, size)
        assert clients == sorted(set(clients))
        taking_part[round - 1, clients] = True
    return taking_part


def assert_frequencies(taking_part, expected):
    """Bound the sum of the squared deviations of the clients' frequencies in standard deviations, as a chi-square."""
    expected = np.asarray(expected)
    variances = expected * (1 - expected) / len(taking_part)
    chi_square = float(((taking_part.mean(axis=0) - expected) ** 2 / variances).sum())
    degrees = taking_part.shape[1]
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


# --- Each sampler ---


def test_uniform_sampling_is_numpys_choice_with_the_generator_of_the_round():
    sampler = started(UniformSampling(), seed=3)
    for round in range(1, 20):
        drawn = generator(3, Stream.PARTICIPANTS, round).choice(6, 4, replace=False)
        assert sampler.sample(round, 4) == sorted(drawn.tolist())


def test_poisson_sampling_draws_each_client_independently():
    taking_part = rounds_of(started(PoissonSampling(), min_clients=0), 2)
    assert_frequencies(taking_part, [2 / 6] * 6)
    numbers = np.bincount(taking_part.sum(axis=1), minlength=7) / ROUNDS
    binomial = [64, 192, 240, 160, 60, 12, 1]  # C(6, n) 2^(6 - n) of 729
    np.testing.assert_allclose(numbers, np.array(binomial) / 729, atol=5 * 0.5 / ROUNDS**0.5)
    assert abs(np.corrcoef(taking_part.T)[0, 1]) < 5 / ROUNDS**0.5


def test_poisson_sampling_never_leaves_a_round_empty():
    one, two = (rounds_of(started(PoissonSampling(), min_clients=n), 2) for n in (1, 2))
    assert one.sum(axis=1).min() == 1
    assert two.sum(axis=1).min() == 2
    drawn = rounds_of(started(PoissonSampling(), min_clients=0), 2)
    enough = drawn.sum(axis=1) >= 1
    assert (one[enough] == drawn[enough]).all()
    assert_frequencies(one, [2 / 6 / (1 - (4 / 6) ** 6)] * 6)


def test_poisson_sampling_with_all_clients_is_full_participation():
    assert rounds_of(started(PoissonSampling()), 6, 20).all()


def test_weighted_sampling_draws_a_fixed_number_in_proportion_to_the_weights():
    taking_part = rounds_of(started(WeightedSampling()), 3)
    assert (taking_part.sum(axis=1) == 3).all()
    assert_frequencies(taking_part, 3 * np.array(SIZES) / 200)
    listed = started(WeightedSampling([1, 2, 3, 4, 5, 5]), samples=[7] * 6)
    assert (rounds_of(listed, 3, 50) == taking_part[:50]).all()


def test_the_mean_over_weighted_participants_is_unbiased():
    values = np.random.default_rng(0).normal(size=6)
    means = [values[chosen].mean() for chosen in rounds_of(started(WeightedSampling()), 3)]
    error = np.std(means) / ROUNDS**0.5
    exact = np.dot(values, SIZES) / 200
    assert abs(np.mean(means) - exact) < 5 * error
    assert abs(np.mean(means) - values.mean()) > 5 * error  # which uniform sampling estimates


def test_a_client_with_a_large_share_always_takes_part():
    np.testing.assert_allclose(inclusion_probabilities(np.array([6.0, 1, 1, 2]), 2), [1, 0.25, 0.25, 0.5])
    np.testing.assert_allclose(inclusion_probabilities(np.array([60.0, 30, 1, 1]), 3), [1, 1, 0.5, 0.5])
    np.testing.assert_allclose(inclusion_probabilities(np.array([5.0, 1, 1]), 3), 1)
    taking_part = rounds_of(started(WeightedSampling(), samples=[6, 1, 1, 2]), 2)
    assert taking_part[:, 0].all()
    assert (taking_part.sum(axis=1) == 2).all()
    assert_frequencies(taking_part[:, 1:], [0.25, 0.25, 0.5])


def test_uploads_that_are_weighted_twice_are_reported():
    with pytest.warns(UserWarning, match=r"^client_sampler: .*algorithm\.weighting uniform"):
        started(WeightedSampling(), weighting="samples")


@pytest.mark.parametrize("size", [1, 2, 4, 5, 6])
def test_round_robin_takes_every_client_equally_often(size):
    sampler = started(RoundRobin())
    taking_part = rounds_of(sampler, size, 6)  # 6 · size places for 6 clients
    assert (taking_part.sum(axis=0) == size).all()
    assert (taking_part.sum(axis=1) == size).all()
    assert sampler.sample(1 + 6, size) == sampler.sample(1, size)
    orders = {tuple(started(RoundRobin(), seed=seed).sample(1, 3)) for seed in range(20)}
    assert len(orders) > 5


@pytest.mark.parametrize("correlation", [0.0, 0.6])
def test_markov_availability_has_the_shares_and_correlations_of_its_chains(correlation):
    shares = np.array([0.2, 0.5, 0.8, 0.9])
    sampler = started(MarkovAvailability(shares.tolist(), correlation), samples=[1] * 4, min_clients=0)
    available = rounds_of(sampler, 4)
    slower = ((1 + correlation) / (1 - correlation)) ** 0.5  # the standard error of a correlated mean
    errors = slower * (shares * (1 - shares) / ROUNDS) ** 0.5
    assert (np.abs(available.mean(axis=0) - shares) < 5 * errors).all()
    assert (np.abs(available.mean(axis=0) - shares) > 0).all()
    for client, share in enumerate(shares):
        before, after = available[:-1, client], available[1:, client]
        stays, comes = after[before].mean(), after[~before].mean()
        assert stays == pytest.approx(share + correlation * (1 - share), abs=5 * 0.5 / before.sum() ** 0.5)
        assert comes == pytest.approx(share * (1 - correlation), abs=5 * 0.5 / (~before).sum() ** 0.5)


def test_a_round_waits_until_enough_clients_are_available():
    waiting = rounds_of(started(MarkovAvailability(0.4, 0.5), min_clients=2), 6, 300)
    anyway = rounds_of(started(MarkovAvailability(0.4, 0.5), min_clients=0), 6, 900)
    assert waiting.sum(axis=1).min() == 2
    enough = anyway[anyway.sum(axis=1) >= 2]
    assert (enough[:300] == waiting).all()


def test_participants_are_drawn_from_the_available_clients():
    every, some = (rounds_of(started(MarkovAvailability(0.6, 0.3)), size, 500) for size in (6, 2))
    assert (some <= every).all()
    assert (some.sum(axis=1) == np.minimum(every.sum(axis=1), 2)).all()
    assert abs(some[:, 0].mean() - some[:, 5].mean()) < 5 * 0.5 / 500**0.5 * 2**0.5


def test_a_file_lists_the_rounds_in_which_clients_are_available(tmp_path):
    path = tmp_path / "available.csv"
    path.write_text("client,first,last\n0,1,2\n1,2,4\n\n0,4,4\n2,3,3\n")
    sampler = started(AvailabilityFile(str(path)), samples=[1] * 4)
    period = [[0], [0, 1], [1, 2], [0, 1]]
    assert [sampler.sample(round, 4) for round in range(1, 13)] == 3 * period
    alone = [sampler.sample(2 + 4 * i, 1) for i in range(400)]
    assert {tuple(clients) for clients in alone} == {(0,), (1,)}
    assert abs(sum(clients == [0] for clients in alone) - 200) < 5 * 10


SAMPLERS = [UniformSampling, PoissonSampling, WeightedSampling, RoundRobin, lambda: MarkovAvailability(0.5, 0.7)]


FIRST = [
    [[0, 5], [0, 5], [1, 4], [0, 2], [0, 3]],
    [[0, 1], [2, 5], [0, 3], [2, 4], [1, 4]],
    [[3, 4], [2, 4], [2, 3], [4, 5], [0, 4]],
    [[2, 3], [0, 4], [1, 5], [2, 3], [0, 4]],
    [[0, 5], [3, 5], [1, 3], [1, 3], [1, 3]],
]


@pytest.mark.parametrize(("new", "expected"), list(zip(SAMPLERS, FIRST, strict=True)))
def test_a_seed_gives_these_participants(new, expected):
    sampler = started(new())
    assert [sampler.sample(round, 2) for round in range(1, 6)] == expected


@pytest.mark.parametrize("new", SAMPLERS)
def test_participants_are_a_function_of_seed_and_round(new):
    sampler = started(new(), seed=5)
    forwards = [sampler.sample(round, 3) for round in range(1, 30)]
    backwards = [sampler.sample(round, 3) for round in range(29, 0, -1)]
    assert backwards == forwards[::-1]
    assert started(new(), seed=5).sample(17, 3) == forwards[16]
    assert [started(new(), seed=6).sample(round, 3) for round in range(1, 30)] != forwards
    assert any(one != other for one, other in pairwise(forwards))


# --- In a run ---


@pytest.mark.parametrize("algorithm", [FedAvgM, lambda: UAPDFL(n_com=1)])
def test_all_methods_have_the_same_participants(tmp_path, algorithm):
    options = {"client_sampler": PoissonSampling(), "clients_per_round": 2, "rounds": 2}
    run = finished(tmp_path / "one", algorithm(), log_clients=True, **options)
    plain = experiment(tmp_path / "other", **options)
    plain.check()
    for round in range(1, 9):
        assert run.server.participants(round) == plain.server.participants(round)
    with open(tmp_path / "one" / "clients.csv") as file:
        trained = [(int(row["round"]), int(row["client"])) for row in csv.DictReader(file)]
    assert trained == [(round, client) for round in (1, 2) for client in run.server.participants(round)]


def test_the_default_is_uniform_sampling(tmp_path):
    one, other = (finished(tmp_path / str(i), client_sampler=s) for i, s in enumerate((None, UniformSampling())))
    assert same_bytes(one.state["model"], other.state["model"])
    assert untimed(one.csv.rows) == untimed(other.csv.rows)


@pytest.mark.thorough
@pytest.mark.parametrize("new", [PoissonSampling, lambda: MarkovAvailability(0.5, 0.7)])
def test_a_resumed_run_continues_with_the_same_participants(tmp_path, new):
    whole = finished(tmp_path / "whole", client_sampler=new(), rounds=4)
    finished(tmp_path / "part", client_sampler=new(), rounds=2)
    rest = experiment(tmp_path / "part", client_sampler=new(), rounds=4)
    rest.fit(resume=True)
    assert same_bytes(whole.state["model"], rest.state["model"])
    assert untimed(whole.csv.rows) == untimed(rest.csv.rows)


@pytest.mark.thorough
def test_rounds_of_different_sizes_can_be_stacked(tmp_path):
    options = {"client_sampler": PoissonSampling(), "clients_per_round": 3, "rounds": 4}
    one, other = (
        finished(tmp_path / str(i), engine=e, **options) for i, e in enumerate(("sequential", StackedEngine()))
    )
    sizes = {len(one.server.participants(round)) for round in range(1, 5)}
    assert len(sizes) > 1
    for name, value in one.state["model"].items():
        np.testing.assert_allclose(value, other.state["model"][name], atol=1e-4)


@pytest.mark.parametrize("engine", ["sequential", "stacked", pytest.param("processes", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("method", [FedAvgM, lambda: UAPDFL(n_com=1)])
def test_an_empty_round_changes_nothing(tmp_path, engine, method):
    options = {"client_sampler": PoissonSampling(), "clients_per_round": 1, "min_clients": 0, "seed": 40}
    run = experiment(tmp_path, method(), engine=engine, rounds=4, scenario=digits(3), log_clients=True, **options)
    states = []
    run.callbacks.append(RecordStates(states))
    run.fit()
    sizes = [len(run.server.participants(round)) for round in range(1, 5)]
    assert sizes == [0, 2, 0, 1]
    for before, after, size in zip(states, states[1:], sizes, strict=False):
        assert (before is after) == (not size)
    assert [row.get("client/train_loss") is not None for row in run.csv.rows] == [bool(size) for size in sizes]
    assert [row["comm/up_bytes"] > 0 for row in run.csv.rows] == [bool(size) and run.algorithm.server for size in sizes]


class RecordStates(RoundCallback):
    """Appends the server's state to a list, first of all the initial one."""

    def __init__(self, states):
        self.states = states

    def on_round_start(self, run, participants):
        self.states.append(run.state)


@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_run_can_be_resumed_after_an_empty_round(tmp_path, stop):
    options = {"client_sampler": PoissonSampling(), "clients_per_round": 1, "min_clients": 0, "seed": 40}
    whole, rest = in_two_parts(tmp_path, FedAvg, stop, scenario=digits(3), rounds=4, **options)
    assert same_bytes(whole.state["model"], rest.state["model"])
    assert untimed(whole.csv.rows) == untimed(rest.csv.rows)


def test_a_round_can_be_left_empty_by_failed_clients(tmp_path):
    class Failing(FedAvg):
        def upload(self, *args):
            raise ValueError("no upload")

    states = []
    run = experiment(tmp_path, Failing(), on_client_failure="drop", min_clients=0, rounds=1)
    run.callbacks.append(RecordStates(states))
    with pytest.warns(UserWarning, match="dropped from this round"):
        run.fit()
    assert run.state is states[0]


# --- Refusals ---

FILES = {
    "empty": ("", "cannot be read: the first line must be client,first,last"),
    "header": ("client,start,end\n0,1,1\n", "cannot be read: the first line must be client,first,last"),
    "no rows": ("client,first,last\n", "has 0 clients for round 1, fewer than min_clients (1). List more clients."),
    "words": ("client,first,last\n0,1,x\n", "cannot be read: line 2 does not hold three whole numbers"),
    "columns": ("client,first,last\n0,1\n", "cannot be read: line 2 does not hold three whole numbers"),
    "client": ("client,first,last\n\n4,1,2\n", "cannot be read: line 3 names client 4, and clients are 0 to 3"),
    "order": ("client,first,last\n0,3,2\n", "cannot be read: line 2 names rounds 3 to 2, which must be from 1"),
    "round 0": ("client,first,last\n0,0,2\n", "cannot be read: line 2 names rounds 0 to 2, which must be from 1"),
    "twice": ("client,first,last\n0,1,3\n0,3,4\n", "lists client 0 twice in round 3."),
    "a gap": ("client,first,last\n0,1,3\n1,5,6\n", "has 0 clients for round 4, fewer than min_clients (1)."),
}


@pytest.mark.parametrize("name", FILES)
def test_bad_files_are_refused(tmp_path, name):
    content, message = FILES[name]
    path = tmp_path / "available.csv"
    path.write_text(content)
    with pytest.raises(ConfigError, match="^" + re.escape(f"client_sampler.path: {path} {message}")):
        started(AvailabilityFile(str(path)), samples=[1] * 4)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (lambda: WeightedSampling([1.0, 0.0]), "client_sampler.weights: 0.0 is not above 0"),
        (lambda: WeightedSampling([1.0]), "client_sampler.weights: 1 numbers for 6 clients. Give one for each."),
        (lambda: MarkovAvailability(0.0), "client_sampler.available: 0.0 is outside (0, 1]"),
        (lambda: MarkovAvailability([0.5, 1.5]), "client_sampler.available: 1.5 is outside (0, 1]"),
        (lambda: MarkovAvailability(0.5, 1.0), "client_sampler.correlation: 1.0 is outside [0, 0.999]"),
        (lambda: MarkovAvailability([0.5]), "client_sampler.available: 1 numbers for 6 clients. Give one for each."),
        (lambda: MarkovAvailability(0.1), "client_sampler.available: 0.6 clients are available on average, fewer than"),
        (lambda: AvailabilityFile("nowhere.csv"), "client_sampler.path: nowhere.csv cannot be read: "),
    ],
)
def test_bad_options_are_refused_before_round_1(tmp_path, sampler, message):
    with pytest.raises(ConfigError, match="^" + re.escape(message)):
        experiment(tmp_path / "run", FedAvg(weighting="uniform"), client_sampler=sampler()).check()
