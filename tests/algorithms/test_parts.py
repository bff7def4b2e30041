"""Every loss term and every aggregator of the package in FedAvg: it works there, or is refused before round 1."""

import inspect
from functools import partial

import pytest
from experiments import digits, finished
from methods import EPISODES, NAMES, SIAMESE

from fl_lightning.algorithms import (
    Bulyan,
    DistillingWeights,
    FedAvg,
    FedProx,
    FedSAM,
    GlobalPeriodReview,
    Krum,
    MultiKrum,
    NormalizedAveraging,
    PrivateMean,
    Prototypical,
    Proximal,
    Splits,
)
from fl_lightning.cli.catalogue import classes, descriptions
from fl_lightning.core.errors import ClientFailure, ConfigError

AGGREGATORS, TERMS = classes("aggregators"), classes("loss_terms")
BUILD = {
    "Krum": partial(Krum, 0),
    "MultiKrum": partial(MultiKrum, 0),
    "Bulyan": partial(Bulyan, 0),
    "Splits": partial(Splits, 0.4, 1.6, 0, 2, "uniform"),
    "Prototypical": partial(Prototypical, 2),
    "DistillingWeights": partial(DistillingWeights, allow_bias=True),
}
ONLY_AVERAGES = {"CompressedMean", "SliceMean"}
"""Aggregators that need their own method for anything but a mean."""
EVERYWHERE = {"scenario": digits(3), "clients_per_round": 3, "model": SIAMESE, "rounds": 2}


class Own(FedAvg):
    """A user's method, which may send more than FedAvg. This one does not."""


def build(kind):
    return BUILD.get(kind.__name__, kind)()


def refusal(key, kind):
    fix = f"Use --algorithm {kind.only_in}, to which you can add loss terms."
    return f"algorithm.{key}: {kind.__name__} works only in {kind.only_in}. {fix}"


@pytest.mark.thorough
@pytest.mark.fast_cases(5)
@pytest.mark.parametrize("kind", [kind for kind in AGGREGATORS if not kind.only_in and kind is not PrivateMean])
def test_an_aggregator_works_in_fedavg_and_with_another_term(kind, tmp_path):
    for terms in ([], [Proximal(0.1)]):
        run = finished(tmp_path / str(len(terms)), FedAvg(loss_terms=terms, aggregator=build(kind)), **EVERYWHERE)
        assert run.round == 2


@pytest.mark.parametrize("kind", [kind for kind in AGGREGATORS if kind.only_in])
def test_an_aggregator_that_works_only_in_its_method_is_refused_in_others(kind, tmp_path):
    for method in (FedAvg, FedSAM):
        with pytest.raises(ConfigError) as refused:
            method(loss_terms=[Proximal(0.1)], aggregator=build(kind))
        assert str(refused.value) == refusal("aggregator", kind)
    if kind.__name__ in ONLY_AVERAGES:
        return
    with pytest.raises((KeyError, ClientFailure, ConfigError)):  # it would indeed not work
        finished(tmp_path, Own(aggregator=build(kind)), **EVERYWHERE)


def test_an_aggregator_inside_another_one_is_refused():
    with pytest.raises(ConfigError) as refused:
        FedAvg(aggregator=GlobalPeriodReview(NormalizedAveraging()))
    assert str(refused.value) == refusal("aggregator", NormalizedAveraging)


@pytest.mark.fast_cases(8)
@pytest.mark.parametrize("kind", [kind for kind in TERMS if not kind.only_in])
def test_a_loss_term_acts_in_fedavg(kind, tmp_path):
    options = EVERYWHERE | ({"scenario": EPISODES} if kind is Prototypical else {})
    run = finished(tmp_path, FedAvg(loss_terms=[build(kind)]), **options)
    assert run.csv.rows[-1][f"client/train_{kind.name}"] != 0


@pytest.mark.parametrize("kind", [kind for kind in TERMS if kind.only_in])
def test_a_loss_term_that_works_only_in_its_method_is_refused_in_others(kind):
    with pytest.raises(ConfigError) as refused:
        FedProx(loss_terms=[build(kind)])
    assert str(refused.value) == refusal("loss_terms", kind)
    assert Own(loss_terms=[build(kind)]).loss_terms  # a user's method may send what the term reads


@pytest.mark.parametrize("kind", [kind for kind in (*AGGREGATORS, *TERMS) if kind.only_in])
def test_the_named_method_has_the_part_and_takes_loss_terms(kind):
    method = NAMES[kind.only_in]
    assert "loss_terms" in inspect.signature(method).parameters
    algorithm = method(loss_terms=[Proximal(0.1)] if method.__name__ not in ("FedNova", "FedAMP") else [])
    assert any(type(part) is kind for part in (*algorithm.loss_terms, algorithm.aggregator))


@pytest.mark.parametrize("name", ["aggregators", "loss_terms"])
def test_list_shows_which_parts_work_only_in_their_method(name):
    ends = {kind.__name__: f". Only in {kind.only_in}." for kind in classes(name) if kind.only_in}
    assert {part for part, line in descriptions(name).items() if " Only in " in line} == ends.keys()
    assert all(descriptions(name)[part].endswith(end) for part, end in ends.items())
