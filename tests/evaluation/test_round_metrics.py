import copy
import pickle

import pytest

from fl_lightning.callbacks import RoundMetrics
from fl_lightning.loggers.collection import Loggers


@pytest.fixture
def metrics() -> RoundMetrics:
    return RoundMetrics({"round": 1, "client/acc_mean": 0.5}, {3: {"acc": 0.25}, 10: {"acc": 0.75}})


def test_merging_adds_the_metrics_of_the_run_and_of_clients(metrics: RoundMetrics) -> None:
    other = RoundMetrics({"own": 1.0, "client/acc_mean": 0.125}, {3: {"drift": 2.0}, 4: {"acc": 1.0}})
    metrics |= other
    assert metrics == {"round": 1, "client/acc_mean": 0.125, "own": 1.0}
    assert metrics.clients == {3: {"acc": 0.25, "drift": 2.0}, 10: {"acc": 0.75}, 4: {"acc": 1.0}}
    assert other.clients == {3: {"drift": 2.0}, 4: {"acc": 1.0}}


def test_merging_a_plain_dict_keeps_the_metrics_of_clients(metrics: RoundMetrics) -> None:
    metrics |= {"own": 1.0}
    metrics.clients[4]["acc"] = 1.0
    assert metrics.flat() == {
        "round": 1,
        "client/acc_mean": 0.5,
        "own": 1.0,
        "client_3/acc": 0.25,
        "client_10/acc": 0.75,
        "client_4/acc": 1.0,
    }


def test_the_given_metrics_are_copied() -> None:
    given = {3: {"acc": 0.25}}
    RoundMetrics({}, given).clients[3]["drift"] = 1.0
    assert given == {3: {"acc": 0.25}}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_has_the_metrics_of_clients(metrics: RoundMetrics, copied) -> None:
    assert (copied(metrics), copied(metrics).clients) == (metrics, metrics.clients)


def test_a_logger_gets_the_round_as_the_step(metrics: RoundMetrics) -> None:
    calls = []
    loggers = Loggers(None)
    loggers.log_metrics = lambda *given, **named: calls.append((given, named))  # type: ignore[method-assign]
    loggers.log_round(metrics)
    assert calls == [(({"client/acc_mean": 0.5, "client_acc/3": 0.25, "client_acc/10": 0.75},), {"step": 1})]
