"""Robust rules within the methods: on the server, inside server steps, for control variates and between peers."""

import inspect
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from aggregation import aggregate, finish
from experiments import ONE_EPOCH, NormMLP, digits, experiment, finished, in_two_parts, same_bytes, untimed
from methods import CLASSES, METHODS, assert_same_run

from fl_lightning import algorithms
from fl_lightning.algorithms import (
    SCAFFOLD,
    AdaptiveServer,
    Bucketing,
    CenteredClipping,
    DriftCorrection,
    FedACG,
    FedAvg,
    FedAvgM,
    FedCM,
    FedDC,
    FedDyn,
    FedSKC,
    GlobalPeriodReview,
    Krum,
    LookAhead,
    Median,
    MultiKrum,
    NormBound,
    PeerAlgorithm,
    Ring,
    ServerMomentum,
    ServerStep,
    TrimmedMean,
    WeightedMean,
    WeightedSampling,
)
from fl_lightning.algorithms.robust.rule import RobustRule
from fl_lightning.core.errors import ConfigError, TooFewClients
from fl_lightning.core.message import Message, Upload

REFUSED = {
    *("AFL", "APPLE", "CFL", "CriticalFL", "DFedAvgM", "DisPFL", "FLoRA", "FedAMP", "FedCM", "FedDGGA", "FedDistill"),
    *(
        "FedAsync",
        "FedExLoRA",
        "FedFomo",
        "FedGH",
        "FedKD",
        "FedNH",
        "FedNova",
        "FedPAC",
        "FedProto",
        "FedTGP",
        "FlexLoRA",
    ),
    *("HeteroFL", "HeurFedAMP", "IFCA", "Local", "MoFedSAM", "PeerCriticalFL", "QFFL", "RoLoRA", "UAPDFL"),
}
"""Methods whose aggregation is not a mean of all clients' models, or that compute more than that from the models."""
TAKE_RULES = [name for name in CLASSES if name not in REFUSED and name != "Algorithm"]
SHORT = {"rounds": 2, "trainer": ONE_EPOCH}


def own(name):
    """Return the class of a method."""
    return getattr(CLASSES[name], "func", CLASSES[name])


def test_the_methods_that_take_a_rule_have_the_option_and_the_others_refuse_it():
    for name in CLASSES:
        assert ("aggregator" in inspect.signature(own(name)).parameters) == (name not in REFUSED), name


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", TAKE_RULES)
def test_a_rule_without_attackers_is_the_unweighted_mean_in_every_method_bit_for_bit(name, tmp_path):
    method, options = METHODS[name]
    first, second = (
        finished(tmp_path / type(mean).__name__, method(aggregator=mean), **(options | SHORT))
        for mean in (WeightedMean("uniform"), TrimmedMean(0))
    )
    assert first.state.keys() == second.state.keys()
    assert all(same_bytes(first.state[section], second.state[section]) for section in first.state)
    assert untimed(first.csv.rows) == untimed(second.csv.rows)


# --- Server steps ---------------------------------------------------------------------------------------------------


def uploads_of(values, received=0.0, **sections):
    states = [{"w": torch.tensor([value, -2 * value]), "bn.running_mean": torch.tensor([value])} for value in values]
    before = {name: torch.full_like(value, received) for name, value in states[0].items()}
    return before, [
        Upload(k, Message.pack({"model": state} | {s: own[k] for s, own in sections.items()}, n_samples=k + 1), before)
        for k, state in enumerate(states)
    ]


VALUES = [0.1, 0.2, 0.25, 0.3, 1e6]


@pytest.mark.parametrize(
    "build",
    [
        partial(ServerStep, 0.5, "uniform"),
        partial(ServerMomentum, 0.9, 0.5, True, "uniform"),
        partial(AdaptiveServer, "yogi", 0.1, weighting="uniform"),
        partial(LookAhead, 0.5, "uniform"),
        DriftCorrection,
    ],
)
def test_a_server_step_takes_the_mean_of_its_inner_rule(build):
    """It is the step that follows if all clients send what the rule returns."""
    with_rule, without = build(inner=Median()), build()
    before, uploads = uploads_of(VALUES, 0.5)
    _, equal = uploads_of([0.25] * 5, 0.5)
    for aggregator in (with_rule, without):
        aggregator.clients = 10
    kept = {
        section: {name: torch.full_like(value, 0.125) for name, value in own.items()}
        for section, own in without.initial(before, 10).items()
    }
    state = {"model": before} | kept
    one, other = finish(with_rule, uploads, state), finish(without, equal, state)
    assert one.keys() == other.keys() == state.keys()
    assert all(same_bytes(one[section], other[section]) for section in one)


