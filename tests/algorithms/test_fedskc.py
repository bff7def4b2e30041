"""FedSKC's equations against brute force, and its identities (spec: 1. FedSKC)."""

import copy
import math

import pytest
import torch
from aggregation import aggregate, finish
from experiments import UNEQUAL, descend, experiment, in_float64, samples_of
from hypothesis import given, settings
from hypothesis import strategies as st
from loops import assert_equals_loop, steps_of
from peers import mean_by_hand
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import (
    ClassWise,
    FedSKC,
    GlobalDiscrepancy,
    GlobalPeriodReview,
    LocalContrastive,
    LookAhead,
    ReferenceKnowledge,
    ServerMomentum,
    StructuralKnowledge,
)
from fl_lightning.algorithms.global_model.fedskc.aggregation import (
    aggregation_weights,
    discrepancy,
    known_in_each_round,
    review_ratio,
)
from fl_lightning.algorithms.global_model.fedskc.contrastive_loss import (
    ReferenceContrast,
    local_contrastive_loss,
    reference_contrastive_loss,
)
from fl_lightning.algorithms.global_model.fedskc.knowledge import global_knowledge, local_knowledge
from fl_lightning.client.knowledge import class_sums
from fl_lightning.client.loss_term import FitContext, Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round

pytestmark = pytest.mark.numeric

C = 5


def knowledge(clients, seed=0, holders=None):
    generator = torch.Generator().manual_seed(seed)
    local = torch.randn(clients, C, C, generator=generator)
    held = torch.ones(clients, C, dtype=torch.bool) if holders is None else torch.tensor(holders)
    return local * held[:, :, None], held


def upload(client, model, values, known, n):
    return Upload(client, Message.pack({"model": model, "structural": {"values": values, "known": known}}, n_samples=n))


# --- Section III-A and Eq. 1 ---


def test_local_knowledge_is_silu_of_the_class_means():
    logits, targets = torch.randn(40, C), torch.randint(0, C - 1, (40,))  # no client holds class C - 1
    sums, counts = class_sums(logits, targets, C)
    result = local_knowledge(sums, counts)
    for j in range(C - 1):
        mean = logits[targets == j].mean(dim=0)
        torch.testing.assert_close(result[j], mean / (1 + torch.exp(-mean)))
    assert not result[C - 1].any()
    assert counts.tolist() == [int((targets == j).sum()) for j in range(C)]


def brute_force_global(local, held, m):
    clients, merged, known = len(local), [[0.0] * C for _ in range(C)], [False] * C
    for j in range(C):
        holders = [k for k in range(clients) if held[k, j]]
        known[j] = bool(holders)
        for k1 in holders:
            others = sorted((math.dist(local[k1, j].tolist(), local[k, j].tolist()), k) for k in holders if k != k1)
            group = [k1] + [k for _, k in others[: min(m, len(holders) - 1)]]
            for c in range(C):
                merged[j][c] += sum(float(local[k, j, c]) for k in group) / len(group) / len(holders)
    return torch.tensor(merged), known


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 1000), st.data())
def test_eq1_equals_a_brute_force_loop(clients, m, seed, data):
    row = st.lists(st.booleans(), min_size=C, max_size=C)
    local, held = knowledge(clients, seed, [data.draw(row) for _ in range(clients)])
    merged, known = global_knowledge(local, held, m)
    expected, expected_known = brute_force_global(local, held, m)
    torch.testing.assert_close(merged, expected, rtol=1e-5, atol=1e-6)
    assert known.tolist() == expected_known


def test_a_class_without_holders_keeps_its_last_knowledge():
    piece = StructuralKnowledge()
    previous = {"values": torch.randn(C, C), "known": torch.tensor([True] * (C - 1) + [False])}
    local, held = knowledge(2, holders=[[False, True, True, True, False]] * 2)
    merged = piece.merge(previous, [upload(k, {}, local[k], held[k], 1) for k in range(2)], Round(1, {}))
    assert torch.equal(merged["values"][0], previous["values"][0])
    assert not torch.equal(merged["values"][1], previous["values"][1])
    assert merged["known"].tolist() == [True] * (C - 1) + [False]
    forgetful = ReferenceKnowledge().merge(previous, [upload(0, {}, local[0], held[0], 1)], Round(1, {}))
    assert forgetful["known"].tolist() == held[0].tolist()


