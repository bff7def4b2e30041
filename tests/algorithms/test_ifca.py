"""IFCA compared with its algorithm (baselines: C2)."""

import copy
import math

import numpy as np
import pytest
import torch
from aggregation import finish
from experiments import (
    UNEQUAL,
    NoDropout,
    NormMLP,
    client_series,
    experiment,
    finished,
    in_float64,
    same_bytes,
    samples_of,
)
from loops import assert_equals_loop, cross_entropy_steps, steps_of
from peers import mean_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import IFCA, ClusterMeans
from fl_lightning.algorithms.clustered.ifca import best_cluster
from fl_lightning.callbacks import RoundCallback
from fl_lightning.client.module import ClientModule
from fl_lightning.client.received_loss import mean_loss
from fl_lightning.client.weights import reinitialised
from fl_lightning.core.message import Message, Upload
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models.heads import CosineLinear

pytestmark = pytest.mark.numeric


def test_initial_models_differ_and_the_first_is_that_of_the_run(tmp_path):
    run = experiment(tmp_path, IFCA(clusters=3))
    run.load()
    starts = [run.state[f"cluster_{j}"] for j in range(3)]
    assert same_bytes(starts[0], run.worker.template.backbone.state_dict())
    for one, other in ((0, 1), (0, 2), (1, 2)):
        for name in starts[0]:
            assert not torch.equal(starts[one][name], starts[other][name])
    again = experiment(tmp_path / "again", IFCA(clusters=3))
    again.load()
    assert all(same_bytes(again.state[f"cluster_{j}"], starts[j]) for j in range(3))


def test_reinitialising_changes_neither_the_backbone_nor_torchs_random_state():
    backbone = NormMLP((1, 8, 8), 10)
    backbone.head = CosineLinear(16, 10, scale=3.0)
    before, drawn = copy.deepcopy(backbone.state_dict()), torch.get_rng_state()
    other = reinitialised(backbone, np.random.default_rng(0))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert same_bytes(backbone.state_dict(), before)
    assert other.keys() == before.keys()
    for name in ("encoder.1.weight", "encoder.1.bias", "head.weight"):
        assert not torch.equal(other[name], before[name])
    assert other["head.scale"] == 3.0


def test_with_identical_models_all_clients_choose_the_first(tmp_path):
    class SameModels(RoundCallback):
        def on_round_start(self, run, participants):
            run.server.state |= {f"cluster_{j}": run.state["model"] for j in range(3)}

    run = experiment(tmp_path, IFCA(clusters=3), rounds=1, callbacks=[SameModels()])
    run.fit()
    start = run.worker.template.backbone.state_dict()
    assert run.state["choices"]["cluster"].tolist() == [0] * 4
    assert run.state["choices"]["client"].tolist() == run.server.participants(1)
    assert all(same_bytes(run.state[f"cluster_{j}"], start) for j in (1, 2))
    assert same_bytes(run.state["cluster_0"], run.state["model"])


@pytest.mark.parametrize("shared", [(), ("encoder.",)])
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, shared):
    k = 3
    run = experiment(tmp_path / "run", IFCA(clusters=k, shared_layers=shared), model=NoDropout, **UNEQUAL)
    start = experiment(tmp_path / "start", IFCA(clusters=k, shared_layers=shared), model=NoDropout, **UNEQUAL)
    start.check()

    def cluster_of(state, j):
        return state[f"cluster_{j}"] | {n: v for n, v in state["model"].items() if n.startswith(shared)}

    models, chosen = [cluster_of(start.state, j) for j in range(k)], []
    network = copy.deepcopy(start.worker.template.backbone)
    for round in range(1, 4):
        groups, everybody, choices = {}, [], []
        for client in start.server.participants(round):
            x, y = samples_of(start, client)
            losses = []
            for model in models:
                network.load_state_dict(model)
                losses.append(F.cross_entropy(network.eval()(x), y).item())
            cluster = losses.index(min(losses))
            network.load_state_dict(models[cluster])
            cross_entropy_steps(network.train(), steps_of(start, round, client))
            end = (copy.deepcopy(network.state_dict()), len(y))
            groups.setdefault(cluster, []).append(end)
            everybody.append(end)
            choices.append((client, cluster))
        chosen += choices
        common = mean_by_hand(*zip(*everybody, strict=True))
        models = [mean_by_hand(*zip(*groups[j], strict=True)) if j in groups else models[j] for j in range(k)]
        models = [m | {n: v for n, v in common.items() if n.startswith(shared)} for m in models]
    run.fit()
    for j, wanted in enumerate(models):
        assert_equals_loop(run, cluster_of(run.state, j), wanted)
    found = run.state["choices"]
    assert list(zip(found["client"].tolist(), found["cluster"].tolist(), strict=True)) == choices
    assert len({cluster for _, cluster in chosen}) > 1


