"""Every method of the package: resuming, common options, and stacking."""

import importlib
import inspect
from pathlib import Path

import pytest
from adapters import LowRankMLP
from experiments import ONE_EPOCH, NormMLP, digits, experiment, in_two_parts
from methods import ADAPTERS, CLASSES, METHODS, SIAMESE, assert_same_run
from stacking import compare

from fl_lightning import algorithms
from fl_lightning.algorithms import PeerAlgorithm, WeightedMean
from fl_lightning.analysis.study.sweep_file import parse_sweep
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import StackedEngine

NAMES = [name for name in CLASSES if name != "Algorithm"]
FAST = ("CwFedAvg", "FedSKC", "SCAFFOLD", "UAPDFL")
"""One method of each kind, which the fast tier runs."""


def tiers(names):
    """Mark all methods except those of the fast tier as thorough."""
    return [name if name in FAST else pytest.param(name, marks=pytest.mark.thorough) for name in names]


NEEDS_PREDICTOR = ("FedSiamDA",)
MEASURED = "MeasuredModule (it has a configure_gradient_clipping of its own)"
NOT_STACKED = {
    "APFL": "MixedModels (it has a training_step of its own)",
    "APPLE": "MixedModule (it has a losses of its own)",
    "CriticalFL": MEASURED,
    "DisPFL": "MaskedModule (it has a on_before_optimizer_step of its own)",
    "Ditto": "TwoModels (it has a training_step of its own)",
    "FML": "MutualModule (it has a training_step of its own)",
    "FedKD": "DistillingModule (it has a training_step of its own)",
    "FedROD": "TwoHeads (it has a losses of its own)",
    "FedSAM": "SharpnessAware (it has a training_step of its own)",
    "FedSiamDA": "loss term 'siamese'",
    "MoFedSAM": "SharpnessAware (it has a training_step of its own)",
    "PFedMe": "MoreauEnvelope (it has a training_step of its own)",
    "PeerCriticalFL": MEASURED,
    "PerFedAvg": "MetaStep (it has a training_step of its own)",
}


@pytest.mark.parametrize("name", tiers(NAMES))
@pytest.mark.fast_cases(1)
def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path, name):
    """With BatchNorm, missing classes, and clients that take part in one or both rounds."""
    method, options = METHODS[name]
    model = SIAMESE if name in NEEDS_PREDICTOR else LowRankMLP if name in ADAPTERS else NormMLP
    options = options | {"model": model, "scenario": digits(6, alpha=0.1), "trainer": ONE_EPOCH}
    options |= {"clients_per_round": 3, "seed": 3}
    whole, rest = in_two_parts(tmp_path, method, 1, rounds=2, **options)
    assert (whole.data.class_counts() == 0).any()
    first, second = (set(whole.server.participants(round)) for round in (1, 2))
    assert first & second
    assert first ^ second
    assert_same_run(whole, rest)


def test_methods_with_options_of_their_own_have_a_search_space():
    without = {name for name in NAMES if not getattr(algorithms, name).search_space}
    peers = {"DFedAvgM", "PeerAlgorithm", "PeerFedPer"}
    others = {"FedAvg", "FedBN", "FedPer", "FedROD", "FedRep", "HeteroFL", "LGFedAvg", "Local"}
    assert without == peers | {*ADAPTERS} | others


@pytest.mark.parametrize("name", [name for name in NAMES if getattr(algorithms, name).search_space])
def test_a_search_space_has_valid_ranges_around_the_defaults_in_the_syntax_of_sweeps(name):
    kind = getattr(algorithms, name)
    options = inspect.signature(kind).parameters
    assert kind.search_space.keys() <= options.keys()
    content = {
        "method": "random",
        "metric": {"name": "global/acc", "goal": "maximize"},
        "command": ["${program}", "fit", "--config", "digits_fedavg.yaml", "${args}"],
        "program": "fl-lightning",
        "parameters": {f"algorithm.{option}": space for option, space in kind.search_space.items()},
    }
    assert parse_sweep(content, Path("search.yaml")).parameters.keys() == content["parameters"].keys()
    for option, space in kind.search_space.items():
        bounds = space.get("values") or [space["min"], space["max"]]
        default = options[option].default
        assert default in bounds if "values" in space else bounds[0] <= default <= bounds[1]
        for value in bounds:
            kind(**{option: value})


class UserTerm(LossTerm):
    """A user's term."""

    def forward(self, step):
        return step.logits.sum()


@pytest.mark.parametrize("name", NAMES)
def test_common_options_reach_the_method(name):
    kind, accepted = CLASSES[name], inspect.signature(CLASSES[name]).parameters
    term, aggregator = UserTerm(), WeightedMean("uniform")
    parts = {"loss_terms": [term], "aggregator": aggregator, "buffers": "local"}
    method = kind(**{part: value for part, value in parts.items() if part in accepted})
    if "loss_terms" in accepted:
        assert term in method.loss_terms
    if "aggregator" in accepted:
        assert aggregator in method.aggregator.chain()
    if "buffers" in accepted:
        assert method.buffers == "local"
    for weighting in ("samples", "uniform") if "weighting" in accepted else ():
        method = kind(weighting=weighting)
        *_, innermost = method.aggregator.chain()
        held = method if isinstance(method, PeerAlgorithm) else innermost
        assert held.weighting == weighting


@pytest.mark.numeric
@pytest.mark.parametrize("name", tiers([name for name in NAMES if name not in NOT_STACKED]))
@pytest.mark.fast_cases(2)
def test_stacked_clients_equal_sequential_ones(tmp_path, name):
    method, options = METHODS[name]
    compare(tmp_path, method(), **options)


@pytest.mark.parametrize("name", NOT_STACKED)
def test_methods_that_cannot_be_stacked_are_refused_in_one_line(tmp_path, name):
    method, options = METHODS[name]
    run = experiment(tmp_path, method(), **options)
    run.load()
    with pytest.raises(ConfigError) as refusal:
        StackedEngine().check(run.worker)
    assert str(refusal.value).startswith(f"engine: StackedEngine cannot stack {NOT_STACKED[name]}")
    assert "\n" not in str(refusal.value)


def test_the_pages_say_which_methods_cannot_be_stacked(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs")
    assert NOT_STACKED.keys() == importlib.import_module("reference").NOT_STACKED
