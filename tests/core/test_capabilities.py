"""A subclass that overrides a method loses the capabilities that depend on the method."""

from inspect import getattr_static

import pytest

from fl_lightning import algorithms
from fl_lightning.algorithms import Aggregator, Algorithm, FedAvg, WeightedMean
from fl_lightning.callbacks import RoundCallback, RoundFigure
from fl_lightning.cli.catalogue import classes


class OwnFold(WeightedMean):
    def fold(self, folded, upload):
        super().fold(folded, upload)


class Declares(OwnFold):
    only_averages = True


class Inherits(OwnFold):
    pass


class Mixin:
    def receive(self, module, download, memory):
        pass


class Mixed(Mixin, FedAvg):
    pass


def test_an_override_removes_a_capability_and_a_declaration_restores_it():
    assert [kind.only_averages for kind in (WeightedMean, OwnFold, Declares, Inherits)] == [True, False, True, False]
    assert (OwnFold.sends_one_model, Mixed.plain_exchange, FedAvg.plain_exchange) == (True, False, True)
    assert not Mixed.starts_alike
    assert FedAvg.starts_alike


MEANS = "Bucketing Bulyan CenteredClipping GeometricMedian Krum Median MultiKrum NearestNeighborMixing NormBound"
DECLARED = {
    "starts_alike": {"AFL", "FedDGGA", "QFFL"},  # their `prepare` only computes a loss
    "releases_only_model": {"PFedMe"},  # its `upload` sends the local model
    "only_steps_read_data": {  # their `upload` sends weights and numbers of steps
        *("FedCM", "FedDC", "FedExLoRA", "FLoRA", "FlexLoRA", "Local", "MoFedSAM", "RoLoRA", "SCAFFOLD")
    },
    "is_mean": {*MEANS.split(), "SignGuard", "TrimmedMean", "WeightedMean"},
}
"""Classes that override a method and declare that they have the capability nevertheless."""


@pytest.mark.parametrize("base", [Algorithm, Aggregator])
def test_no_class_of_the_package_has_a_wrong_capability(base):
    """A class that overrides a method does not have the capabilities that depend on it."""
    kinds = classes("algorithms" if base is Algorithm else "aggregators")
    assert len(kinds) > 10
    lost = set()
    for kind in kinds:
        for capability, methods in base.capabilities.items():
            overrides = any(getattr_static(kind, name) is not getattr_static(base, name) for name in methods)
            has = getattr_static(kind, capability)
            if capability == "only_averages":  # `fold` itself says so: `WeightedMean`'s, and what is built on it
                averages = getattr_static(kind, "fold") is getattr_static(WeightedMean, "fold")
                assert (has is True) == averages or kind is algorithms.GlobalPeriodReview, kind
            elif kind.__name__ not in DECLARED.get(capability, ()):
                assert has is not overrides, (kind, capability)
                lost |= {capability} if overrides else set()
    assert lost == base.capabilities.keys() - {"only_averages"}


def test_callbacks_that_observe_clients_may_keep_their_uploads():
    kinds = classes("callbacks")
    observers = {kind for kind in kinds if issubclass(kind, RoundFigure) and kind.observe is not RoundFigure.observe}
    assert {kind for kind in kinds if not kind.keeps_no_uploads} == observers
    assert len(observers) > 2


def test_a_callback_of_ones_own_may_keep_uploads_until_it_says_otherwise():
    class Own(RoundCallback):
        def on_client_end(self, run, result):
            self.last = result

    class Counter(Own):
        keeps_no_uploads = True

    assert (RoundCallback.keeps_no_uploads, Own.keeps_no_uploads, Counter.keeps_no_uploads) == (True, False, True)
