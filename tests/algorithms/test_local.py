"""Local: training without federation (baselines: A0)."""

import copy
import json

import pytest
from aggregation import aggregate
from experiments import SGD, UNEQUAL, NoDropout, NormMLP, client_series, experiment, finished, in_float64, same_bytes
from loops import assert_clients_equal_loop, cross_entropy_steps, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import Local
from fl_lightning.core.seeding import Stream, derive, seed_everything
from fl_lightning.data.loaders import Batches
from fl_lightning.evaluation.evaluation import Evaluation


def own_models(run):
    return {client: memory["personal"] for client, memory in run.memory.items()}


def test_each_client_trains_its_own_model_as_in_a_plain_loop(tmp_path):
    run = finished(tmp_path, Local(), clients_per_round=3, model=NormMLP)
    data, expected = run.data, {}
    for round in range(1, 4):
        for client in run.server.participants(round):
            net = expected.setdefault(client, copy.deepcopy(run.worker.template.backbone)).train()
            seed_everything(0, Stream.TRAINING, round, client)
            order = derive(0, Stream.BATCHES, round, client)
            own = data.shards[client].train
            batches = Batches(data.data.x_train, data.data.y_train, own, 64, order, run.worker.client_data.min_batch)
            optimizer = SGD(net.parameters())
            for _ in range(2):
                for x, y in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(net(x), y).backward()
                    optimizer.step()
    assert expected.keys() == run.memory.keys()
    for client, net in expected.items():
        assert same_bytes(own_models(run)[client], dict(sorted(net.state_dict().items())))
        assert same_bytes(dict(run.client_module(client).backbone.state_dict()), dict(net.state_dict()))


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, Local(), model=NoDropout, **UNEQUAL)
    run.load()
    models = {client: copy.deepcopy(run.worker.template.backbone).train() for client in range(4)}
    for round in range(1, 4):
        for client in run.server.participants(round):
            cross_entropy_steps(models[client], steps_of(run, round, client))
    run.fit()
    assert_clients_equal_loop(run, models)


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
def test_a_client_that_never_took_part_is_evaluated_with_the_initial_model(tmp_path):
    run = finished(tmp_path, Local(), rounds=1, clients_per_round=2, evaluation=Evaluation(client_model="received"))
    (never, *_) = set(range(6)) - run.memory.keys()
    initial = run.worker.template.backbone
    assert same_bytes(dict(run.client_module(never).backbone.state_dict()), dict(initial.state_dict()))
    own = run.data.shards[never].test
    right = (initial(run.data.data.x_train[own]).argmax(dim=1) == run.data.data.y_train[own]).float().mean()
    assert run.csv.rows[0]["client/acc_mean"] == pytest.approx(
        sum(float(client_series(tmp_path, 1)[f"client_{k}/acc"]) for k in range(6)) / 6
    )
    assert client_series(tmp_path, 1)[f"client_{never}/acc"] == pytest.approx(float(right))


def test_nothing_is_sent_and_there_is_no_global_model(tmp_path):
    run = finished(tmp_path, Local())
    assert run.state == {"model": {}}
    for row in run.csv.rows:
        assert row["comm/total_bytes"] == 0
        assert not any(name.startswith("global/") for name in row)
    assert not (tmp_path / "final" / "model.pt").exists()
    assert json.loads((tmp_path / "final" / "summary.json").read_text())["comm/total_up_bytes"] == 0


def test_aggregation_ignores_the_uploads():
    state = {"model": {}}
    assert aggregate(Local(), state, [None, None]) == state