# --- Eq. 2 and 3: LCL ---


def brute_force_lcl(logits, targets, values, known, tau, spread="batch"):
    total = 0.0
    for i, y in enumerate(targets.tolist()):
        if not known[y]:
            continue
        scores = {}
        for j in range(C):
            if known[j]:
                u = sum(math.dist(row.tolist(), values[j].tolist()) for row in logits) / len(logits)
                dot = float(logits[i] @ values[j])
                cosine = dot / (float(logits[i].norm()) * float(values[j].norm()))
                scores[j] = cosine / (u if spread == "batch" else 1) / tau
        total -= math.log(math.exp(scores[y]) / sum(map(math.exp, scores.values())))
    return total / len(targets)


@pytest.mark.parametrize("spread", ["batch", "none"])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), known=st.lists(st.booleans(), min_size=C, max_size=C))
def test_lcl_equals_a_brute_force_loop(spread, seed, known):
    torch.manual_seed(seed)
    logits, values = torch.randn(7, C, dtype=torch.float64), torch.randn(C, C, dtype=torch.float64)
    targets, known = torch.randint(0, C, (7,)), torch.tensor(known)
    loss = local_contrastive_loss(logits, targets, values, known, 0.5, spread)
    expected = brute_force_lcl(logits, targets, values, known, 0.5, spread)
    assert float(loss) == pytest.approx(expected, rel=1e-9, abs=1e-12)
    term = LocalContrastive(0.5, spread=spread)
    term.load(values, known)
    assert float(term(Step(logits, targets))) == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_lcl_gradient_treats_the_spread_as_a_constant():
    torch.manual_seed(0)
    logits = torch.randn(4, C, dtype=torch.float64, requires_grad=True)
    values, targets = torch.randn(C, C, dtype=torch.float64), torch.arange(4)
    known = torch.ones(C, dtype=torch.bool)
    local_contrastive_loss(logits, targets, values, known, 0.3).backward()
    spread = torch.stack([(logits.detach() - v).norm(dim=1).mean() for v in values])
    copy = logits.detach().clone().requires_grad_()
    cosines = torch.stack([F.cosine_similarity(copy, v[None], dim=1) for v in values], dim=1)
    F.cross_entropy(cosines / spread / 0.3, targets).backward()
    torch.testing.assert_close(logits.grad, copy.grad)


@pytest.mark.parametrize("spread", ["batch", "none"])
def test_a_mask_of_all_classes_equals_no_mask(spread):
    generator = torch.Generator().manual_seed(3)
    logits, values = torch.randn(7, C, generator=generator), torch.randn(C, C, generator=generator)
    targets, known = torch.arange(7) % C, torch.ones(C, dtype=torch.bool)
    one, other = (local_contrastive_loss(logits, targets, values, k, 0.3, spread) for k in (known, None))
    torch.testing.assert_close(one, other)


def test_knowledge_loaded_during_a_fit_is_used():
    term = LocalContrastive()
    module = ClientModule(nn.Linear(2, C), [term])
    step = Step(logits=torch.randn(5, C, generator=torch.Generator().manual_seed(0)), targets=torch.arange(5) % C)
    term.load(torch.eye(C), torch.ones(C, dtype=torch.bool))
    term.begin(module)
    known = torch.arange(C) < 2
    term.load(torch.eye(C), known)
    expected = local_contrastive_loss(step.logits, step.targets, torch.eye(C), known, term.tau)
    assert torch.equal(term(step), expected)


