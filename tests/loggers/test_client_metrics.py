"""Metrics of single clients in loggers."""

import math
import statistics

import numpy as np
import pytest
from lightning.pytorch.loggers.logger import DummyLogger

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.names import Names
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.loggers.base import Labels
from fl_lightning.loggers.client_metrics import client_distributions, client_labels, client_series
from fl_lightning.loggers.collection import Loggers


class Recording(DummyLogger):
    """Record the metrics of the last call."""

    def log_metrics(self, metrics, step=None):
        self.step, self.metrics = step, metrics


def logged(tmp_path, clients, names=(), **options):
    """Return the metrics that a logger gets of a round in which the clients have the accuracy `id / 100`."""
    recording = Recording()
    loggers = Loggers(recording, **options)
    counts = np.ones((clients, 2), dtype=int)
    loggers.begin(tmp_path, None, Labels(None, None, []), counts, 0, Names(names))
    own = {client: {"acc": client / 100} for client in range(clients)}
    loggers.log_round(RoundMetrics({"round": 3, "global/acc": 0.5}, own))
    assert recording.step == 3
    assert recording.metrics.pop("global/acc") == 0.5
    assert "round" not in recording.metrics
    return recording.metrics


@pytest.mark.parametrize("clients", [1, 7, 10, 11, 100, 101])
def test_sorted_labels_are_in_the_order_of_the_ids(clients):
    labels = client_labels(clients)
    assert labels == sorted(labels)
    assert list(map(int, labels)) == list(range(clients))
    assert {len(label) for label in labels} == {len(labels[-1])}


def test_each_metric_is_one_group_of_clients():
    series = client_series({0: {"acc": 0.5, "loss": 1.0}, 7: {"acc": 0.25}}, client_labels(101))
    assert series == {"client_acc/000": 0.5, "client_loss/000": 1.0, "client_acc/007": 0.25}


def test_few_clients_have_one_series_each(tmp_path):
    assert logged(tmp_path, 20) == {f"client_acc/{client:02}": client / 100 for client in range(20)}
    assert logged(tmp_path, 3, ["a b", "c", "d/é"]).keys() == {"client_acc/0_a_b", "client_acc/1_c", "client_acc/2_d_é"}


def test_many_clients_have_a_distribution(tmp_path):
    found = logged(tmp_path, 21)
    deciles = statistics.quantiles([client / 100 for client in range(21)], n=10, method="inclusive")
    expected = {"min": 0.0, "p10": deciles[0], "median": deciles[4], "p90": deciles[8], "max": 0.2}
    assert found == pytest.approx({f"client_acc/{part}": value for part, value in expected.items()})


def test_the_option_sets_the_number_of_clients(tmp_path):
    assert len(logged(tmp_path, 21, max_clients=21)) == 21
    assert len(logged(tmp_path, 6, max_clients=5)) == 5
    assert set(logged(tmp_path, 1, max_clients=0)) == {
        f"client_acc/{part}" for part in ("min", "p10", "median", "p90", "max")
    }
    with pytest.raises(ConfigError, match=r"^max_logged_clients: "):
        Loggers(None, max_clients=-1)


def test_a_distribution_is_over_the_clients_that_have_the_metric():
    found = client_distributions({0: {"acc": 1.0}, 1: {"acc": 0.0, "rare": math.nan}, 2: {"acc": math.nan}, 3: {}})
    assert (found["client_acc/min"], found["client_acc/median"], found["client_acc/max"]) == (0.0, 0.5, 1.0)
    assert math.isnan(found["client_rare/median"])
    assert client_distributions({0: {"loss": math.inf}, 1: {"loss": 1.0}})["client_loss/max"] == math.inf
    assert client_distributions({}) == {}
