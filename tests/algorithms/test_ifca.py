"""IFCA compared with its algorithm (baselines: C2)."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from experiments import NormMLP, client_series, digits, experiment, finished, in_float64, same_bytes, weights_after
from peers import mean_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import IFCA, ClusterMeans, FedAvg
from fl_lightning.algorithms.clustered.ifca import best_cluster, mean_loss
from fl_lightning.client.module import ClientModule
from fl_lightning.client.weights import reinitialised
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP
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
    run = experiment(tmp_path, IFCA(clusters=3))
    run._build()
    run._begin(None, None, None)
    start = run.state["model"]
    run.server.state |= {f"cluster_{j}": start for j in range(3)}
    run._run_round(1)
    assert run.state["choices"]["cluster"].tolist() == [0] * 4
    assert run.state["choices"]["client"].tolist() == run.server.participants(1)
    assert all(same_bytes(run.state[f"cluster_{j}"], start) for j in (1, 2))
    assert same_bytes(run.state["cluster_0"], run.state["model"])


def by_hand(run, k, rounds, shared=()):
    """Return the clusters' models and the choices after some rounds, with losses over all of a client's data."""
    models = [
        run.state[f"cluster_{j}"] | {n: v for n, v in run.state["model"].items() if n.startswith(shared)}
        for j in range(k)
    ]
    chosen = []
    plain = experiment(run.run_dir / "plain", FedAvg(), **run.options)
    plain._build()
    for round in range(1, rounds + 1):
        groups, everybody = {}, []
        for client in run.server.participants(round):
            own = run.data.shards[client].train
            losses = []
            for model in models:
                network = plain.worker.modules.build_shared(model).backbone.eval()
                with torch.no_grad():
                    logits = network(run.data.data.x_train[own]).double()
                losses.append(float(F.cross_entropy(logits, run.data.data.y_train[own])))
            cluster = losses.index(min(losses))
            chosen.append((round, client, cluster))
            task = plain.server.task(round, client, Message.pack({"model": models[cluster]}))
            trained = plain.worker.run(task).upload.section("model")
            groups.setdefault(cluster, []).append((trained, len(own)))
            everybody.append((trained, len(own)))
        common = mean_by_hand(*zip(*everybody, strict=True))
        models = [mean_by_hand(*zip(*groups[j], strict=True)) if j in groups else models[j] for j in range(k)]
        models = [m | {n: v for n, v in common.items() if n.startswith(shared)} for m in models]
    return models, chosen


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("model", "shared"), [(partial(MLP, hidden=(16,)), ()), (NormMLP, ("encoder.",))])
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, model, shared):
    k, rounds = 3, 2
    options = {"model": model, "scenario": digits(8, alpha=0.1), "clients_per_round": 5, "seed": 3}
    start = experiment(tmp_path / "start", IFCA(k, shared), **options)
    start._build()
    start.options = options
    models, chosen = by_hand(start, k, rounds, shared)
    run = finished(tmp_path / "run", IFCA(k, shared), rounds=rounds, **options)
    for j, wanted in enumerate(models):
        held = run.state[f"cluster_{j}"] | {n: v for n, v in run.state["model"].items() if n.startswith(shared)}
        assert held.keys() == wanted.keys()
        for name in wanted:
            torch.testing.assert_close(held[name], wanted[name], rtol=1e-9, atol=1e-9)
    last = [(client, cluster) for round, client, cluster in chosen if round == rounds]
    assert (
        list(zip(run.state["choices"]["client"].tolist(), run.state["choices"]["cluster"].tolist(), strict=True))
        == last
    )
    assert len({cluster for *_, cluster in chosen}) > 1


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
    state = means.finish(means.fold(iter(uploads)), {}, {})
    assert state.keys() == {"model", "choices", "cluster_0", "cluster_2"}
    assert state["model"]["a.w"].tolist() == [6.0, 6.0]
    assert state["cluster_2"].keys() == {"b.w"}
    assert state["cluster_2"]["b.w"].tolist() == [4.0, 4.0]
    assert state["cluster_0"]["b.w"].tolist() == [8.0, 8.0]
    assert state["choices"]["cluster"].tolist() == [2, 2, 0]
    plain = ClusterMeans("uniform")
    assert plain.finish(plain.fold(uploads), {}, {})["cluster_2"]["b.w"].tolist() == [3.0, 3.0]


def test_shared_layers_are_sent_once(tmp_path):
    run = finished(tmp_path, IFCA(clusters=3, shared_layers=["encoder."]), rounds=1)
    head = sum(v.nbytes for name, v in run.state["model"].items() if name.startswith("head."))
    encoder = sum(v.nbytes for name, v in run.state["model"].items() if name.startswith("encoder."))
    assert run.csv.rows[-1]["comm/down_bytes"] == 4 * (encoder + 3 * head)


def test_the_received_models_of_all_clients_are_evaluated(tmp_path):
    run = finished(tmp_path, IFCA(), evaluation=Evaluation(client_model="received"))
    assert "global/acc" not in run.csv.rows[-1]
    assert run.csv.rows[-1]["client/acc_mean"] > 0.5
    test = run.data.shards[1].test
    module = run.client_module(1)
    acc = (module(run.data.data.x_train[test]).argmax(1) == run.data.data.y_train[test]).float().mean()
    assert client_series(tmp_path, 3)["client_1/acc"] == pytest.approx(float(acc))


def test_a_shared_layer_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"algorithm.shared_layers: no entry's name begins with 'body'"):
        weights_after(tmp_path, IFCA(shared_layers=["body"]))