@pytest.mark.parametrize("form", [{}, {"spread": "none"}, {"reference": True}], ids=str)
@pytest.mark.parametrize("case", ["zero logits", "zero knowledge", "equal", "one sample", "cold", "nothing known"])
def test_lcl_is_finite_in_edge_cases(case, form):
    logits, values = torch.randn(6, C), torch.randn(C, C)
    known, tau = torch.ones(C, dtype=torch.bool), 0.08
    if case == "zero logits":
        logits = torch.zeros(6, C)
    elif case == "zero knowledge":
        values = torch.zeros(C, C)
    elif case == "equal":
        values = logits[:1].expand(C, C).clone()
    elif case == "one sample":
        logits = logits[:1]
    elif case == "cold":
        tau = 1e-4
    else:
        known = torch.zeros(C, dtype=torch.bool)
    logits.requires_grad_()
    term = LocalContrastive(tau, **form)
    term.load(values, known)
    loss = term(Step(logits, torch.arange(len(logits)) % C))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logits.grad).all()
    if case == "nothing known" and "reference" not in form:
        assert loss == 0
        assert not logits.grad.any()


def test_lcl_runs_in_float32_under_mixed_precision():
    term = LocalContrastive()
    term.load(torch.randn(C, C), torch.ones(C, dtype=torch.bool))
    logits, targets = torch.randn(8, C), torch.randint(0, C, (8,))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = term(Step(logits, targets))
    assert mixed.dtype == torch.float32
    assert mixed == term(Step(logits, targets))


def test_lcl_is_off_without_knowledge():
    module = FedSKC().client_module(nn.Linear(3, C))
    (term,) = module.terms()
    term.structural.load(term.structural.initial(C))
    term.begin(module)
    assert list(module.losses(Step(torch.randn(2, C), torch.tensor([0, 1])))) == ["ce"]
    term.load(torch.randn(C, C), torch.ones(C, dtype=torch.bool))
    term.begin(module)
    assert list(module.losses(Step(torch.randn(2, C), torch.tensor([0, 1])))) == ["ce", "lcl"]


# --- Eq. 4: GDA ---


def test_eq4_equals_a_brute_force_loop():
    d, n = [0.3, 1.7, 0.9], [3, 1, 2]
    gates = [1 / (1 + math.exp(-(n[k] - d[k] / sum(d) * d[k] + n[k] / sum(n)))) for k in range(3)]
    expected = [gate / sum(gates) for gate in gates]
    assert aggregation_weights(torch.tensor(d), torch.tensor(n)).tolist() == pytest.approx(expected, rel=1e-6)
    shares = [3 * n[k] / sum(n) for k in range(3)]
    gates = [1 / (1 + math.exp(-(shares[k] - d[k] / sum(d) * d[k] + n[k] / sum(n)))) for k in range(3)]
    expected = [gate / sum(gates) for gate in gates]
    assert aggregation_weights(torch.tensor(d), torch.tensor(n), "share").tolist() == pytest.approx(expected, rel=1e-6)


def test_discrepancy_is_over_the_classes_a_client_holds():
    local, held = knowledge(2, holders=[[True, False, True, False, True], [False] * C])
    merged = torch.randn(C, C)
    total = sum(math.dist(local[0, j].tolist(), merged[j].tolist()) for j in (0, 2, 4))
    assert discrepancy(local, held, merged).tolist() == pytest.approx([total, 0.0])
    assert discrepancy(local, held, merged, "share").tolist() == pytest.approx([total / 3, 0.0])


def test_sample_counts_saturate_the_sigmoid_and_shares_do_not():
    d, n = torch.tensor([0.5, 6.0]), torch.tensor([2500, 2400])
    assert aggregation_weights(d, n).tolist() == [0.5, 0.5]
    near, far = aggregation_weights(d, n, "share").tolist()
    assert near > 0.9 > 0.1 > far


def test_gda_averages_every_floating_point_entry_by_eq4():
    local, held = knowledge(3)
    models = [{"w": torch.randn(2), "mean": torch.randn(1), "steps": torch.tensor(k)} for k in (4, 9, 6)]
    uploads = [upload(k, models[k], local[k], held[k], 2 + k) for k in range(3)]
    aggregator = GlobalDiscrepancy(gda_scale="share")
    merged = aggregator.structural.merge(aggregator.structural.initial(C), uploads, Round(1, {}))
    result = finish(aggregator, uploads, {}, {"structural": merged})["model"]
    gates = []
    for k in range(3):
        distances = [
            [math.dist(local[i, j].tolist(), merged["values"][j].tolist()) for j in range(C)] for i in range(3)
        ]
        d = [sum(row) / C for row in distances]
        gates.append(1 / (1 + math.exp(-((2 + k) / 3 - d[k] / sum(d) * d[k] + (2 + k) / 9))))
    e = [gate / sum(gates) for gate in gates]
    for name in ("w", "mean"):
        torch.testing.assert_close(result[name], sum(e[k] * models[k][name] for k in range(3)))
    assert result["steps"] == 9


