"""Clients that have not trained yet: which of their models contain initial weights, and how the run counts them."""

import csv
from dataclasses import replace

import pytest
import torch
from experiments import (
    ONE_EPOCH,
    RECEIVED,
    client_series,
    digits,
    experiment,
    finished,
    in_two_parts,
    same_bytes,
    samples_of,
    task_of_round,
    untested,
)
from methods import METHODS

from fl_lightning.algorithms import FedALA, FedFomo, FedPer, Local, PeerAlgorithm, PFedMe
from fl_lightning.client.loss_term import LossTerm
from fl_lightning.evaluation.evaluation import Evaluation

WARNING = "contain initial weights, because their clients have not trained yet"

OWN_WEIGHTS = {  # methods in which a client has weights of its own
    *("APFL", "APPLE", "DFedAvgM", "DisPFL", "Ditto", "FML", "FedALA", "FedAMP", "FedBN", "FedDistill", "FedFomo"),
    *("FedGH", "FedKD", "FedPer", "FedProto", "FedROD", "FedRep", "FedSALoRA", "FedTGP", "HeurFedAMP", "LGFedAvg"),
    *("Local", "PeerAlgorithm", "PeerCriticalFL"),
    *("PeerFedPer", "UAPDFL", "local buffers", "cwFedAVG's code", "UA-PDFL's code", "gossip on a random graph"),
    "gossip with a median",
    "many clients",
}
ALWAYS_INITIAL = {  # also trained clients have the initial head, cores, factors or statistics
    *("APPLE", "FFALoRA", "FedBABU", "dropped buffers")
}
FAST = ("Ditto", "FedFomo", "PFedMe", "UAPDFL")
CASES = [name if name in FAST else pytest.param(name, marks=pytest.mark.thorough) for name in METHODS]

pytestmark = pytest.mark.filterwarnings(f"ignore:evaluation.(new_)?client_model.*{WARNING}")


def models_of(run, worker):
    """Return the received model of each client, as a worker evaluates it."""
    tasks = (replace(task_of_round(run, run.round + 1, client), round=run.round) for client in range(run.clients))
    return [dict(worker.modules.personalize(task).backbone.state_dict()) for task in tasks]


@pytest.mark.parametrize("name", CASES)
def test_the_count_of_untrained_clients(tmp_path, name):
    """A model counts if it changes with the initial weights of the network, everything else being the same."""
    method, options = METHODS[name]
    options = options | {"clients_per_round": 1, "rounds": 1, "trainer": ONE_EPOCH, "evaluation": RECEIVED}
    run = finished(tmp_path, method(), **options)
    (trained,) = [
        client for client in range(run.clients) if f"client_{client}/train_loss" in client_series(tmp_path, 1)
    ]
    count = run.csv.rows[0]["client/untrained"]
    assert count == (run.clients - 1 if name in OWN_WEIGHTS - {"FedFomo"} else count)
    if name not in OWN_WEIGHTS:
        assert not count
    if run.algorithm.server and name not in ALWAYS_INITIAL:

        def shifted(in_shape, num_classes):
            network = run.worker.model(in_shape, num_classes)
            with torch.no_grad():
                frozen = {name for name, value in network.named_parameters() if not value.requires_grad}
                for name, entry in network.state_dict().items():
                    entry += 0.001 * torch.rand_like(entry) if entry.is_floating_point() and name not in frozen else 0
            return network

        models = zip(models_of(run, run.worker), models_of(run, replace(run.worker, model=shifted)), strict=True)
        changed = {client for client, (one, other) in enumerate(models) if not same_bytes(one, other)}
        assert count == len(changed)
        assert trained not in changed


def test_a_client_that_trains_before_it_is_evaluated_is_not_untrained(tmp_path):
    run = experiment(tmp_path, FedPer())
    run.load()
    tasks = [replace(task_of_round(run, 1, 0), evaluate=True, fit=fit) for fit in (True, False)]
    assert [run.worker.run(task).untrained for task in tasks] == [False, True]


def test_fedfomo_counts_clients_that_no_received_model_helps(tmp_path):
    run = finished(tmp_path, FedFomo(models=0), rounds=1, clients_per_round=1, evaluation=RECEIVED)
    assert run.csv.rows[0]["client/untrained"] == 5