def test_the_cluster_is_chosen_by_the_mean_loss_in_eval_mode(tmp_path):
    batches = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (5, 1)]
    network = torch.nn.Linear(4, 3)
    wanted = sum(-network(x).log_softmax(1)[range(len(y)), y].sum() for x, y in batches) / 6
    assert math.isclose(mean_loss(ClientModule(network), batches).item(), wanted.item(), rel_tol=1e-6)
    run = finished(tmp_path, IFCA(clusters=2), model=NormMLP, clients_per_round=6)
    module = run.client_module(2)
    assert list(module.notes) == ["choice"]
    chosen = int(module.notes["choice"]["cluster"])
    own = run.data.shards[2].train
    losses = []
    for j in range(2):
        network = run.worker.modules.build_shared(run.state[f"cluster_{j}"]).backbone.eval()
        losses.append(F.cross_entropy(network(run.data.data.x_train[own]), run.data.data.y_train[own]).item())
    assert chosen == losses.index(min(losses))
    assert same_bytes(module.backbone.state_dict(), run.state[f"cluster_{chosen}"])


def test_ties_choose_the_first_cluster_and_nan_is_never_chosen():
    assert best_cluster(torch.tensor([2.0, 1.0, 1.0])) == 1
    assert best_cluster(torch.tensor([math.nan, 3.0])) == 1
    assert best_cluster(torch.tensor([math.inf, math.nan])) == 0


def test_each_cluster_is_the_mean_of_its_members():
    def upload(client, n, value, cluster):
        tensors = {"model/a.w": torch.full((2,), value), "model/b.w": torch.full((2,), value)}
        return Upload(client, Message(tensors, {"n_samples": n, "cluster": cluster}))

    means = ClusterMeans("samples", ["a."])
    uploads = [upload(0, 1, 1.0, 2), upload(3, 3, 5.0, 2), upload(4, 4, 8.0, 0)]
    state = finish(means, uploads)
    assert state.keys() == {"model", "choices", "cluster_0", "cluster_2"}
    assert state["model"]["a.w"].tolist() == [6.0, 6.0]
    assert state["cluster_2"].keys() == {"b.w"}
    assert state["cluster_2"]["b.w"].tolist() == [4.0, 4.0]
    assert state["cluster_0"]["b.w"].tolist() == [8.0, 8.0]
    assert state["choices"]["cluster"].tolist() == [2, 2, 0]
    plain = ClusterMeans("uniform")
    assert finish(plain, uploads)["cluster_2"]["b.w"].tolist() == [3.0, 3.0]


def test_shared_layers_are_sent_once(tmp_path):
    run = finished(tmp_path, IFCA(clusters=3, shared_layers=["encoder."]), rounds=1)
    head = sum(v.nbytes for name, v in run.state["model"].items() if name.startswith("head."))
    encoder = sum(v.nbytes for name, v in run.state["model"].items() if name.startswith("encoder."))
    assert run.csv.rows[-1]["comm/down_bytes"] == 4 * (encoder + 3 * head)


def test_the_received_models_of_all_clients_are_evaluated(tmp_path):
    run = finished(tmp_path, IFCA(), evaluation=Evaluation(client_model="received"), batch_size=32)
    assert "global/acc" not in run.csv.rows[-1]
    assert run.csv.rows[-1]["client/acc_mean"] > 0.5
    test = run.data.shards[1].test
    module = run.client_module(1)
    acc = (module(run.data.data.x_train[test]).argmax(1) == run.data.data.y_train[test]).float().mean()
    assert client_series(tmp_path, 3)["client_1/acc"] == pytest.approx(float(acc))