@pytest.mark.parametrize("build", [ServerMomentum, LookAhead, DriftCorrection])
def test_a_server_step_keeps_the_state_of_its_inner_rule(build):
    before, uploads = uploads_of(VALUES, 0.5)
    rule, step = CenteredClipping(1.0), build(inner=CenteredClipping(1.0))
    step.clients = 10
    state = {"model": before} | step.initial(before, 10)
    assert state.keys() == {"model", "drift" if build is DriftCorrection else "momentum", "centre"}
    assert same_bytes(finish(step, uploads, state)["centre"], finish(rule, uploads, state)["centre"])


def test_updates_are_measured_from_the_weights_that_clients_received():
    """FedACG's clients, for example, do not receive the server's model."""
    _, uploads = uploads_of([0.5, 0.5, 0.5], 0.5)
    state = {"model": {name: value + 9 for name, value in uploads[0].received.items()}}
    for rule in (NormBound(1e-3), CenteredClipping(1e-3)):
        assert float(finish(rule, uploads, state)["model"]["bn.running_mean"]) == 0.5


def test_uploads_are_only_averaged_if_the_inner_aggregator_does_so():
    assert ServerMomentum().only_averages
    assert FedSKC(aggregator=GlobalPeriodReview()).aggregator.only_averages
    assert not ServerMomentum(inner=Median()).only_averages
    assert not GlobalPeriodReview(ServerMomentum(inner=Median())).only_averages
    assert not FedCM().aggregator.only_averages


@pytest.mark.parametrize("kind", [FedAvgM, FedACG, FedDyn, FedDC])
def test_a_server_step_cannot_be_inside_another(kind):
    with pytest.raises(ConfigError, match=r"^algorithm\.aggregator: ServerMomentum"):
        kind(aggregator=ServerMomentum())


def test_the_server_of_a_method_keeps_its_own_part():
    assert isinstance(FedDyn(aggregator=Krum(0)).aggregator, DriftCorrection)
    assert isinstance(FedAvgM(beta=0.5, aggregator=Krum(0)).aggregator.inner, Krum)
    assert FedAvgM(beta=0.5, aggregator=Krum(0)).aggregator.beta == 0.5


def test_weights_of_an_inner_mean_are_also_reported_if_clients_are_drawn_by_size(tmp_path):
    run = experiment(tmp_path, FedAvgM(), client_sampler=WeightedSampling())
    with pytest.warns(UserWarning, match=r"^client_sampler: large clients are"):
        run.load()
    experiment(tmp_path, FedAvgM(aggregator=Median()), client_sampler=WeightedSampling()).load()


# --- Control variates -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [SCAFFOLD, FedDC])
def test_control_variates_are_averaged_by_the_rule_of_the_models(kind):
    changes = [{"w": torch.tensor([c, 2 * c])} for c in (0.5, -1e6, 0.25, 1.0, 0.75)]
    before, uploads = uploads_of(VALUES, 0.0, control=changes)
    method = kind(aggregator=TrimmedMean(1))
    method.samples = [1] * 10
    method.aggregator.clients = 10
    state = {"model": before, "control": {"w": torch.tensor([4.0, 4.0])}} | method.aggregator.initial(before, 10)
    new = aggregate(method, state, uploads)
    np.testing.assert_allclose(new["control"]["w"].numpy(), [4 + 0.5 * 0.5, 4 + 0.5 * 1.0])
    assert new["model"]["w"].abs().max() < 2


# --- Peers ----------------------------------------------------------------------------------------------------------


def peers_of(values):
    _, uploads = uploads_of(values)
    return uploads[0].message, [upload._replace(received=None) for upload in uploads[1:]]


def test_a_client_mixes_its_own_and_its_peers_models_by_the_rule():
    own_model, peers = peers_of([0.1, 0.3, 1e6, 0.2, -0.5])
    mixed = PeerAlgorithm(aggregator=Median()).mix(own_model, peers)
    assert same_bytes(mixed, {"w": torch.tensor([0.2, -0.4]), "bn.running_mean": torch.tensor([0.2])})


def test_between_peers_updates_are_clipped_around_the_clients_own_model():
    """As in ClippedGossip (He, Karimireddy, Jaggi, 2022) with equal weights."""
    own_model, peers = peers_of([1.0, 1.0, 1e6])
    for rule in (NormBound(0.3), CenteredClipping(0.3)):
        mixed = PeerAlgorithm(aggregator=rule).mix(own_model, peers)
        shift = mixed["w"].double() - torch.tensor([1.0, -2.0], dtype=torch.float64)
        assert float(shift.norm()) == pytest.approx(0.1, rel=1e-5)
        assert float(mixed["bn.running_mean"]) == pytest.approx(1.1)


def test_rules_that_need_more_models_than_a_client_has_are_refused(tmp_path):
    for method in (PeerAlgorithm(n_com=3, aggregator=Krum(1)), PeerAlgorithm(graph=Ring(), aggregator=TrimmedMean(2))):
        with pytest.raises(ConfigError, match=r"^algorithm\.aggregator: .* 5"):
            experiment(tmp_path, method).load()
    experiment(tmp_path, PeerAlgorithm(n_com=4, aggregator=Krum(1))).load()
    with pytest.raises(ConfigError, match=r"^algorithm\.aggregator: ServerStep is no mean"):
        PeerAlgorithm(aggregator=ServerStep())