# --- Eq. 5: GPR ---


def variances(values, known, unbiased=False):
    """Return Σ_j σ²_j over the known classes, in plain Python."""
    total = 0.0
    for row in (row for row, is_known in zip(values.tolist(), known, strict=True) if is_known):
        mean = sum(row) / C
        total += sum((value - mean) ** 2 for value in row) / (C - unbiased)
    return total


@pytest.mark.parametrize("unbiased", [False, True])
def test_review_ratio_equals_a_brute_force_loop_with_either_variance(unbiased):
    now, before = torch.randn(4, C), torch.randn(3, C)
    earlier = variances(before, [True] * 3, unbiased)
    expected = (variances(now, [True] * 4, unbiased) - earlier) / earlier
    assert review_ratio(now, before) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_the_review_ratio_of_constant_knowledge_is_zero():
    assert review_ratio(torch.randn(C, C), torch.ones(C, C)) == 0.0


MEAN, LAST = torch.tensor([2.0, 1.0]), torch.tensor([10.0, 20.0])


def reviewed(review, beta, growth=2.0, before_known=True):
    """Return the reviewed mean of two clients, if the variance of knowledge grew by the factor `growth`."""
    local, held = knowledge(1, seed=1)
    local, held = local.repeat(2, 1, 1), held.repeat(2, 1)
    last = {"values": local[0] / growth**0.5, "known": torch.full((C,), before_known)}
    models = [{"w": torch.tensor([1.0, -2.0])}, {"w": torch.tensor([3.0, 4.0])}]
    uploads = [upload(k, models[k], local[k], held[k], 1) for k in range(2)]
    aggregator = GlobalPeriodReview(beta=beta, review=review)
    merged = aggregator.structural.merge(last, uploads, Round(1, {}))
    before = {"model": {"w": LAST}, "structural": last}
    return finish(aggregator, uploads, before, {"structural": merged})["model"]["w"]


@pytest.mark.parametrize("growth", [0.25, 1.0, 3.0, 60.0])  # ratios -0.75, 0, 2 and 59
def test_eq5_as_printed(growth):
    expected = 0.9 * MEAN + 0.1 * (growth - 1) * (LAST - MEAN)
    torch.testing.assert_close(reviewed("literal", 0.9, growth), expected)


