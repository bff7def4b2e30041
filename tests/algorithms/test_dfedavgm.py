"""DFedAvgM compared with its algorithm (baselines: D2)."""

from functools import partial

import numpy as np
import pytest
import torch
from experiments import UNEQUAL, NormMLP, assert_near, experiment, finished, in_float64, samples_of
from loops import assert_publications_equal_loop, peers_by_hand
from peers import model_of, published
from torch.nn import functional as F

from fl_lightning.algorithms import Complete, DFedAvgM, ErdosRenyi, FedAvg, Ring
from fl_lightning.algorithms.decentralized.dfedavgm import metropolis_weights

pytestmark = pytest.mark.numeric

PLAIN = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ALL = {"clients_per_round": 6}
GRAPHS = [Complete(), Ring(), Ring(2), ErdosRenyi(0.4), ErdosRenyi(0.0)]


def links(graph, clients=7):
    return torch.from_numpy(graph.links(clients, np.random.default_rng(1)))


@pytest.mark.parametrize("graph", GRAPHS)
def test_metropolis_weights_equal_the_formula(graph):
    linked = links(graph)
    weights = metropolis_weights(linked)
    degrees = [int(row.sum()) for row in linked]
    for i, j in np.ndindex(7, 7):
        if i != j:
            wanted = 1 / (1 + max(degrees[i], degrees[j])) if linked[i, j] else 0.0
            assert weights[i, j].item() == pytest.approx(wanted)
    assert torch.equal(weights, weights.T)
    assert (weights.diag() > 0).all()
    torch.testing.assert_close(weights.sum(0), torch.ones(7, dtype=torch.float64))
    torch.testing.assert_close(weights.sum(1), torch.ones(7, dtype=torch.float64))


def mixed(run, client, round):
    """Return the model that a client starts a round from."""
    module = run.worker.modules.receive(run.server.task(round, client, run.server.download(round, client)))
    return module.backbone.state_dict()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("graph", [Ring(), ErdosRenyi(0.5)])
def test_mixing_applies_the_matrix_and_preserves_the_mean(tmp_path, graph):
    run = finished(tmp_path, DFedAvgM(graph=graph), model=NormMLP, rounds=2)
    z = [model_of(published(run, k)[0]) for k in range(6)]
    x = [mixed(run, k, 2) for k in range(6)]
    weights = metropolis_weights(run.state["links"]["matrix"])
    assert not torch.equal(x[0]["head.weight"], x[3]["head.weight"])
    for name, value in z[0].items():
        if not value.is_floating_point():
            continue
        for i in range(6):
            wanted = sum(weights[i, j] * z[j][name].double() for j in range(6))
            torch.testing.assert_close(x[i][name].double(), wanted, rtol=1e-6, atol=1e-7)
        mean = torch.stack([one[name] for one in z]).double().mean(0)
        torch.testing.assert_close(torch.stack([one[name] for one in x]).double().mean(0), mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(run.state["model"][name].double(), mean, rtol=1e-6, atol=1e-6)


@pytest.mark.thorough
@in_float64
def test_in_a_complete_graph_it_is_fedavg_with_uniform_weights(tmp_path):
    options = {"optimizer": PLAIN, "rounds": 2, **ALL}
    run = finished(tmp_path / "peers", DFedAvgM(), **options)
    other = finished(tmp_path / "avg", FedAvg(weighting="uniform"), **options)
    assert_near(run.state["model"], other.state["model"])
    x = [mixed(run, k, 2) for k in range(6)]
    for name in x[0]:
        assert all(torch.allclose(x[0][name], one[name], rtol=1e-9, atol=1e-9) for one in x)


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """On a ring, a client and its two neighbours have the same weight."""
    run = experiment(tmp_path, DFedAvgM(graph=Ring()), **UNEQUAL | {"optimizer": MOMENTUM})

    def train(local, client, batches):
        before = [p.detach().clone() for p in local.parameters()]  # y^{-1} = y^0
        for x, y in batches:
            gradients = torch.autograd.grad(F.cross_entropy(local(x), y), list(local.parameters()))
            now = [p.detach().clone() for p in local.parameters()]
            with torch.no_grad():
                for p, g, last in zip(local.parameters(), gradients, before, strict=True):
                    p += -0.1 * g + 0.9 * (p - last)
            before = now

    expected = peers_by_hand(run, train, "uniform")
    run.fit()
    assert_publications_equal_loop(run, expected)


@in_float64
def test_without_links_clients_train_alone_with_momentum_from_zero_each_round(tmp_path):
    run = finished(
        tmp_path,
        DFedAvgM(graph=ErdosRenyi(0.0)),
        rounds=2,
        batch_size=10_000,
        optimizer=MOMENTUM,
        trainer={"accelerator": "cpu", "max_epochs": 3},
        **ALL,
    )
    for client in (0, 5):
        network = run.worker.modules.build().backbone
        x, y = samples_of(run, client)
        for _ in range(2):
            before = {name: p.detach().clone() for name, p in network.named_parameters()}  # y^{-1} = y^0
            for _ in range(3):
                network.zero_grad()
                torch.nn.functional.cross_entropy(network(x), y).backward()
                with torch.no_grad():
                    for name, p in network.named_parameters():
                        now = p.detach().clone()
                        p += -0.1 * p.grad + 0.9 * (p - before[name])
                        before[name] = now
        assert_near(network.state_dict(), model_of(published(run, client)[0]))


def test_sampled_peers_have_equal_weights(tmp_path):
    run = finished(tmp_path, DFedAvgM(n_com=2, graph=Ring(2)), rounds=1, **ALL)
    message = run.server.download(2, 0)
    assert sorted(v for name, v in message.numbers.items() if name.endswith("/weight")) == [1 / 3, 1 / 3]
    peers = [int(name.split("/")[0].removeprefix("peer_")) for name in message.numbers if name.endswith("/weight")]
    x = run.worker.modules.receive(run.server.task(1, 0, message)).backbone.state_dict()
    z = [model_of(published(run, k)[0]) for k in (0, *peers)]
    for name in x:
        torch.testing.assert_close(x[name], torch.stack([one[name] for one in z]).double().mean(0).float())
