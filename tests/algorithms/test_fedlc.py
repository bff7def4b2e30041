"""FedLC's calibrated cross-entropy, and runs with it (Zhang et al., ICML 2022)."""

import math

import pytest
import torch
from experiments import UNEQUAL, descend, experiment, in_float64
from loops import assert_equals_loop, rounds_by_hand

from fl_lightning.algorithms import CalibratedLoss, FedLC
from fl_lightning.client.loss_term import Step


def loss_by_hand(logits, targets, counts, tau):
    """Return the calibrated cross-entropy, sample by sample."""
    total = 0.0
    for row, y in zip(logits, targets.tolist(), strict=True):
        held = [c for c, n in enumerate(counts) if n]
        shifted = {c: row[c] - tau / counts[c] ** 0.25 for c in held}
        total = total - shifted[y] + sum(value.exp() for value in shifted.values()).log()
    return total / len(targets)


def test_the_loss_equals_a_brute_force_loop():
    logits, counts = torch.randn(7, 4, dtype=torch.float64), [16, 0, 81, 1]
    targets = torch.tensor([0, 2, 3, 0, 2, 2, 3])
    term = CalibratedLoss(0.7)
    term.counts = torch.tensor(counts)
    assert term(Step(logits, targets)).item() == pytest.approx(loss_by_hand(logits, targets, counts, 0.7).item())


def test_a_class_without_samples_has_no_gradient():
    logits = torch.randn(3, 3, requires_grad=True)
    term = CalibratedLoss(1.0)
    term.counts = torch.tensor([5, 0, 2])
    term(Step(logits, torch.tensor([0, 2, 0]))).backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[:, 1].any()


def test_the_rarer_class_needs_the_larger_margin():
    """At logits of equal loss, the logit of a class with one sample exceeds that of one with 16 by τ/2."""
    term = CalibratedLoss(2.0)
    term.counts = torch.tensor([16, 1])
    even = Step(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))
    assert term(even).item() == pytest.approx(math.log(2))


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedLC(tau=0.8), **UNEQUAL)

    def train(local, client, batches):
        labels = run.data.data.y_train[run.data.shards[client].train].tolist()
        counts = [labels.count(c) for c in range(10)]
        for x, y in batches:
            descend(local, loss_by_hand(local(x), y, counts, 0.8), 0.2)

    expected, _ = rounds_by_hand(run, train)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)
    assert "client/train_calibrated_loss" in run.csv.rows[0]
    assert "client/train_ce" not in run.csv.rows[0]