@pytest.mark.parametrize(("growth", "c"), [(0.25, 0.0), (1.0, 0.0), (3.0, 0.2), (7.0, 0.6), (11.0, 1.0), (60.0, 1.0)])
def test_interpolation_stays_between_the_two_models(growth, c):
    torch.testing.assert_close(reviewed("interpolation", 0.9, growth), MEAN + c * (LAST - MEAN), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("review", ["interpolation", "literal"])
def test_the_review_starts_in_the_second_round_with_knowledge(review):
    assert torch.equal(reviewed(review, 0.5, before_known=False), MEAN)


# --- The method ---


def shared_knowledge(rows):
    """Return Eq. 1 with M = 1 of one class's knowledge on each of its clients."""
    merged = []
    for k, row in enumerate(rows):
        others = [other for j, other in enumerate(rows) if j != k]
        nearest = min(others, key=lambda other: float((row - other).norm()), default=row)
        merged.append((row + nearest) / 2)
    return sum(merged) / len(merged)


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """No participant of round 1 has class 0."""
    tau, beta = 0.3, 0.5
    run = experiment(tmp_path, FedSKC(tau=tau, beta=beta, gda_scale="share"), seed=2, **UNEQUAL)
    run.load()
    model, known, reviews = copy.deepcopy(run.worker.template.backbone), {}, []
    for round in range(1, 4):
        ends, heard, sizes = [], [], []
        for client in run.server.participants(round):
            local, classes = copy.deepcopy(model), list(known)
            for x, y in steps_of(run, round, client):
                logits = local(x)
                loss = F.cross_entropy(logits, y)
                if known:
                    columns = [
                        F.cosine_similarity(logits, row, dim=1) / (logits.detach() - row).norm(dim=1).mean()
                        for row in known.values()
                    ]
                    log_p = (torch.stack(columns, dim=1) / tau).log_softmax(dim=1)
                    rows = [(i, classes.index(j)) for i, j in enumerate(y.tolist()) if j in known]
                    loss = loss - sum(log_p[i, j] for i, j in rows) / len(y)
                descend(local, loss, 0.2)
            x, y = samples_of(run, client)
            means = {j: local(x[y == j]).mean(dim=0).detach() for j in y.unique().tolist()}
            heard.append({j: mean / (1 + (-mean).exp()) for j, mean in means.items()})
            ends.append(local.state_dict())
            sizes.append(len(y))
        held = sorted({j for rows in heard for j in rows})
        now = known | {j: shared_knowledge([rows[j] for rows in heard if j in rows]) for j in held}
        gaps = [sum(float((row - now[j]).norm()) for j, row in rows.items()) / len(rows) for rows in heard]
        shares = [size / sum(sizes) for size in sizes]
        gates = [torch.tensor(4 * n - gap**2 / sum(gaps)).sigmoid() for n, gap in zip(shares, gaps, strict=True)]
        merged = mean_by_hand(ends, [float(gate) for gate in gates])
        if known:
            after, before = (sum(float(rows[j].var(correction=0)) for j in known) for rows in (now, known))
            reviews.append(min(max((1 - beta) * (after - before) / before, 0.0), 1.0))
            last = model.state_dict()
            merged = {name: value + reviews[-1] * (last[name] - value) for name, value in merged.items()}
        assert len(now) - len(known) == [9, 1, 0][round - 1]
        known = now
        model.load_state_dict(merged)
    assert 0 < max(reviews) < 1
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())


@pytest.mark.parametrize("preset", ["paper", "reference"])
def test_options_reach_the_parts(preset):
    method = FedSKC(
        tau=0.3, similar_clients=2, beta=0.7, gda_scale="share", spread="none", review="literal", preset=preset
    )
    (term,) = method.loss_terms
    assert (term.tau, term.structural.similar_clients) == (0.3, 2)
    assert preset == "reference" or term.contrast.spread == "none"
    assert (method.aggregator.beta, method.aggregator.review) == (0.7, "literal")
    assert preset == "reference" or method.aggregator.inner.gda_scale == "share"


# --- preset: reference ---


def test_reference_lcl_equals_a_brute_force_loop():
    torch.manual_seed(1)
    logits, values, targets = torch.randn(6, C), torch.randn(C, C), torch.tensor([0, 1, 2, 3, 4, 0])
    known = torch.tensor([True, True, True, True, False])
    total = 0.0
    for i, y in enumerate(targets.tolist()):
        cosines = [float(F.cosine_similarity(logits[i], values[j], dim=0)) for j in range(C)]
        positive = cosines[y] if known[y] else 1.0
        negatives = [math.exp(cosines[j] / 0.1) for j in range(C) if known[j]]
        total -= math.log(math.exp(positive / 0.1) / (math.exp(positive / 0.1) + sum(negatives)))
    loss = reference_contrastive_loss(logits, targets, values, known, 0.1)
    assert float(loss) == pytest.approx(total / 6, rel=1e-5, abs=1e-6)


def test_reference_scales_lcl_by_the_round():
    term = LocalContrastive(reference=True)
    term.load(torch.randn(C, C), torch.ones(C, dtype=torch.bool))
    step = Step(torch.randn(3, C), torch.arange(3))
    module = ClientModule(nn.Linear(3, C), [term])
    losses = []
    for round in (25, 100, 180):
        module.context = FitContext(round=round)
        term.begin(module)
        losses.append(float(term(step)))
    assert losses[0] == pytest.approx(losses[1] / 4)
    assert losses[1] == losses[2]


