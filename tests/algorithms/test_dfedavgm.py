"""DFedAvgM against its algorithm (baselines: D2)."""

from functools import partial

import numpy as np
import pytest
import torch
from experiments import NormMLP, experiment, in_float64, same_bytes
from peers import model_of, published

from fl_lightning.algorithms import Complete, DFedAvgM, ErdosRenyi, FedAvg, PeerAlgorithm, Ring
from fl_lightning.algorithms.decentralized.dfedavgm import metropolis_weights
from fl_lightning.core.message import Message

pytestmark = pytest.mark.numeric

PLAIN = partial(torch.optim.SGD, lr=0.1)
MOMENTUM = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ALL = {"clients_per_round": 6}
GRAPHS = [Complete(), Ring(), Ring(2), ErdosRenyi(0.4), ErdosRenyi(0.0)]


def links(graph, clients=7):
    return torch.from_numpy(graph.links(clients, np.random.default_rng(1)))


@pytest.mark.parametrize("graph", GRAPHS)
def test_metropolis_weights_are_the_formula(graph):
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


def test_of_a_ring_they_are_a_third_of_everybody_one_share_each():
    assert metropolis_weights(links(Ring()))[2].tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0, 0, 0])
    assert metropolis_weights(links(Complete()))[2].tolist() == pytest.approx([1 / 7] * 7)
    star = torch.zeros(4, 4, dtype=torch.bool)
    star[0, 1:] = star[1:, 0] = True
    assert metropolis_weights(star)[1].tolist() == pytest.approx([1 / 4, 3 / 4, 0, 0])


def mixed(run, client, round):
    """The model that a client starts a round from, and what it mixed it from."""
    module = run.worker.modules.receive(run.server.task(round, client, run.server.download(round, client)))
    return module.backbone.state_dict()


@pytest.mark.parametrize("graph", [Ring(), ErdosRenyi(0.5)])
def test_mixing_is_the_matrix_and_preserves_the_mean(tmp_path, graph):
    run = experiment(tmp_path, DFedAvgM(graph=graph), model=NormMLP, rounds=2)
    run.fit()
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


@in_float64
def test_with_everybody_linked_it_is_fedavg_with_uniform_weights(tmp_path):
    options = {"optimizer": PLAIN, "rounds": 3, **ALL}
    run = experiment(tmp_path / "peers", DFedAvgM(), **options)
    run.fit()
    other = experiment(tmp_path / "avg", FedAvg("uniform"), **options)
    other.fit()
    for name, value in other.state["model"].items():
        torch.testing.assert_close(run.state["model"][name], value, rtol=1e-9, atol=1e-9)
    x = [mixed(run, k, 3) for k in range(6)]
    for name in x[0]:
        assert all(torch.allclose(x[0][name], one[name], rtol=1e-9, atol=1e-9) for one in x)


@in_float64
def test_with_nobody_linked_clients_train_alone_with_momentum_from_zero_each_round(tmp_path):
    run = experiment(
        tmp_path,
        DFedAvgM(graph=ErdosRenyi(0.0)),
        rounds=2,
        batch_size=10_000,
        optimizer=MOMENTUM,
        trainer={"accelerator": "cpu", "max_epochs": 3},
        **ALL,
    )
    run.fit()
    for client in (0, 5):
        network = run.worker.modules.build().backbone
        x = run.data.data.x_train[run.data.shards[client].train]
        y = run.data.data.y_train[run.data.shards[client].train]
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
        for name, value in model_of(published(run, client)[0]).items():
            torch.testing.assert_close(network.state_dict()[name], value, rtol=1e-9, atol=1e-9)


def test_alone_is_alone_bit_for_bit_whatever_the_weights(tmp_path):
    one = experiment(tmp_path / "one", DFedAvgM(graph=ErdosRenyi(0.0)), model=NormMLP)
    one.fit()
    other = experiment(tmp_path / "other", PeerAlgorithm(graph=ErdosRenyi(0.0)), model=NormMLP)
    other.fit()
    for client in range(6):
        assert same_bytes(published(one, client)[0], published(other, client)[0])


def test_peers_that_are_drawn_count_all_the_same(tmp_path):
    run = experiment(tmp_path, DFedAvgM(n_com=2, graph=Ring(2)), rounds=1, **ALL)
    run.fit()
    message = run.server.download(2, 0)
    assert sorted(v for name, v in message.numbers.items() if name.endswith("/weight")) == [1 / 3, 1 / 3]
    peers = [int(name.split("/")[0].removeprefix("peer_")) for name in message.numbers if name.endswith("/weight")]
    x = run.worker.modules.receive(run.server.task(1, 0, message)).backbone.state_dict()
    z = [model_of(published(run, k)[0]) for k in (0, *peers)]
    for name in x:
        torch.testing.assert_close(x[name], torch.stack([one[name] for one in z]).double().mean(0).float())


def test_numbers_of_samples_count_for_nothing():
    uploads = [({"model/w": torch.tensor([v])}, n) for v, n in ((0.0, 1), (3.0, 100), (9.0, 10))]
    own, *others = (Message(tensors, {"n_samples": n}) for tensors, n in uploads)
    received = [
        type("Upload", (), {"message": Message(m.tensors, m.numbers | {"weight": w})})
        for m, w in zip(others, (0.5, 0.25), strict=True)
    ]
    assert DFedAvgM().mix(own, received)["w"].tolist() == [3.75]


def test_uniform_gossip_takes_plain_means(tmp_path):
    run = experiment(tmp_path, PeerAlgorithm(weighting="uniform"), rounds=2)
    run.fit()
    z = [model_of(published(run, k)[0]) for k in range(6)]
    x = mixed(run, 1, 2)
    for name in x:
        mean = torch.stack([one[name] for one in z]).double().mean(0).float()
        torch.testing.assert_close(x[name], mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(run.state["model"][name], mean, rtol=1e-6, atol=1e-7)
