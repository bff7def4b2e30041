"""FedDW's equations against brute force, and its identities (spec: 2. FedDW)."""

import copy
from functools import partial

import pytest
import torch
from experiments import UNEQUAL, assert_near, descend, experiment, in_float64, samples_of
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, steps_of
from peers import mean_by_hand
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import DistillingWeights, FedAvg, FedDW, SoftLabels
from fl_lightning.algorithms.global_model import feddw as dw
from fl_lightning.client.knowledge import class_sums
from fl_lightning.client.loss_term import FitContext, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round
from fl_lightning.models import MLP, Head

pytestmark = pytest.mark.numeric

C = 5
BIAS_FREE = partial(MLP, hidden=(16,), head=Head(classifier="bias_free"))


def soft_labels(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).softmax(dim=-1)


def uploads(local, counts):
    sections = [{"soft_labels": {"values": v, "counts": n}} for v, n in zip(local, counts, strict=True)]
    return [Upload(k, Message.pack(section, n_samples=1)) for k, section in enumerate(sections)]


# --- Eq. 3, 4 and 7 ---


def test_eq3_is_the_product_of_every_pair_of_rows():
    weight = torch.randn(C, 7, dtype=torch.float64)
    for i in range(C):
        for j in range(C):
            assert dw.class_relations(weight)[i, j].item() == pytest.approx(float(weight[i] @ weight[j]), abs=1e-9)


def test_eq4_is_the_mean_softmax_of_each_class():
    logits, targets = torch.randn(30, C), torch.randint(0, C - 1, (30,))  # no client holds class C - 1
    matrix = dw.soft_label_matrix(*class_sums(logits.softmax(dim=1), targets, C))
    for i in range(C - 1):
        mean = torch.stack([F.softmax(logits[k], dim=0) for k in range(30) if targets[k] == i]).mean(dim=0)
        torch.testing.assert_close(matrix[i], mean)
    assert not matrix[C - 1].any()


@given(st.integers(1, 5), st.data())
def test_eq7_equals_a_brute_force_loop(clients, data):
    row = st.lists(st.integers(0, 4), min_size=C, max_size=C)
    counts = [data.draw(row) for _ in range(clients)]
    local, previous = soft_labels(clients, C, C), soft_labels(C, C, seed=1)
    merged = dw.merge_soft_labels(local, torch.tensor(counts), previous)
    for i in range(C):
        total = sum(counts[n][i] for n in range(clients))
        expected = previous[i] if not total else sum(counts[n][i] / total * local[n, i] for n in range(clients))
        torch.testing.assert_close(merged[i], expected)
    torch.testing.assert_close(merged.sum(dim=1), torch.ones(C))


def test_merged_counts_are_the_sums_over_the_clients():
    counts = torch.tensor([[1.0, 0, 4, 2, 0], [3, 5, 0, 2, 0]])
    merged = SoftLabels().merge(SoftLabels().initial(C), uploads(soft_labels(2, C, C), counts), Round(1, {}))
    assert merged["counts"].tolist() == [4, 5, 4, 4, 0]


def test_round_one_broadcasts_the_identity():
    assert torch.equal(SoftLabels().initial(C)["values"], torch.eye(C))


# --- Eq. 11 and 12 ---


def test_eq11_equals_a_brute_force_loop():
    omega, weight = soft_labels(C, C), torch.randn(C, 7)
    total = 0.0
    for i in range(C):
        exps = [torch.exp(weight[i] @ weight[j]).item() for j in range(C)]
        total += sum((omega[i, j].item() - exps[j] / sum(exps)) ** 2 for j in range(C))
    assert dw.consistency_loss(omega, weight).item() == pytest.approx(total / C**2, rel=1e-5, abs=1e-6)


@given(st.integers(2, 12), st.integers(1, 9), st.floats(0.01, 30.0), st.integers(0, 999))
def test_theorem_1_bounds_the_regulariser(classes, width, scale, seed):
    torch.manual_seed(seed)
    omega = (scale * torch.randn(classes, classes)).softmax(dim=1)
    loss = dw.consistency_loss(omega, scale * torch.randn(classes, width)).item()
    assert 0 <= loss < 2 / classes * (1 + 1e-6)


def test_the_gradient_touches_the_classification_layer_alone():
    backbone = BIAS_FREE(in_shape=(4,), num_classes=C)
    term = DistillingWeights(mu=1.0)
    term.load(soft_labels(C, C))
    term(ClientModule(backbone, [term]).step((torch.randn(3, 4), torch.tensor([0, 1, 2])))).backward()
    touched = {name for name, p in backbone.named_parameters() if p.grad is not None and p.grad.any()}
    assert touched == {"head.weight"}