def test_the_reference_term_leaves_out_unknown_classes():
    term, known = LocalContrastive(reference=True), torch.arange(C) < 3
    step = Step(torch.randn(6, C), torch.arange(6) % C)
    term.load(torch.eye(C), known)
    expected = reference_contrastive_loss(step.logits, step.targets, torch.eye(C), known, term.tau)
    assert torch.equal(term(step), expected)


def test_reference_knowledge_is_the_last_epochs_training_logits():
    piece = ReferenceKnowledge()
    batches = [(epoch, torch.randn(4, C), torch.tensor([0, 1, 1, 3])) for epoch in (0, 0, 1, 1)]
    for epoch, logits, targets in batches:
        piece.observe(Step(logits, targets), epoch)
    summary = piece.summarize(None, [], C)
    logits, targets = torch.cat([batch[1] for batch in batches[2:]]), torch.cat([batch[2] for batch in batches[2:]])
    for j in (0, 1, 3):
        torch.testing.assert_close(summary["values"][j], logits[targets == j].mean(dim=0))
    assert summary["known"].tolist() == [True, True, False, True, False]


def test_the_reference_preset_uses_the_parts_of_the_authors_code():
    method = FedSKC(preset="reference")
    (term,) = method.loss_terms
    review = method.aggregator
    assert isinstance(term.contrast, ReferenceContrast)
    assert isinstance(term.structural, ReferenceKnowledge)
    assert isinstance(review, GlobalPeriodReview)
    assert (review.beta, review.review, review.compared) == (0.99, "literal", known_in_each_round)
    assert type(review.inner).__name__ == "WeightedMean"
    assert FedSKC(preset="reference", beta=0.9).aggregator.beta == 0.9
    assert FedSKC().aggregator.beta == 0.95


def test_reference_server_over_rounds_whose_classes_change():
    """Weights and knowledge of four rounds against plain loops that follow the authors' code."""
    method = FedSKC(preset="reference", similar_clients=1)
    holders = [  # by round and client; class 4 comes and goes, class 0 is missing in round 3
        [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 1, 0, 1]],
        [[1, 0, 0, 1, 0], [1, 1, 0, 0, 0], [0, 1, 1, 0, 0]],
        [[0, 1, 0, 1, 0], [0, 1, 1, 0, 1], [0, 0, 1, 1, 1]],
        [[1, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 1, 0, 1, 0]],
    ]
    samples = [7, 2, 4]
    initial = {"w": torch.tensor([1.0, -2.0, 0.5])}
    state = {"model": initial, "structural": method.knowledge[0].initial(C)}
    weights, last_variance = initial["w"].tolist(), None
    for round, rows in enumerate(holders, start=1):
        local, held = knowledge(3, seed=round, holders=[[bool(flag) for flag in row] for row in rows])
        local = local * round
        models = [torch.randn(3) for _ in range(3)]
        uploads = [upload(k, {"w": models[k]}, local[k], held[k], samples[k]) for k in range(3)]
        state = aggregate(method, state, uploads)
        merged, known = brute_force_global(local, held, 1)
        variance = variances(merged, known, unbiased=True)
        mean = [sum(samples[k] * float(models[k][i]) for k in range(3)) / sum(samples) for i in range(3)]
        if last_variance is not None:
            ratio = (variance - last_variance) / last_variance
            mean = [0.99 * w + 0.01 * ratio * (v - w) for w, v in zip(mean, weights, strict=True)]
        weights, last_variance = mean, variance
        torch.testing.assert_close(state["model"]["w"], torch.tensor(weights), rtol=1e-5, atol=1e-6)
        assert state["structural"]["known"].tolist() == known


@pytest.mark.parametrize("inner", [ClassWise(), LookAhead()])
def test_the_period_review_refuses_an_aggregator_that_sends_other_weights_than_its_model(inner):
    with pytest.raises(ConfigError, match=f"^algorithm.aggregator.inner: {type(inner).__name__} sends clients other"):
        GlobalPeriodReview(inner)


def test_the_period_review_starts_its_inner_aggregator():
    """Round 1 of FedAvgM's server step inside the review is that step alone."""
    model = {"w": torch.tensor([1.0, -2.0])}
    inner = ServerMomentum(server_lr=0.5)
    review = GlobalPeriodReview(inner)
    assert review.initial(model, 3).keys() == {"momentum"}
