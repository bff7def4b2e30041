"""FedNTD's distillation, and runs with it (Lee et al., NeurIPS 2022)."""

import copy

import pytest
import torch
from experiments import UNEQUAL, descend, experiment, in_float64
from loops import assert_equals_loop, rounds_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedNTD, NotTrueDistillation
from fl_lightning.algorithms.global_model.fedntd import not_true, not_true_distillation
from fl_lightning.client.loss_term import Step


def distillation_by_hand(logits, teacher, targets, tau):
    """Return the batch's mean of `τ² Σ_c q_g(c) log(q_g(c) / q(c))` over the classes that are not a sample's own."""
    total = 0.0
    for own, other, y in zip(logits, teacher, targets.tolist(), strict=True):
        q, q_g = ((torch.cat([v[:y], v[y + 1 :]]) / tau).exp() for v in (own, other))
        q, q_g = q / q.sum(), q_g / q_g.sum()
        total = total + tau**2 * (q_g * (q_g / q).log()).sum()
    return total / len(targets)


def test_the_true_class_is_left_out():
    logits = torch.arange(12.0).view(3, 4)
    assert not_true(logits, torch.tensor([0, 2, 3])).tolist() == [[1, 2, 3], [4, 5, 7], [8, 9, 10]]


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_the_loss_equals_a_brute_force_loop(tau):
    logits, teacher = torch.randn(2, 6, 5, dtype=torch.float64)
    targets = torch.tensor([0, 4, 2, 2, 1, 3])
    expected = distillation_by_hand(logits, teacher, targets, tau).item()
    assert not_true_distillation(logits, teacher, targets, tau).item() == pytest.approx(expected)


def test_the_loss_does_not_depend_on_the_logit_of_the_true_class():
    logits, teacher, targets = torch.randn(4, 3), torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    moved = logits + 5 * F.one_hot(targets, 3)
    assert torch.equal(*(not_true_distillation(one, teacher, targets, 1.0) for one in (logits, moved)))


def test_two_classes_leave_nothing_to_distil():
    assert not_true_distillation(torch.randn(3, 2), torch.randn(3, 2), torch.tensor([0, 1, 1]), 1.0).item() == 0


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    beta, tau = 0.6, 2.0
    run = experiment(tmp_path, FedNTD(beta=beta, tau=tau), **UNEQUAL)

    def train(local, client, batches):
        teacher = copy.deepcopy(local)
        for x, y in batches:
            logits = local(x)
            loss = distillation_by_hand(logits, teacher(x).detach(), y, tau)
            descend(local, F.cross_entropy(logits, y) + beta * loss, 0.2)

    expected, _ = rounds_by_hand(run, train)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)


def test_the_term_is_zero_outside_a_fit():
    step = Step(torch.randn(2, 3), torch.tensor([0, 1]), inputs=torch.randn(2, 4))
    assert NotTrueDistillation().eval()(step).item() == 0