def test_an_untrained_client_of_pfedme_has_the_received_model(tmp_path):
    run = finished(tmp_path, PFedMe(), rounds=2, clients_per_round=1, evaluation=RECEIVED)
    shared, scores = run.client_module(0).backbone.eval(), client_series(tmp_path, 2)
    for client in set(range(6)) - set(run.memory):
        shared.load_state_dict(run.state["model"])
        x, y = samples_of(run, client, "test")
        accuracy = (shared(x).argmax(dim=1) == y).float().mean()
        assert scores[f"client_{client}/acc"] == pytest.approx(float(accuracy))
    assert len(run.memory) <= 2


def test_a_client_is_counted_until_it_has_trained(tmp_path):
    run = finished(tmp_path, FedPer(), rounds=4, clients_per_round=2, evaluation=RECEIVED)
    expected, trained = [], set()
    for round in range(1, 5):
        trained |= set(run.server.participants(round))
        expected.append(6 - len(trained))
    assert [row["client/untrained"] for row in run.csv.rows] == expected
    assert run.test()["client/untrained"] == expected[-1]
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert [int(float(row["client/untrained"])) for row in csv.DictReader(file)] == expected


@pytest.mark.parametrize("method", [FedPer, PeerAlgorithm])
def test_a_resumed_run_goes_on_counting(tmp_path, method):
    whole, rest = in_two_parts(tmp_path, method, 1, clients_per_round=1, trainer=ONE_EPOCH, evaluation=RECEIVED)
    assert [row["client/untrained"] for row in rest.csv.rows] == [row["client/untrained"] for row in whole.csv.rows]
    assert rest.csv.rows[-1]["client/untrained"] >= 3


class Failing(LossTerm):
    """Fails in the fit of every client with an even id."""

    def begin(self, module):
        if module.trainer and module.context.round and int(module.context.class_counts.sum()) in self.sizes:
            raise RuntimeError("failed")

    def forward(self, step):
        return step.logits.new_zeros(())


@pytest.mark.filterwarnings("ignore:client .* dropped from this round")
def test_a_client_that_failed_in_its_only_round_has_not_trained(tmp_path):
    term = Failing()
    term.sizes = ()
    options = {"rounds": 1, "clients_per_round": 3, "evaluation": RECEIVED, "on_client_failure": "drop"}
    run = experiment(tmp_path, FedPer(loss_terms=[term]), **options)
    run.load()
    term.sizes = (len(run.data.shards[run.server.participants(1)[0]].train),)
    run.worker.template.loss_terms[0].sizes = term.sizes
    run.fit()
    assert run.csv.rows[0]["client/failed"] == 1
    assert run.csv.rows[0]["client/untrained"] == 4


def test_only_evaluated_clients_are_counted(tmp_path):
    few = replace(RECEIVED, max_clients=3)
    run = finished(tmp_path, Local(), rounds=1, clients_per_round=1, evaluation=few)
    never = set(run.evaluator.scored) - set(run.memory)
    assert run.csv.rows[0]["client/untrained"] == len(never) > 1
    run.data.shards = untested(run.data, [min(never)])
    assert run.test()["client/untrained"] == len(never) - 1
    run.data.shards = untested(run.data, range(6))
    assert "client/untrained" not in run.test()


def test_trained_models_are_not_counted(tmp_path):
    run = finished(tmp_path, FedPer(), rounds=1, clients_per_round=1)
    assert "client/acc_mean" in run.csv.rows[0]
    assert not any(name.endswith("untrained") for name in run.csv.rows[0])


@pytest.mark.parametrize(("model", "count"), [("received", 2), ("trained", None), (None, None)])
def test_held_out_clients_are_counted_unless_they_train(tmp_path, model, count):
    scenario, how = replace(digits(8), held_out_clients=2), Evaluation(new_client_model=model)
    run = finished(tmp_path, FedPer(), rounds=1, scenario=scenario, evaluation=how)
    assert run.csv.rows[0].get("new_client/untrained") == count
    assert "client/untrained" not in run.csv.rows[0]


def test_the_run_says_once_that_models_are_untrained(tmp_path):
    with pytest.warns(UserWarning, match=WARNING) as caught:
        finished(tmp_path, FedPer(), rounds=3, clients_per_round=1, evaluation=RECEIVED)
    (text,) = [str(each.message) for each in caught]
    assert text.startswith("evaluation.client_model: 5 of 6 ")


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["stacked", "processes"])
def test_every_engine_counts(tmp_path, engine):
    run = finished(tmp_path, FedALA(), rounds=1, clients_per_round=1, evaluation=RECEIVED, engine=engine)
    assert run.csv.rows[0]["client/untrained"] == 5
