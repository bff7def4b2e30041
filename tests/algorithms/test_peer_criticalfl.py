"""CriticalFL between peers: collected entries, mixing and the number of peers, compared with loops by hand."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from experiments import (
    UNEQUAL,
    descend,
    digits,
    experiment,
    finished,
    in_float64,
    same_bytes,
    samples_of,
    task_of_round,
)
from loops import assert_publications_equal_loop, cross_entropy_steps, steps_of

from fl_lightning.algorithms import PeerCriticalFL, Ring
from fl_lightning.algorithms.decentralized.criticalfl import DETECTOR, collected_part
from fl_lightning.algorithms.decentralized.peers import publication
from fl_lightning.algorithms.global_model.criticalfl import MASK, VALUES
from fl_lightning.core.message import Message, Upload, unbundle
from fl_lightning.core.state_dicts import parameter_names

pytestmark = pytest.mark.numeric

P, KEEP = 6, 0.4


def published(model, samples, changed=None, norm=0.0):
    sections = {"model": model} | ({} if changed is None else {"changed": {"entries": packed(changed)}})
    return Message.pack(sections, n_samples=samples, gradient_norm=norm, peers=3)


def packed(bits):
    return torch.from_numpy(np.packbits(np.array(bits)))


def model():
    return {"a": torch.randn(2, 2), "b": torch.randn(2), "running_mean": torch.randn(3)}


def test_clients_collect_the_largest_changes_of_a_peer_in_a_critical_period():
    whole = model()
    changed = [True, False, False, True, False, True]
    message = collected_part(published(whole, 7, changed, norm=2.5))
    assert message.numbers == {"n_samples": 7, "gradient_norm": 2.5}
    section = message.section("model")
    assert section.keys() == {"running_mean", MASK, VALUES}
    entries = torch.cat([whole["a"].flatten(), whole["b"]])
    assert torch.equal(section[VALUES], entries[torch.tensor(changed)])
    assert message.nbytes == 4 * 3 + 1 + 4 * 3 + 16
    calm = collected_part(published(whole, 7))
    assert same_bytes(calm.section("model"), whole)
    assert not calm.section("changed")


@pytest.mark.parametrize("partly", [(), (0,), (0, 1)])
def test_each_entry_is_averaged_over_the_peers_that_sent_it(partly):
    models, samples = [model() for _ in range(3)], [3, 5, 1]
    masks = [[True, False, True, False, False, False], [True, True, False, False, False, False]]
    own = published(models[0], samples[0], [True] * 3 + [False] * 3)  # a client has its own model completely
    peers = [
        Upload(j, collected_part(published(models[j + 1], samples[j + 1], masks[j] if j in partly else None)))
        for j in (0, 1)
    ]
    mixed = PeerCriticalFL().mix(own, peers)
    flat = [torch.cat([m["a"].flatten(), m["b"]]) for m in models]
    for e in range(P):
        who = [0, *[j + 1 for j in (0, 1) if j not in partly or masks[j][e]]]
        expected = sum(samples[k] * flat[k][e] for k in who) / sum(samples[k] for k in who)
        torch.testing.assert_close(torch.cat([mixed["a"].flatten(), mixed["b"]])[e], expected)
    mean = sum(n * m["running_mean"] for n, m in zip(samples, models, strict=True)) / sum(samples)
    torch.testing.assert_close(mixed["running_mean"], mean)


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """In a critical period on a ring: each peer provides the entries that changed most in its last round."""
    run = experiment(tmp_path, PeerCriticalFL(n_com=2, keep=KEEP, every=1, graph=Ring()), **UNEQUAL)
    run.load()
    local = copy.deepcopy(run.worker.template.backbone)
    heard = [(copy.deepcopy(local.state_dict()), {n: torch.ones_like(v) for n, v in local.state_dict().items()})] * 4
    sizes = [len(shard.train) for shard in run.data.shards]
    for round in range(1, 4):
        after = list(heard)
        for client in run.server.participants(round):
            start = {}
            for name, own in heard[client][0].items():
                total, weight = sizes[client] * own, torch.full_like(own, sizes[client])
                for j in ((client - 1) % 4, (client + 1) % 4):
                    model, changed = heard[j]
                    total, weight = total + sizes[j] * changed[name] * model[name], weight + sizes[j] * changed[name]
                start[name] = total / weight
            local.load_state_dict(start)
            cross_entropy_steps(local, steps_of(run, round, client))
            end = copy.deepcopy(local.state_dict())
            moves = {name: (value - start[name]).abs() for name, value in end.items()}
            threshold = float(np.quantile(torch.cat([m.flatten() for m in moves.values()]).numpy(), 1 - KEEP))
            after[client] = end, {name: (m >= threshold).double() for name, m in moves.items()}
        heard = after
    run.fit()
    assert_publications_equal_loop(run, {client: model for client, (model, _) in enumerate(heard)})


@in_float64
def test_a_round_equals_a_loop_by_hand(tmp_path):
    lr = 0.05
    options = {
        "scenario": digits(alpha=1.0),
        "clients_per_round": 6,
        "batch_size": 10_000,
        "trainer": {"accelerator": "cpu", "max_epochs": 2},
        "optimizer": partial(torch.optim.SGD, lr=lr),
    }
    algorithm = PeerCriticalFL(n_com=2, keep=KEEP, every=1, max_share=0.9)
    run = finished(tmp_path, algorithm, rounds=1, **options)
    client = 3
    before = publication(run.server.visible_state, client)
    assert before.numbers["peers"] == 4  # 2, doubled after each round, up to 0.9 of 6
    download = run.server.download(2, client)
    peers = unbundle(download)
    assert len(peers) == 4
    task = task_of_round(run, 2, client)
    start = run.worker.modules.receive(task).backbone.state_dict()
    result = run.worker.run(task)
    names = parameter_names(start)
    trained = result.upload.section("model")
    changes = torch.cat([(trained[name] - start[name]).flatten() for name in names]).abs().double()
    chosen = changes >= float(np.quantile(changes.numpy(), 1 - KEEP))
    assert torch.equal(result.upload.section("changed")["entries"], packed(chosen.numpy()))
    squares, network = [], run.worker.modules.receive(task).backbone
    x, y = samples_of(run, client)
    for _ in range(2):
        loss = torch.nn.functional.cross_entropy(network(x), y)
        gradients = torch.autograd.grad(loss, list(network.parameters()), retain_graph=True)
        squares.append(sum(float(g.square().sum()) for g in gradients))
        descend(network, loss, lr)
    assert result.upload.numbers["gradient_norm"] == pytest.approx(lr * sum(squares) / 2, rel=1e-9)
    norms = [result.upload.numbers["gradient_norm"], *[peer.message.numbers["gradient_norm"] for peer in peers]]
    seen = result.memory[DETECTOR]["norms"]
    assert float(seen[-1]) == pytest.approx(sum(norms) / 5, rel=1e-9)
    assert torch.equal(seen[:-1], run.memory[client][DETECTOR]["norms"][1:])
    assert int(result.memory[DETECTOR]["most"]) == 5


@pytest.mark.thorough
def test_outside_critical_periods_clients_collect_whole_models_of_fewer_peers(tmp_path):
    algorithm = PeerCriticalFL(n_com=1, every=1, sure=1, delta=1e9, max_share=1.0)
    run = finished(tmp_path, algorithm, rounds=3, clients_per_round=6)
    for client in range(6):
        assert not bool(run.memory[client][DETECTOR]["critical"])
        assert publication(run.server.visible_state, client).numbers["peers"] == 1
        assert not publication(run.server.visible_state, client).section("changed")