# --- Runs -----------------------------------------------------------------------------------------------------------


def test_too_few_clients_per_round_are_refused_before_round_1(tmp_path):
    for aggregator in (Krum(1), ServerStep(inner=Krum(1)), FedSKC(aggregator=None).aggregator.wrap(Krum(1))):
        with pytest.raises(ConfigError, match=r"^algorithm\.aggregator: Krum .* f 1 .* 5 .* 4"):
            experiment(tmp_path / "run", FedAvg(aggregator=aggregator)).fit()
    assert not (tmp_path / "run").exists()


class FailsOnce(FedAvg):
    """The first client that trains sends NaN."""

    failed = False

    def upload(self, module, batches, n_samples, num_classes):
        message = super().upload(module, batches, n_samples, num_classes)
        if not self.failed:
            self.failed = True
            message.section("model")["head.bias"].fill_(torch.nan)
        return message


def test_a_round_that_is_left_with_too_few_uploads_ends_the_run(tmp_path):
    method = FailsOnce(aggregator=MultiKrum(0, 4))
    run = experiment(tmp_path, method, on_client_failure="drop")
    with (
        pytest.warns(UserWarning, match="dropped from this round"),
        pytest.raises(TooFewClients, match=r"^round 1: MultiKrum .* m 4 .* 3"),
    ):
        run.fit()


ROBUST = {
    "clipping": lambda: FedDyn(aggregator=Bucketing(CenteredClipping(1.0))),
    "peers": lambda: PeerAlgorithm(n_com=3, aggregator=Bucketing(Median())),
}


@pytest.mark.parametrize("name", ROBUST)
def test_the_state_and_the_buckets_of_a_rule_resume_to_the_same_bytes(name, tmp_path):
    options = {"model": NormMLP, "scenario": digits(6), "trainer": ONE_EPOCH}
    whole, rest = in_two_parts(tmp_path, ROBUST[name], 2, **options)
    assert_same_run(whole, rest)
    assert ("centre" in whole.state) == (name == "clipping")


@pytest.mark.thorough
def test_one_attacker_spoils_the_mean_but_not_a_rule(tmp_path):
    class Attacked(FedAvg):
        """The client with most samples sends weights of 1000."""

        def upload(self, module, batches, n_samples, num_classes):
            message = super().upload(module, batches, n_samples, num_classes)
            if n_samples == max(self.samples):
                for value in message.section("model").values():
                    value.fill_(1000)
            return message

    options = {"clients_per_round": None, "scenario": digits(6, alpha=10.0), "rounds": 3, "batch_size": 16}
    accuracies = {
        type(rule).__name__: finished(tmp_path / type(rule).__name__, Attacked(aggregator=rule), **options).csv.rows[
            -1
        ]["global/acc"]
        for rule in (WeightedMean(), Median(), Krum(1), TrimmedMean(1))
    }
    assert accuracies.pop("WeightedMean") < 0.3
    assert min(accuracies.values()) > 0.7


# --- docs/robust-aggregation.md -------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "robust-aggregation.md").read_text()
IN_PROSE = {
    "CwFedAvg": "cwFedAVG",
    "FFALoRA": "FFA-LoRA",
    "FedDGGA": "FedDG-GA",
    "FedDistillPlus": "FedDistill+",
    "FedExLoRA": "FedEx-LoRA",
    "FedSALoRA": "FedSA-LoRA",
    "FedSiamDA": "FedSiam-DA",
    "LGFedAvg": "LG-FedAvg",
    "PFedMe": "pFedMe",
    "PeerCriticalFL": "CriticalFL between peers",
    "QFFL": "q-FFL",
    "UAPDFL": "UA-PDFL",
}


def test_the_page_names_every_method_once():
    table = PAGE.partition("## Methods")[2].partition("## What")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|$", table, re.M)
    found = {name: effect for names, effect in rows for name in names.replace("`", "").split(", ")}
    for name in CLASSES.keys() - {"Algorithm"}:
        assert found[IN_PROSE.get(name, name)].startswith("refused") == (name in REFUSED), name
    assert len(found) == len(CLASSES)  # with the head of the table, and without `Algorithm`


def test_the_page_names_every_rule_and_its_options():
    named = set(re.findall(r"^\| `(\w+)` \|.*?`", PAGE, re.M))
    rules = {name for name in algorithms.__all__ if issubclass(getattr(algorithms, name), RobustRule)}
    assert named == rules
    for name in rules:
        (row,) = re.findall(rf"^\| `{name}` \| (.*)", PAGE, re.M)
        options = inspect.signature(getattr(algorithms, name)).parameters
        assert set(options) <= set(re.findall(r"`(\w+)`", row)), name
