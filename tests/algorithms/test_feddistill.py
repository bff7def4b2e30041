"""FedDistill's and FedDistill+'s formulas against brute force, and their identities (baselines: B7)."""

import copy
import math

import pytest
import torch
from experiments import UNEQUAL, descend, finished, full_batch, in_float64, samples_of
from loops import assert_equals_loop
from peers import mean_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedDistill, FedDistillPlus, LogitDistillation, MeanLogits
from fl_lightning.algorithms.personalized import feddistill as fd
from fl_lightning.client.loss_term import Step

pytestmark = pytest.mark.numeric

C = 4


def test_the_loss_is_the_batch_mean_of_kl_divergences():
    logits, teacher = torch.randn(6, C, requires_grad=True), torch.randn(C, C)
    targets, known = torch.tensor([0, 1, 2, 2, 3, 0]), torch.tensor([True, False, True, False])
    loss = fd.distillation_loss(logits, targets, teacher, known)
    total = 0.0
    for i, y in enumerate(targets.tolist()):
        if known[y]:
            p, q = teacher[y].softmax(dim=0).tolist(), logits[i].softmax(dim=0).tolist()
            total += sum(p[j] * math.log(p[j] / q[j]) for j in range(C))
    assert loss.item() == pytest.approx(total / 6, rel=1e-4)
    loss.backward()
    for i, y in enumerate(targets.tolist()):
        gap = logits[i].softmax(dim=0) - teacher[y].softmax(dim=0) if known[y] else torch.zeros(C)
        torch.testing.assert_close(logits.grad[i], gap.detach() / 6)


def test_the_term_is_gamma_times_the_loss_and_zero_without_knowledge():
    term, step = LogitDistillation(gamma=3.0), Step(torch.randn(2, C), torch.tensor([0, 3]))
    assert term(step) == 0
    assert not LogitDistillation(gamma=0.0).active  # skipped, not multiplied by zero
    teacher, known = torch.randn(C, C), torch.tensor([True, True, True, False])
    term.logits.load({"values": teacher, "known": known})
    torch.testing.assert_close(term(step), 3 * fd.distillation_loss(step.logits, step.targets, teacher, known))


def observed(piece, rounds, seed=0):
    """Let a client's knowledge observe some rounds. Return it and what it observed, as `(round, logits, targets)`."""
    generator, seen = torch.Generator().manual_seed(seed), []
    for round in range(rounds):
        if round:
            piece = MeanLogits(piece.cumulative) if not piece.cumulative else resumed(piece)
        for epoch in range(2):
            logits = torch.randn(5, C, generator=generator)
            targets = torch.randint(0, C - 1, (5,), generator=generator)
            piece.observe(Step(logits, targets), epoch)
            seen.append((round, logits, targets))
    return piece, seen


def resumed(piece):
    """Return the knowledge that the client has in its next round."""
    one, other = LogitDistillation(cumulative=True), LogitDistillation(cumulative=True)
    one.logits.tracked = piece.tracked
    other.recall(one.remember(None))
    return other.logits


@pytest.mark.parametrize("cumulative", [False, True])
def test_rows_are_mean_logits_of_the_round_or_of_all_rounds(cumulative):
    piece, seen = observed(MeanLogits(cumulative), rounds=3)
    sent = piece.summarize(None, [], C)
    counted = [(logits, targets) for round, logits, targets in seen if cumulative or round == 2]
    for c in range(C):
        rows = [z for logits, targets in counted for z, y in zip(logits, targets, strict=True) if y == c]
        count = len(rows) + 1 if cumulative else max(len(rows), 1)
        torch.testing.assert_close(sent["values"][c], sum(rows, torch.zeros(C)) / count)
        assert sent["known"][c] == (cumulative or len(rows) > 0)
    assert not sent["values"][C - 1].any()


def test_a_client_keeps_no_sums_by_default():
    term = LogitDistillation()
    term.logits.observe(Step(torch.randn(5, C), torch.arange(5) % C), 0)
    assert term.remember(None) == {}


# --- The methods ---


def by_hand(run, gamma, cumulative, plus):
    """Return the mean logits, the clients' models and, with `plus`, the shared model after full-batch rounds."""
    lr = 0.1
    start = copy.deepcopy(run.worker.template.backbone)
    models, sums, counts = {}, {}, {}
    teacher, known = torch.zeros(10, 10), torch.zeros(10, dtype=torch.bool)
    for round in range(1, run.rounds + 1):
        heard, participants = [], run.server.participants(round)
        for k in participants:
            x, y = samples_of(run, k)
            model = models[k] = copy.deepcopy(start) if plus else models.get(k, copy.deepcopy(start))
            if not cumulative or k not in sums:
                sums[k], counts[k] = torch.zeros(10, 10), torch.zeros(10)
            for _ in range(2):
                logits = model(x)
                log_q, log_p = logits.log_softmax(dim=1), teacher[y].log_softmax(dim=1)
                kl = (log_p.exp() * (log_p - log_q)).sum(dim=1)
                loss = F.cross_entropy(logits, y) + gamma * (kl * known[y]).mean()
                descend(model, loss, lr)
                for c in y.unique():
                    sums[k][c] += logits[y == c].sum(dim=0).detach()
                    counts[k][c] += int((y == c).sum())
            heard.append((sums[k].clone(), counts[k].clone()))
        for c in range(10):
            rows = [s[c] / (n[c] + 1) if cumulative else s[c] / n[c] for s, n in heard if cumulative or n[c]]
            if rows:
                teacher[c], known[c] = torch.stack(rows).mean(dim=0), True
        if plus:
            sizes = [len(run.data.shards[k].train) for k in participants]
            states = [models[k].state_dict() for k in participants]
            start.load_state_dict(mean_by_hand(states, sizes))
    return teacher, known, models, start


@pytest.mark.parametrize("cumulative", [False, True])
@pytest.mark.parametrize("kind", [FedDistill, FedDistillPlus])
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, kind, cumulative):
    run = finished(tmp_path, kind(gamma=2.0, cumulative=cumulative), **UNEQUAL | full_batch(0.1))
    teacher, known, models, shared = by_hand(run, 2.0, cumulative, plus=kind is FedDistillPlus)
    torch.testing.assert_close(run.state["mean_logits"]["values"], teacher, rtol=1e-9, atol=1e-9)
    assert torch.equal(run.state["mean_logits"]["known"], known)
    if kind is FedDistillPlus:
        assert_equals_loop(run, run.state["model"], shared.state_dict())
        assert all("personal" not in memory for memory in run.memory.values())
    else:
        for k, memory in run.memory.items():
            assert_equals_loop(run, memory["personal"], models[k].state_dict())
