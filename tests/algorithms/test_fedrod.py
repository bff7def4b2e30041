"""FedROD: its balanced loss, and two heads on one encoder (Chen and Chao, ICLR 2022)."""

import copy

import pytest
import torch
from experiments import UNEQUAL, descend, experiment, in_float64, samples_of
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import BalancedSoftmax, FedROD
from fl_lightning.client.loss_term import Step


def balanced_by_hand(logits, targets, counts):
    """Return the mean of `-log(n_y exp(l_y) / Σ_c n_c exp(l_c))`, sample by sample."""
    total = 0.0
    for row, y in zip(logits, targets.tolist(), strict=True):
        total = total - (counts[y] * row[y].exp() / sum(n * v.exp() for n, v in zip(counts, row, strict=True))).log()
    return total / len(targets)


def test_the_balanced_loss_equals_a_brute_force_loop():
    logits, targets, counts = torch.randn(5, 4, dtype=torch.float64), torch.tensor([0, 2, 2, 3, 0]), [7, 0, 2, 1]
    term = BalancedSoftmax()
    term.counts = torch.tensor(counts)
    assert term(Step(logits, targets)).item() == pytest.approx(balanced_by_hand(logits, targets, counts).item())


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedROD(), **UNEQUAL)
    run.load()
    model = copy.deepcopy(run.worker.template.backbone)
    heads = {k: copy.deepcopy(model.head) for k in range(4)}
    for round in range(1, 4):
        ends, sizes = [], []
        for client in run.server.participants(round):
            local, own = copy.deepcopy(model), heads[client]
            labels = run.data.data.y_train[run.data.shards[client].train].tolist()
            counts = [labels.count(c) for c in range(10)]
            for x, y in steps_of(run, round, client):
                z = local.encoder(x)
                both = local.head(z).detach() + own(z.detach())
                shared = balanced_by_hand(local.head(z), y, counts)
                descend(local, shared, 0.2)
                descend(own, F.cross_entropy(both, y), 0.2)
            ends.append(local.state_dict())
            sizes.append(len(labels))
        mean = {n: sum(s * e[n] for s, e in zip(sizes, ends, strict=True)) / sum(sizes) for n in ends[0]}
        model.load_state_dict(mean)
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    for client in run.memory:
        assert_equals_loop(run, run.memory[client]["personal_head"], heads[client].state_dict())
        x = samples_of(run, client, "test")[0].double()
        z = model.encoder(x)
        expected = model.head(z) + heads[client](z)
        torch.testing.assert_close(run.client_module(client).eval()(x), expected, rtol=1e-10, atol=1e-10)
    assert "client/train_personal" in run.csv.rows[0]
    assert "global/acc" in run.csv.rows[0]
