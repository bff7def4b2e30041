"""PrivateMean: identities, sensitivity for every method, noise, adaptive clipping, accounting and refusals."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from adapters import LowRankMLP
from experiments import NormMLP, digits, experiment, finished, in_two_parts, record_rounds, same_bytes, untimed
from methods import ADAPTERS, METHODS, SIAMESE
from scipy.stats import chi2, kstest

from fl_lightning import Message, Round, Upload
from fl_lightning.algorithms import (
    FedAvg,
    MarkovAvailability,
    PoissonSampling,
    PrivateMean,
    RoundRobin,
    WeightedMean,
    WeightedSampling,
)
from fl_lightning.algorithms.aggregators import fold_all
from fl_lightning.algorithms.private_mean import clipped, update_noise
from fl_lightning.algorithms.protocols import RunPlan
from fl_lightning.callbacks import EarlyStopping
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.public_names import public_classes
from fl_lightning.core.seeding import Stream, generator
from fl_lightning.models import MLP
from fl_lightning.privacy.accountant import fixed_size_epsilon, poisson_epsilon, tight_poisson_epsilon
from fl_lightning.scheduling import Deadline, DeviceClock

pytest.importorskip("opacus")
pytestmark = pytest.mark.filterwarnings("ignore:algorithm.aggregator. only the global model is private")

POISSON = {"client_sampler": PoissonSampling(), "min_clients": 0}
SHAPES = {"weight": (30, 20), "bias": (30,)}


def private(**options):
    """Return FedAvg with PrivateMean, by default with noise 1."""
    return FedAvg(aggregator=PrivateMean(**{"noise": 1.0, "delta": 1e-2} | options))


def started(aggregator, clients=20, per_round=5, sampler=None, rounds=10, remote=False, seed=0):
    """Return an aggregator after the start of a run, with its initial state and a model of zeros."""
    sampler = sampler or PoissonSampling()
    method = FedAvg(aggregator=aggregator)
    method.start([10] * clients, frozenset())
    sampler.start(method, seed, 0)
    aggregator.start_run(RunPlan(method, sampler, per_round, rounds, seed, remote))
    model = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    return aggregator, {"model": model} | aggregator.initial(model, 10)


def uploads_of(received, scales, seed=0):
    """Return uploads whose updates have the given norms."""
    random = torch.Generator().manual_seed(seed)
    for client, scale in enumerate(scales):
        update = {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}
        norm = torch.cat([value.flatten() for value in update.values()]).norm()
        sent = {name: received[name] + scale * value / norm for name, value in update.items()}
        yield Upload(client, Message.pack({"model": sent}, n_samples=client + 1), received)


def vector(tensors):
    return torch.cat([value.double().flatten() for value in tensors.values()])


# --- Identities ---


@pytest.mark.parametrize("sampling", [{}, {"client_sampler": PoissonSampling(), "min_clients": 0}])
def test_without_noise_and_clipping_all_clients_give_the_bytes_of_uniform_fedavg(tmp_path, sampling):
    options = {"clients_per_round": 6}
    plain = finished(tmp_path / "plain", FedAvg(weighting="uniform"), **options)
    ours = finished(tmp_path / "ours", private(noise=0.0, clip=math.inf), **options, **sampling)
    assert same_bytes(plain.state["model"], ours.state["model"])
    assert [row["global/acc"] for row in plain.csv.rows] == [row["global/acc"] for row in ours.csv.rows]
    assert ours.csv.rows[-1]["privacy/epsilon"] == math.inf


def test_the_step_is_the_formula():
    aggregator, state = started(PrivateMean(clip=0.7, noise=0.0, server_lr=1.5), per_round=5)
    uploads = list(uploads_of(state["model"], [0.1, 0.7, 5.0]))
    round = Round(1, state)
    after = aggregator.finish(fold_all(aggregator, uploads, round), round, {})["model"]
    expected = torch.zeros(630, dtype=torch.float64)
    for upload in uploads:
        update = vector(upload.message.section("model")) - vector(state["model"])
        expected += 1.5 / 5 * update * min(1.0, 0.7 / float(update.norm()))  # 5 are expected, and 3 take part
    torch.testing.assert_close(vector(after), expected, atol=1e-7, rtol=0)


def test_an_update_is_clipped_as_one_vector_and_zero_is_safe():
    update = {"a": torch.tensor([3.0], dtype=torch.float64), "b": torch.tensor([[4.0]], dtype=torch.float64)}
    short, norm = clipped(update, 1.0)
    assert (norm, float(short["a"]), float(short["b"])) == pytest.approx((5.0, 0.6, 0.8))
    assert clipped(update, 6.0)[0] == update
    assert clipped({"a": torch.zeros(2)}, 1.0)[1] == 0


# --- Sensitivity ---

ACCEPTED = (
    *("APFL", "CwFedAvg", "Ditto", "FFALoRA", "FML", "FedALA", "FedAvg", "FedBABU", "FedBN", "FedIT", "FedLC"),
    *("FedNTD", "FedPer", "FedProx", "FedRCL", "FedROD", "FedRep", "FedSALoRA", "FedSAM", "FedSR", "FedSiamDA"),
    *("FedUV", "LGFedAvg", "MOON", "PFedMe", "PerFedAvg"),
)
SETTINGS = {
    "FedBN": {"model": NormMLP},
    "FedSiamDA": {"model": SIAMESE},
    **{name: {"model": LowRankMLP} for name in ADAPTERS},
}
REFUSED = {  # those that replace the aggregator are refused as PrivateMean is no option of theirs
    "CCVR": "statistics of the clients' data",
    "FedDW": "'soft_labels'",
    "FedDistillPlus": "'mean_logits'",
    "FedGen": "'generator'",
    "FedSKC": "'structural'",
    "SCAFFOLD": "computes more from uploads",
}
NAMES = sorted(public_classes("Algorithm").keys() - {"Algorithm"})


def new_method(name, aggregator):
    """Return a method of the package with an aggregator. Networks with BatchNorm keep its statistics on the clients."""
    options = {"buffers": "local"} if name in ("FedSiamDA", *ADAPTERS) else {}
    return METHODS[name][0](aggregator=aggregator, **options)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_client_moves_the_result_of_every_accepted_method_by_at_most_the_clipping_norm(tmp_path, name):
    aggregator = PrivateMean(clip=0.05, noise=0.0)
    settings = {"model": partial(MLP, hidden=(16,))} | SETTINGS.get(name, {})
    run = experiment(tmp_path, new_method(name, aggregator), clients_per_round=4, rounds=1, **POISSON, **settings)
    rounds = record_rounds(run)
    run.fit()
    ((before, uploads, after),) = rounds
    assert len(uploads) > 1
    result = [vector(floats(after["model"]))]
    for left_out in uploads:
        round = Round(1, before)
        folded = fold_all(aggregator, [upload for upload in uploads if upload is not left_out], round)
        result.append(vector(floats(aggregator.finish(folded, round, {})["model"])))
    bound = 0.05 / 4 * (1 + 1e-4)  # weights are rounded to float32
    assert all(0 < (one - result[0]).norm() <= bound for one in result[1:])
    assert (result[1] - result[2]).norm() <= 2 * bound  # one client in place of another


@pytest.mark.parametrize("name", sorted({*NAMES} - {*ACCEPTED}))
def test_every_other_method_is_refused(tmp_path, name):
    if name not in REFUSED:
        with pytest.raises((TypeError, ConfigError), match=r"'aggregator'|^algorithm\.aggregator: "):
            new_method(name, PrivateMean(noise=0.0))
        return
    run = experiment(tmp_path, new_method(name, PrivateMean(noise=0.0)), **POISSON | METHODS[name][1])
    with pytest.raises(ConfigError, match=f"^algorithm.aggregator: .*{REFUSED[name]}"):
        run.check()


def test_all_methods_were_tried():
    assert len(NAMES) >= 69
    assert {*ACCEPTED, *REFUSED} <= {*NAMES}


def floats(tensors):
    return {name: value for name, value in tensors.items() if value.is_floating_point()}


def test_a_method_of_ones_own_that_computes_more_from_uploads_is_refused(tmp_path):
    class Statistics(FedAvg):
        def upload(self, module, batches, n_samples, num_classes):
            message = super().upload(module, batches, n_samples, num_classes)
            return message.plus({"counts": {"n": torch.ones(1)}})

    class Nested(WeightedMean):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    methods = [Statistics(aggregator=PrivateMean(noise=0.0)), FedAvg(aggregator=Nested(PrivateMean(noise=0.0)))]
    for index, method in enumerate(methods):
        with pytest.raises(ConfigError, match=r"^algorithm\.aggregator: "):
            experiment(tmp_path / str(index), method, **POISSON).check()


# --- Noise ---


def noise_of(aggregator, state, round):
    """Return the change of the model in an empty round, as one vector."""
    now = Round(round, state)
    return vector(aggregator.finish(fold_all(aggregator, [], now), now, {})["model"])


def test_an_empty_round_is_noise_of_the_stated_deviation():
    """The sum of the squares of n standard normal numbers is a chi-square of n degrees of freedom."""
    aggregator, state = started(PrivateMean(clip=0.5, noise=2.0, server_lr=3.0), per_round=5)
    n = 100 * 630
    drawn = torch.cat([noise_of(aggregator, state, round) for round in range(1, 101)]) / (3.0 / 5 * 2.0 * 0.5)
    low, high = chi2.ppf([1e-6, 1 - 1e-6], n)
    assert low < float(drawn.square().sum()) < high
    assert abs(float(drawn.mean())) < 5 / n**0.5
    assert kstest(drawn.numpy(), "norm").pvalue > 1e-4


def test_simulated_noise_is_that_of_the_seed_and_the_round():
    one, state = started(PrivateMean(noise=1.0), seed=3)
    other, _ = started(PrivateMean(noise=1.0), seed=4)
    assert noise_of(one, state, 1).equal(noise_of(one, state, 1))
    assert not noise_of(one, state, 1).equal(noise_of(one, state, 2))
    assert not noise_of(one, state, 1).equal(noise_of(other, state, 1))


def test_noise_on_clients_own_machines_is_that_of_the_system():
    one, state = started(PrivateMean(noise=1.0), remote=True, seed=3)
    again, seeded = noise_of(one, state, 1), noise_of(started(PrivateMean(noise=1.0), seed=3)[0], state, 1)
    assert not noise_of(one, state, 1).equal(again)
    assert not again.equal(seeded)


# --- Adaptive clipping ---


@pytest.mark.parametrize(("noise", "bit_noise"), [(0.0, None), (0.3, 0.4)])
def test_adaptive_clipping_equals_a_loop(noise, bit_noise):
    options = {"clip": 0.4, "noise": noise, "quantile": 0.6, "clip_lr": 0.3, "bit_noise": bit_noise}
    aggregator, state = started(PrivateMean(**options), per_round=4, seed=7)
    clip, model = 0.4, vector(state["model"])
    for number in range(1, 6):
        norms = [0.1 * number, 0.5, 1.5][: number % 4]  # the fourth round is empty
        uploads = list(uploads_of(state["model"], norms, seed=number))
        round = Round(number, state)
        state = aggregator.finish(fold_all(aggregator, uploads, round), round, {})
        rng = generator(7, Stream.PRIVACY, number)
        total, within = np.zeros(630), 0.0
        for upload in uploads:
            update = (vector(upload.message.section("model")) - vector(upload.received)).numpy()
            norm = math.sqrt(sum(x * x for x in update))
            total += update * min(1.0, clip / norm)
            within += 0.5 if norm <= clip else -0.5
        if noise:
            for_updates = 1 / math.sqrt(1 / noise**2 - 1 / (2 * bit_noise) ** 2)
            total += for_updates * clip * rng.standard_normal(630)
            within += bit_noise * rng.standard_normal()
        model = model + torch.from_numpy(total) / 4
        torch.testing.assert_close(vector(state["model"]), model, atol=1e-6, rtol=1e-6)
        assert round.metrics["privacy/clip"] == pytest.approx(clip, rel=1e-12)
        assert round.metrics["privacy/clipped_share"] == pytest.approx(0.5 - within / 4, abs=1e-12)
        clip *= math.exp(-0.3 * (within / 4 + 0.5 - 0.6))
        assert float(state["privacy"]["clip"]) == pytest.approx(clip, rel=1e-12)


def test_the_clipping_norm_approaches_the_quantile():
    aggregator, state = started(PrivateMean(clip=0.01, noise=0.0, quantile=0.75), per_round=40, clients=40)
    for number in range(1, 60):
        norms = np.linspace(0.0, 2.0, 40)
        round = Round(number, state)
        folded = fold_all(aggregator, uploads_of(state["model"], norms, seed=number), round)
        state = aggregator.finish(folded, round, {})
    assert float(state["privacy"]["clip"]) == pytest.approx(1.5, abs=0.1)


def test_the_noise_of_both_parts_is_together_that_of_one_mechanism():
    """Two Gaussian mechanisms of sensitivities C and 1/2 are one whose squared inverse multipliers add up."""
    assert update_noise(1.0, 5.0) ** -2 + (2 * 5.0) ** -2 == pytest.approx(1.0)
    assert update_noise(0.0, 5.0) == 0


# --- Accounting ---


def test_epsilon_is_that_of_the_rounds_so_far(tmp_path):
    run = finished(tmp_path, private(), clients_per_round=3, **POISSON)
    expected = [poisson_epsilon(1.0, 0.5, round, 1e-2) for round in (1, 2, 3)]
    assert [row["privacy/epsilon"] for row in run.csv.rows] == pytest.approx(expected, abs=1e-9)
    tight = [row.get("privacy/epsilon_prv") for row in run.csv.rows]
    assert tight == [None, None, pytest.approx(tight_poisson_epsilon(1.0, 0.5, 3, 1e-2))]
    last = json.loads((tmp_path / "final" / "summary.json").read_text())
    assert [last["privacy/epsilon"], last["privacy/epsilon_prv"]] == [expected[-1], tight[-1]]
    assert "privacy/clip" not in run.csv.rows[0]


def test_rounds_of_a_fixed_size_are_accounted_as_such(tmp_path):
    run = finished(tmp_path, private(), clients_per_round=3)
    expected = [fixed_size_epsilon(1.0, 0.5, round, 1e-2) for round in (1, 2, 3)]
    assert [row["privacy/epsilon"] for row in run.csv.rows] == pytest.approx(expected, abs=1e-9)
    assert "privacy/epsilon_prv" not in run.csv.rows[-1]


@pytest.mark.parametrize("sampling", [POISSON, {}])
def test_noise_is_computed_for_a_wanted_epsilon(tmp_path, sampling):
    run = finished(tmp_path, private(noise=None, epsilon=6.0), clients_per_round=3, **sampling)
    assert 5.99 < run.csv.rows[-1]["privacy/epsilon"] <= 6.0


def test_more_rounds_than_the_noise_was_computed_for_are_refused(tmp_path):
    options = {"clients_per_round": 3, **POISSON}
    finished(tmp_path, private(noise=None, epsilon=6.0), rounds=2, **options)
    longer = experiment(tmp_path, private(noise=None, epsilon=6.0), rounds=3, **options)
    with pytest.raises(ConfigError, match=r"^algorithm.aggregator.epsilon: "):
        longer.fit(resume=True)


def test_the_metrics_can_be_monitored(tmp_path):
    stop = EarlyStopping(monitor="privacy/epsilon", patience=9)
    run = finished(tmp_path, private(quantile=0.5), callbacks=[stop], **POISSON)
    assert {"privacy/epsilon", "privacy/clip", "privacy/clipped_share"} <= run.csv.rows[0].keys()


# --- In a run ---

EMPTY = {"scenario": digits(3), "clients_per_round": 1, "seed": 40, "rounds": 4} | POISSON
"""Options of a run of four rounds with 0, 2, 0 and 1 clients."""


@pytest.mark.parametrize("engine", ["sequential", "stacked", pytest.param("processes", marks=pytest.mark.thorough)])
def test_an_empty_round_is_a_noise_step(tmp_path, engine):
    run = finished(tmp_path, private(quantile=0.5, bit_noise=2.0, delta=0.1), engine=engine, **EMPTY)
    whole = finished(tmp_path / "again", private(quantile=0.5, bit_noise=2.0, delta=0.1), **EMPTY)
    if engine != "stacked":
        assert same_bytes(run.state["model"], whole.state["model"])
    else:
        for name, value in run.state["model"].items():
            torch.testing.assert_close(value, whole.state["model"][name], atol=1e-4, rtol=1e-4)
    first = experiment(tmp_path / "first", private(delta=0.1), **EMPTY | {"rounds": 1})
    first.check()
    initial = vector(first.state["model"])
    first.fit()
    assert (vector(first.state["model"]) - initial).std() == pytest.approx(1.0, rel=0.1)


@pytest.mark.parametrize("stop", [1, 2])
def test_a_resumed_run_has_the_same_bytes(tmp_path, stop):
    def method():
        return private(quantile=0.5, bit_noise=2.0, delta=0.1)

    whole, rest = in_two_parts(tmp_path, method, stop, **EMPTY)
    assert all(same_bytes(whole.state[name], rest.state[name]) for name in ("model", "privacy"))
    last = [untimed(run.csv.rows)[-1] for run in (whole, rest)]
    assert last[0] == last[1]


def test_a_dry_run_works(tmp_path):
    experiment(tmp_path, private(quantile=0.5), **POISSON).fit(fast=True)


def test_a_failed_client_does_not_change_the_denominator(tmp_path):
    class Failing(FedAvg):
        releases_only_model = True

        def upload(self, module, batches, n_samples, num_classes):
            if self.samples.index(n_samples) == 2:
                raise ValueError("no upload")
            return super().upload(module, batches, n_samples, num_classes)

    method = Failing(aggregator=PrivateMean(noise=0.0, clip=0.1))
    run = experiment(tmp_path, method, clients_per_round=6, rounds=1, on_client_failure="drop")
    rounds = record_rounds(run)
    with pytest.warns(UserWarning, match="dropped"):
        run.fit()
    ((before, uploads, after),) = rounds
    assert len(uploads) == 5
    names = list(before["model"])
    total = sum(vector(clipped(difference(upload, names), 0.1)[0]) for upload in uploads)
    torch.testing.assert_close(vector(after["model"]) - vector(before["model"]), total / 6, atol=1e-7, rtol=0)


def difference(upload, names):
    sent = upload.message.section("model")
    return {name: sent[name].double() - upload.received[name].double() for name in names}


# --- Refusals ---


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "noise"),
        ({"noise": 1.0, "epsilon": 8.0}, "noise"),
        ({"noise": -1.0}, "noise"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"noise": 1.0, "clip": 0.0}, "clip"),
        ({"noise": 1.0, "clip": math.inf}, "clip"),
        ({"noise": 0.0, "clip": math.inf, "quantile": 0.5}, "clip"),
        ({"noise": 1.0, "delta": 1.0}, "delta"),
        ({"noise": 1.0, "server_lr": 0.0}, "server_lr"),
        ({"noise": 1.0, "quantile": 1.0}, "quantile"),
        ({"noise": 1.0, "clip_lr": 0.0}, "clip_lr"),
        ({"noise": 1.0, "bit_noise": 0.0}, "bit_noise"),
    ],
)
def test_options_out_of_range_are_refused(options, key):
    with pytest.raises(ConfigError, match=rf"^algorithm\.aggregator\.{key}: "):
        PrivateMean(**options)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"client_sampler": WeightedSampling()}, "client_sampler"),
        ({"client_sampler": RoundRobin()}, "client_sampler"),
        ({"client_sampler": MarkovAvailability(0.9)}, "client_sampler"),
        ({"client_sampler": PoissonSampling()}, "min_clients"),
        ({"clock": DeviceClock(), "round_policy": Deadline(over_sample=1.5), **POISSON}, "round_policy"),
        ({"clock": DeviceClock(), "round_policy": Deadline(seconds=1.0)}, "round_policy"),
        ({"clock": DeviceClock(online_share=0.5), **POISSON}, "clock"),
        ({"model": NormMLP}, "algorithm.buffers"),
        ({"algorithm": private(delta=0.2)}, "algorithm.aggregator.delta"),
        ({"algorithm": private(quantile=0.5, bit_noise=0.5)}, "algorithm.aggregator.bit_noise"),
        ({"algorithm": private(noise=None, epsilon=1e-3, delta=1e-5)}, "epsilon"),
    ],
)
def test_options_of_the_run_that_do_not_fit_are_refused(tmp_path, options, key):
    method = options.pop("algorithm", None) or private()
    with pytest.raises(ConfigError, match=f"^{key.replace('.', '[.]')}: "):
        experiment(tmp_path, method, **options).check()


def test_sample_weights_are_no_option():
    with pytest.raises(TypeError, match="weighting"):
        PrivateMean(noise=1.0, weighting="samples")


@pytest.mark.filterwarnings("default")
def test_a_run_says_once_what_is_not_private(tmp_path):
    with pytest.warns(UserWarning, match=r"^algorithm.aggregator: .* global model ") as caught:
        finished(tmp_path, private(), rounds=2, **POISSON)
    assert len([one for one in caught if "is private" in str(one.message)]) == 1