# --- Eq. 26-30 ---


def test_the_surrogate_equals_the_term_without_softmax_at_its_anchor():
    omega, weight = soft_labels(C, C), torch.randn(C, 7)
    exact = (omega - weight @ weight.T).square().sum()
    torch.testing.assert_close(dw.linearized_consistency_loss(omega, weight, weight), exact)


def test_the_surrogate_has_the_terms_gradient_at_its_anchor_and_a_psd_hessian():
    omega, anchor = soft_labels(C, C).double(), torch.randn(C, 3, dtype=torch.float64)
    weight = anchor.clone().requires_grad_()
    (own,) = torch.autograd.grad(dw.linearized_consistency_loss(omega, weight, anchor), weight)
    (exact,) = torch.autograd.grad((omega - weight @ weight.T).square().sum(), weight)
    torch.testing.assert_close(own, exact)
    elsewhere = torch.randn(C, 3, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(
        lambda w: dw.linearized_consistency_loss(omega, w.view(C, 3), anchor), elsewhere.flatten()
    )
    assert torch.linalg.eigvalsh(hessian).min() > -1e-9


def test_the_anchor_is_updated_every_n_steps():
    omega, net = soft_labels(C, C), nn.Linear(4, C, bias=False)
    term = DistillingWeights(mu=2.0, linearize_every=2)
    term.load(omega)
    step = Step(torch.zeros(1, C), torch.tensor([0]), backbone=net)
    anchor = None
    for count in range(5):
        with torch.no_grad():
            net.weight += 0.1
        if count % 2 == 0:
            anchor = net.weight.detach().clone()
        expected, loss = 2.0 * dw.linearized_consistency_loss(omega, net.weight, anchor), term(step)
        torch.testing.assert_close(loss, expected)
        gradients = [torch.autograd.grad(value, net.weight) for value in (loss, expected)]
        torch.testing.assert_close(*gradients)  # the anchor has none


def test_a_fit_starts_with_a_new_anchor():
    omega, net = soft_labels(C, C), nn.Linear(4, C, bias=False)
    term = DistillingWeights(mu=1.0, linearize_every=3)
    term.load(omega)
    module, step = ClientModule(net, [term]), Step(torch.zeros(1, C), torch.tensor([0]), backbone=net)
    for _ in range(2):
        term.begin(module)
        with torch.no_grad():
            net.weight += 0.5
        torch.testing.assert_close(term(step), dw.linearized_consistency_loss(omega, net.weight, net.weight))


# --- The method ---


def test_a_bias_is_dropped_refused_or_kept():
    def model():
        return MLP(in_shape=(4,), num_classes=3)

    assert FedDW().client_module(model()).backbone.head.bias is None
    assert FedDW(preset="reference").client_module(model()).backbone.head.bias is not None
    with pytest.raises(ConfigError, match=r"^model.head.classifier: .*bias_free"):
        FedDW(drop_bias=False).client_module(model())
    with pytest.raises(ConfigError, match=r"DistillingWeights .* bias"):
        FedAvg(loss_terms=[DistillingWeights()]).client_module(model()).on_fit_start()


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """In rounds 2 and 3, no participant has class 1 or 6. Its row is kept."""
    mu = 30.0
    run = experiment(tmp_path, FedDW(mu=mu), seed=1, **UNEQUAL)
    run.load()
    model, omega = copy.deepcopy(run.worker.template.backbone), torch.eye(10)
    for round in range(1, 4):
        ends, sizes, outputs = [], [], {}
        for client in run.server.participants(round):
            local = copy.deepcopy(model)
            for x, y in steps_of(run, round, client):
                relations = (local.head.weight @ local.head.weight.T).softmax(dim=1)
                loss = F.cross_entropy(local(x), y) + mu * (relations - omega).square().sum() / 100
                descend(local, loss, 0.2)
            x, y = samples_of(run, client)
            for label, output in zip(y.tolist(), local(x).detach().softmax(dim=1), strict=True):
                outputs.setdefault(label, []).append(output)
            ends.append(local.state_dict())
            sizes.append(len(y))
        assert set(range(10)) - outputs.keys() == [set(), {1}, {6}][round - 1]
        for label, rows in outputs.items():
            omega[label] = sum(rows) / len(rows)
        model.load_state_dict(mean_by_hand(ends, sizes))
    assert local.head.bias is None
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    assert_near(run.state["soft_labels"] | {"values": omega}, run.state["soft_labels"])


@in_float64
def test_soft_labels_of_a_run_are_eq7_of_its_trained_clients(tmp_path):
    run = experiment(tmp_path, FedDW(), rounds=1)
    sums, counts = torch.zeros(10, 10), torch.zeros(10)
    upload = run.algorithm.upload

    def watch(module, batches, n, c):
        assert not module.training
        x, y = (torch.cat(part) for part in zip(*batches, strict=True))
        for i in y.unique().tolist():
            sums[i] += module(x[y == i]).softmax(dim=1).sum(dim=0)
            counts[i] += int((y == i).sum())
        return upload(module, [(x, y)], n, c)

    run.algorithm.upload = watch
    run.fit()
    assert (counts > 0).all()
    torch.testing.assert_close(run.state["soft_labels"]["values"], sums / counts[:, None], rtol=1e-9, atol=1e-9)


# --- preset: reference ---

NEVER, ONLY_IN_2 = 0, 1
HELD = [  # a round a row: the classes that each of its participants holds
    [{2, 3}, {3, 4}],
    [{1, 2}, {1, 4}, {2}],
    [{3}],
    [{2, 4}, {2, 3}],
    [{4}, {3}, {3, 4}],
]


def reference_by_hand(rounds):
    """Return `Ω` after each round: the mean of the old one and the average over all uploads so far."""
    heard, omega, states = [], [[float(i == j) for j in range(C)] for i in range(C)], []
    for uploaded in rounds:
        heard += uploaded
        for i in range(C):
            total = sum(counts[i] for _, counts in heard)
            for j in range(C):
                new = float(i == j)
                if total:
                    new = sum(counts[i] * values[i][j] for values, counts in heard) / total
                omega[i][j] = 0.5 * new + 0.5 * omega[i][j]
        states.append(torch.tensor(omega))
    return states


def test_reference_averages_over_all_rounds_and_with_the_old_matrix():
    piece, rounds = SoftLabels(reference=True), []
    for r, clients in enumerate(HELD):
        local = soft_labels(len(clients), C, C, seed=r)
        counts = torch.tensor(
            [[(3 * r + k + i) % 7 + 1 if i in held else 0 for i in range(C)] for k, held in enumerate(clients)]
        )
        local = torch.where((counts > 0)[:, :, None], local, 0.0)
        rounds.append((local, counts.float()))
    expected = reference_by_hand([list(zip(v.tolist(), n.tolist(), strict=True)) for v, n in rounds])
    state = piece.initial(C)
    for (local, counts), omega in zip(rounds, expected, strict=True):
        state = piece.merge(state, uploads(local, counts), Round(1, {}))
        torch.testing.assert_close(state["values"], omega)
        torch.testing.assert_close(state["values"].sum(dim=1), torch.ones(C))
    assert torch.equal(state["values"][NEVER], torch.eye(C)[NEVER])
    seen = sum(n[:, ONLY_IN_2] @ v[:, ONLY_IN_2] for v, n in rounds) / rounds[1][1][:, ONLY_IN_2].sum()
    torch.testing.assert_close(state["values"][ONLY_IN_2], seen + (torch.eye(C)[ONLY_IN_2] - seen) / 2**4)


def test_reference_divides_mu_by_ten_in_every_ninth_round():
    module = FedDW(mu=3.0, preset="reference").client_module(MLP(in_shape=(4,), num_classes=3))
    (term,) = module.terms()
    expected = {1: 3.0, 8: 3.0, 9: 0.3, 10: 0.3, 17: 0.3, 18: 0.03, 26: 0.03, 27: 0.003}
    for round, mu in expected.items():
        module.context = FitContext(round=round)
        term.begin(module)
        assert term.round_mu == pytest.approx(mu), round
    weight = module.backbone.head.weight.detach()
    relations = weight @ weight.T
    losses = {
        None: (relations.softmax(dim=1) - torch.eye(3)).square().mean(),
        1: (relations - torch.eye(3)).square().sum(),
    }
    for every, loss in losses.items():
        term = DistillingWeights(3.0, every, reference=True, allow_bias=True)
        term.load(torch.eye(3))
        term.begin(module)  # of round 27
        found = term(Step(torch.zeros(1, 3), torch.tensor([0]), backbone=module.backbone))
        assert found.item() == pytest.approx(0.003 * loss.item(), rel=1e-5)
    paper = FedDW(mu=3.0).client_module(MLP(in_shape=(4,), num_classes=3))
    (term,), paper.context = paper.terms(), FitContext(round=27)
    term.begin(paper)
    assert term.round_mu == 3.0
