"""cwFedAVG's and WDR's equations against brute force, and their identities (spec: 4. cwFedAVG and WDR)."""

import copy
import math
from functools import partial

import pytest
import torch
from aggregation import finish
from experiments import (
    UNEQUAL,
    NormMLP,
    descend,
    experiment,
    finished,
    in_float64,
    record_rounds,
    same_bytes,
    samples_of,
)
from hypothesis import given
from hypothesis import strategies as st
from loops import assert_equals_loop, steps_of
from peers import mean_by_hand
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import ClassWise, CwFedAvg, FedAvg, WeightDistribution
from fl_lightning.algorithms.personalized import cwfedavg as cw
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ClientFailure, ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.seeding import Stream, derive, generator
from fl_lightning.core.state_dicts import combine
from fl_lightning.models import MLP, Backbone, Head

pytestmark = pytest.mark.numeric

C, WIDTH = 4, 3
SMALL = partial(MLP, in_shape=(6,), num_classes=C, hidden=(5,))
SHORT = {"rounds": 2, "clients_per_round": 2, "trainer": {"accelerator": "cpu", "max_epochs": 1}}


def generator_from(seed):
    return torch.Generator().manual_seed(seed)


def weights_of_a_client(seed, empty_rows=()):
    """Return entries of a small model with BatchNorm and a two-layer head, in which some rows are zero."""
    generator = generator_from(seed)
    head = torch.randn(C, WIDTH, generator=generator)
    head[list(empty_rows)] = 0
    return {
        "encoder.weight": torch.randn(WIDTH, 2, generator=generator),
        "encoder.running_mean": torch.randn(WIDTH, generator=generator),
        "encoder.num_batches_tracked": torch.randint(0, 99, (), generator=generator),
        "head.0.weight": torch.randn(WIDTH, WIDTH, generator=generator),
        "head.2.weight": head,
        "head.2.bias": torch.randn(C, generator=generator),
    }


def upload(client, model, n, shares=None):
    known = {} if shares is None else {"class_shares": {"values": shares}}
    return Upload(client, Message.pack({"model": model} | known, n_samples=n))


def by_hand_distribution(weight):
    """Return Eq. 9, computed number by number."""
    norms = [math.sqrt(sum(value**2 for value in row)) for row in weight.tolist()]
    return [norm / sum(norms) if sum(norms) else 1 / len(norms) for norm in norms]


def by_hand_weights(samples, distributions):
    """Return Eq. 4 and 5, computed number by number; a column of zeros for a class without weight."""
    q = [[0.0] * C for _ in samples]
    for j in range(C):
        total = sum(n / sum(samples) * p[j] for n, p in zip(samples, distributions, strict=True))
        for i, n in enumerate(samples):
            q[i][j] = n / sum(samples) * distributions[i][j] / total if total else 0.0
    return q


def mixed(coefficients, models):
    """Return the floating-point entries of `Σ a_i w_i`, in float64."""
    names = [name for name, value in models[0].items() if value.is_floating_point()]
    return {n: sum(a * w[n].double() for a, w in zip(coefficients, models, strict=True)) for n in names}


def assert_equals(model, expected):
    floats = {name: value.double() for name, value in model.items() if value.is_floating_point()}
    torch.testing.assert_close(floats, expected, rtol=1e-6, atol=1e-6)


# --- Class distributions ---


def test_class_shares_are_counts_over_their_sum():
    assert cw.class_shares(torch.tensor([1, 0, 3])).tolist() == [0.25, 0.0, 0.75]
    assert cw.class_shares(torch.tensor([0, 0])).tolist() == [0.0, 0.0]


@given(st.integers(0, 999), st.sets(st.integers(0, C - 1)))
def test_eq9_equals_a_brute_force_loop(seed, empty_rows):
    weight = weights_of_a_client(seed, empty_rows)["head.2.weight"].double()
    estimate = cw.weight_distribution(weight)
    assert estimate.tolist() == pytest.approx(by_hand_distribution(weight), rel=1e-9)
    assert float(estimate.sum()) == pytest.approx(1.0)


def test_wdr_is_the_distance_and_not_its_square():
    weight, shares = torch.randn(C, WIDTH), torch.tensor([0.7, 0.0, 0.1, 0.2])
    expected = math.dist(shares.tolist(), by_hand_distribution(weight))
    assert cw.distribution_gap(shares, weight).item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("case", ["a zero row", "all zero", "no gap", "one class"])
def test_wdr_and_its_gradient_are_finite_in_edge_cases(case):
    layer, shares = nn.Linear(WIDTH, C), torch.tensor([0.5, 0.0, 0.25, 0.25])
    with torch.no_grad():
        layer.weight.copy_(torch.randn(C, WIDTH))
        if case == "a zero row":
            layer.weight[1] = 0
        elif case == "all zero":
            layer.weight.zero_()
        elif case == "no gap":
            layer.weight.copy_(torch.tensor([[0.0, 3.0, 4.0]]).expand(C, WIDTH))
            shares = torch.full((C,), 0.25)
        else:
            shares = torch.eye(C)[1]
    term = WeightDistribution(lam=10.0)
    term.shares = shares
    x, y = torch.randn(2, WIDTH), torch.tensor([0, 2])
    loss = F.cross_entropy(layer(x), y) + term(Step(layer(x), y, backbone=layer))
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(layer.weight.grad).all()
    if case == "no gap":
        assert term(Step(layer(x), y, backbone=layer)) == 0


def test_wdr_runs_in_float32_under_mixed_and_half_precision():
    module = ClientModule(SMALL(), [WeightDistribution(3.0)])
    (term,) = module.terms()
    term.shares = torch.tensor([0.7, 0.0, 0.1, 0.2])
    batch = torch.randn(5, 6), torch.arange(5) % C
    exact = term(module.step(batch))
    with torch.autocast("cpu", torch.bfloat16):
        step = module.step(batch)
        assert step.logits.dtype == torch.bfloat16
        loss = term(step)
    assert loss.dtype == torch.float32
    assert loss == exact
    module.backbone.bfloat16()
    rounded = cw.distribution_gap(term.shares, module.backbone.head.weight.float())
    loss = term(module.step((batch[0].bfloat16(), batch[1])))
    assert loss.dtype == torch.float32
    assert loss == 3 * rounded


# --- Eq. 3-7 ---


@given(st.integers(1, 5), st.integers(0, 999), st.data())
def test_eq4_and_5_equal_a_brute_force_loop(clients, seed, data):
    samples = data.draw(st.lists(st.integers(1, 500), min_size=clients, max_size=clients))
    nobody = data.draw(st.sets(st.integers(0, C - 1), max_size=C - 1))  # classes without samples
    distributions = torch.rand(clients, C, generator=generator_from(seed), dtype=torch.float64)
    distributions[:, list(nobody)] = 0
    distributions /= distributions.sum(dim=1, keepdim=True)
    q = cw.class_weights(torch.tensor(samples), distributions)
    assert q.dtype == torch.float64
    torch.testing.assert_close(q, torch.tensor(by_hand_weights(samples, distributions.tolist()), dtype=torch.float64))
    assert q.sum(dim=0).tolist() == pytest.approx([0.0 if j in nobody else 1.0 for j in range(C)])


def test_mixing_weights_equal_a_brute_force_loop_of_eq3_and_7():
    known, q = (
        torch.rand(6, C, generator=generator_from(0)),
        torch.rand(3, C, generator=generator_from(1), dtype=torch.float64),
    )
    together = cw.mixing_weights(known, q)
    assert together.shape == (6, 3)
    for i in range(6):
        expected = [sum(float(known[i, j]) * float(q[m, j]) for j in range(C)) for m in range(3)]
        assert together[i].tolist() == pytest.approx(expected)
        assert cw.mixing_weights(known[i], q).tolist() == pytest.approx(expected)


class ByHand:
    """Explicit class models: Eq. 3 and 7 as in the paper, with partial participation."""

    def __init__(self, initial):
        self.class_models = [mixed([1.0], [initial])] * C
        self.known = {}

    def aggregate(self, clients, models, samples, distributions):
        q = by_hand_weights(samples, distributions)
        for j in range(C):
            column = [row[j] for row in q]
            if any(column):
                self.class_models[j] = mixed(column, models)
        self.known |= dict(zip(clients, distributions, strict=True))

    def start_of(self, client):
        return mixed(self.known.get(client, [1 / C] * C), self.class_models)


SAMPLED = [[0, 2, 3], [1], [0, 1, 2, 3, 5], [1, 2], [0, 3]]  # of six: client 4 never, the others not each time


@pytest.mark.parametrize("distribution", ["weights", "true"])
@pytest.mark.parametrize("empty", [(), (1,), (0, 3)])
def test_initial_models_equal_explicit_class_models_with_partial_participation(distribution, empty):
    """`empty` are classes without samples from round 2 on."""
    aggregator, initial = ClassWise(distribution), weights_of_a_client(seed=100)
    state = {"model": initial} | aggregator.initial(initial, C)
    by_hand = ByHand(initial)
    for round, clients in enumerate(SAMPLED):
        gone = empty if round else ()
        models = [weights_of_a_client(10 * round + k, gone) for k in clients]
        samples = [5 + 3 * k + round for k in clients]
        counts = torch.randint(0, 9, (len(clients), C), generator=generator_from(round)) + 1
        counts[:, list(gone)] = 0
        shares = [cw.class_shares(row) for row in counts]
        sent = shares if distribution == "true" else [None] * len(clients)
        uploads = map(upload, clients, models, samples, sent)
        state |= finish(aggregator, uploads, state)
        truth = [(row / row.sum()).tolist() for row in counts.double()]
        estimates = [by_hand_distribution(model["head.2.weight"]) for model in models]
        by_hand.aggregate(clients, models, samples, truth if distribution == "true" else estimates)
        for client in range(6):
            assert_equals(aggregator.model_for(state, client), by_hand.start_of(client))
        stacked = cw.class_models(state)
        for j in range(C):
            assert_equals({name: value[j] for name, value in stacked.items()}, by_hand.class_models[j])
        assert state["weights"]["client"].tolist() == clients + [-1] * len(gone)
        assert state["weights"]["value"].sum(dim=0).tolist() == pytest.approx([1.0] * C)
        assert_equals(state["model"], mixed([n / sum(samples) for n in samples], models))


@pytest.mark.parametrize("clients", [2, 9])  # fewer and more than classes
def test_initial_models_are_rounded_once(clients):
    models = [weights_of_a_client(k) for k in range(clients)]
    before = {"model": models[0]} | ClassWise().initial(models[0], C)
    state = before | finish(ClassWise(), [upload(k, model, k + 1) for k, model in enumerate(models)], before)
    shares = [by_hand_distribution(model["head.2.weight"].double()) for model in models]
    q = by_hand_weights(range(1, clients + 1), shares)
    exact = mixed(shares[1], [mixed([row[j] for row in q], models) for j in range(C)])
    model = ClassWise().model_for(state, 1)
    assert same_bytes({name: model[name] for name in exact}, {name: value.float() for name, value in exact.items()})


def test_uploaded_class_shares_sum_to_1_in_float64():
    model, counts = weights_of_a_client(0), torch.tensor([[3, 2, 1, 1], [1, 1, 4, 5]])
    before = {"model": model} | ClassWise("true").initial(model, C)
    uploads = [upload(k, model, 1, cw.class_shares(row)) for k, row in enumerate(counts)]
    known = finish(ClassWise("true"), uploads, before)["distributions"]
    for k, row in enumerate(counts.tolist()):
        assert float(known[str(k)].sum()) == pytest.approx(1.0, abs=1e-15)
        assert known[str(k)].tolist() == pytest.approx([n / sum(row) for n in row], rel=1e-6)


def test_integer_entries_keep_the_largest_of_the_round():
    aggregator, models = ClassWise(), [weights_of_a_client(seed) for seed in range(3)]
    for model, batches in zip(models, (4, 9, 6), strict=True):
        model["encoder.num_batches_tracked"] = torch.tensor(batches)
    before = {"model": models[0]} | aggregator.initial(models[0], C)
    state = before | finish(aggregator, [upload(k, model, 3) for k, model in enumerate(models)], before)
    for model in (state["model"], aggregator.model_for(state, 0), aggregator.model_for(state, 7)):
        assert model["encoder.num_batches_tracked"].dtype == torch.int64
        assert model["encoder.num_batches_tracked"].item() == 9


@pytest.mark.parametrize("distribution", ["weights", "true"])
def test_theorem_1_uniform_classes_make_every_model_fedavgs(distribution):
    aggregator, models, samples = ClassWise(distribution), [], [3, 50, 11]
    for seed in range(3):
        model = weights_of_a_client(seed)
        model["head.2.weight"] = F.normalize(model["head.2.weight"], dim=1) * (seed + 1)
        models.append(model)
    before = {"model": models[0]} | aggregator.initial(models[0], C)
    uniform = torch.full((C,), 1 / C) if distribution == "true" else None
    uploads = [upload(k, model, n, uniform) for k, (model, n) in enumerate(zip(models, samples, strict=True))]
    state = before | finish(aggregator, uploads, before)
    mean = mixed([n / sum(samples) for n in samples], models)
    for j in range(C):
        assert_equals({name: value[j] for name, value in cw.class_models(state).items()}, mean)
    for client in range(4):
        assert_equals(aggregator.model_for(state, client), mean)


def test_models_with_a_scalar_parameter_are_supported():
    model = SMALL(head=Head(classifier="cosine")).state_dict()
    aggregator = ClassWise()
    state = {"model": model} | aggregator.initial(model, C)
    assert same_bytes(aggregator.model_for(state, 0), model)


# --- Many starts at once ---


def state_of(clients, shape=(37, 21)):
    """Return the state after a round, with float64 weights so that rounding hides no difference."""
    models = []
    for k in range(clients):
        sizes = {"encoder.weight": shape, "encoder.scale": (), "head.weight": (C, 5)}
        drawn = {n: torch.randn(s, generator=generator_from(k), dtype=torch.float64) for n, s in sizes.items()}
        models.append(drawn | {"encoder.steps": torch.tensor(k)})
    before = {"model": models[0]} | ClassWise().initial(models[0], C)
    return before | finish(ClassWise(), [upload(7 * k, model, k + 1) for k, model in enumerate(models)], before)


@pytest.mark.parametrize(("clients", "rows"), [(1, 3), (C, 16), (C + 1, 3), (40, 1), (40, 16)])
def test_an_initial_model_does_not_depend_on_the_other_clients_asked_for(monkeypatch, clients, rows):
    state = state_of(clients)
    monkeypatch.setattr(cw, "BLOCK_BYTES", rows * 8 * (37 * 21 + C * 5 + 2))
    assert cw.block_rows(state["sources"]) == rows
    everybody = list(range(150))
    scattered = [149, 3, 67, 7, 0, 131, 3 + 16]
    alone = [ClassWise().model_for(state, client) for client in everybody]
    for asked in (everybody, everybody[::-1], scattered):
        seen = list(ClassWise().ahead(state, asked))
        assert len(seen) == len(asked)
        for client, ahead in zip(asked, seen, strict=True):
            assert same_bytes(ClassWise().model_for(ahead, client), alone[client])


def test_initial_models_are_computed_in_blocks_and_hold_only_their_own_memory():
    state, asked = state_of(12), []
    starts = ClassWise().ahead(state, (asked.append(client) or client for client in range(1000)))
    for client in range(3):
        own = ClassWise().model_for(next(starts), client)
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in own.values())
    assert len(asked) == 17  # the first block, and the first client of the next


@pytest.mark.parametrize("clients", [2, C, C + 1, 40])
def test_initial_models_are_mixed_from_class_models_or_uploads_whichever_are_fewer(monkeypatch, clients):
    state, products = state_of(clients), []

    def watch(coefficients, *args, **options):
        products.append(tuple(coefficients.shape))
        return combine(coefficients, *args, **options)

    monkeypatch.setattr(cw, "combine", watch)
    for client, ahead in enumerate(ClassWise().ahead(state, range(32))):
        ClassWise().model_for(ahead, client)
    assert products == ([(C, clients)] if clients > C else []) + 2 * [(16, min(C, clients))]


def test_the_blocks_of_large_models_are_small():
    small, large = ({"w": torch.empty(1, n, device="meta")} for n in (1000, 3_000_000))
    assert cw.block_rows(small) == 16
    assert cw.block_rows(large) == cw.BLOCK_BYTES // 24_000_000
    assert cw.block_rows({"w": torch.empty(1, 10**9, device="meta")}) == 1


class DoublesModels(ClassWise):
    """A user's aggregator that overrides the model of one client."""

    def model_for(self, state, client):
        return {name: 2 * value + client for name, value in super().model_for(state, client).items()}


class AddsNoteToDownload(CwFedAvg):
    """A user's method that overrides the download of one client."""

    def download(self, state, client, rng):
        message = super().download(state, client, rng)
        return Message(message.tensors | {"note/value": torch.tensor([client])}, {"drawn": float(rng.random())})


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", [CwFedAvg(), CwFedAvg(aggregator=DoublesModels()), AddsNoteToDownload()])
def test_downloads_computed_together_equal_single_downloads(tmp_path, method):
    run = finished(tmp_path, method, **SHORT)
    for clients in (range(6), [4, 1]):
        for client, together in zip(clients, run.server.downloads(3, clients), strict=True):
            alone = method.download(run.state, client, generator(run.seed, Stream.DOWNLOAD, 3, client))
            assert same_bytes(together.tensors, alone.tensors)
            assert together.numbers == alone.numbers
            assert run.server.download(3, client).numbers == alone.numbers


# --- Runs ---


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("distribution", ["weights", "true"])
def test_the_first_download_is_the_initial_model_bit_for_bit(tmp_path, distribution):
    run = experiment(tmp_path, CwFedAvg(distribution=distribution), model=NormMLP)
    run.load()
    initial = dict(run.worker.template.backbone.state_dict())
    for client in range(6):
        assert same_bytes(run.server.download(1, client).section("model"), initial)


@in_float64
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("distribution", ["weights", "true"])
def test_a_run_equals_a_loop_by_hand(tmp_path, distribution):
    """Each client starts from its mixture of the class models."""
    lam = 0.5
    run = experiment(tmp_path, CwFedAvg(lam=lam, distribution=distribution), **UNEQUAL)
    run.load()
    local = copy.deepcopy(run.worker.template.backbone)
    class_models, known = [copy.deepcopy(local.state_dict())] * 10, dict.fromkeys(range(4), [0.1] * 10)
    for round in range(1, 4):
        ends, masses = [], []
        for client in run.server.participants(round):
            local.load_state_dict(mixed(known[client], class_models))
            _, labels = samples_of(run, client)
            shares = (labels.bincount(minlength=10).float() / len(labels)).double()  # class shares are float32
            for x, y in steps_of(run, round, client):
                norms = local.head.weight.square().sum(dim=1).sqrt()
                gap = (shares - norms / norms.sum()).square().sum().sqrt()
                descend(local, F.cross_entropy(local(x), y) + lam * gap, 0.2)
            ends.append(copy.deepcopy(local.state_dict()))
            known[client] = by_hand_distribution(local.head.weight)
            if distribution == "true":
                known[client] = (shares / shares.sum()).tolist()
            masses.append([len(labels) * p for p in known[client]])
        for j, weights in enumerate(zip(*masses, strict=True)):
            if any(weights):
                class_models[j] = mean_by_hand(ends, weights)
    run.fit()
    for client in range(4):
        start = run.server.download(4, client).section("model")
        assert_equals_loop(run, start, mixed(known[client], class_models))


@pytest.mark.parametrize("distribution", ["weights", "true"])
def test_clients_upload_only_weights_and_sample_counts(tmp_path, distribution):
    run = experiment(tmp_path, CwFedAvg(distribution=distribution), rounds=1)
    rounds = record_rounds(run)
    run.fit()
    parameters = sum(p.numel() for p in run.worker.template.backbone.parameters())
    shares = 10 if distribution == "true" else 0
    row, clients = run.csv.rows[0], 4
    assert row["comm/down_bytes"] == clients * 4 * parameters
    assert row["comm/up_bytes"] == clients * (4 * (parameters + shares) + 8)  # and N_i
    for upload in rounds[0][1]:
        beside = upload.message.without("model")
        assert list(beside.tensors) == (["class_shares/values"] if shares else [])
        assert beside.numbers == {"n_samples": len(run.data.shards[upload.client].train)}


# --- Options, and parts in other methods ---


def test_wdr_is_zero_outside_a_fit():
    assert WeightDistribution().eval()(Step(torch.randn(2, C), torch.tensor([0, 1]), backbone=SMALL())) == 0


# --- Errors ---


class NoMatrix(Backbone):
    """A model whose head has no weights."""

    def __init__(self, in_shape, num_classes):
        encoder = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(in_shape), num_classes))
        super().__init__(encoder, nn.Identity(), num_classes)


def test_a_model_without_a_classification_layer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^model: "):
        experiment(tmp_path / "class wise", FedAvg(aggregator=ClassWise()), model=NoMatrix).fit()
    term = WeightDistribution()
    term.shares = torch.full((C,), 1 / C)
    with pytest.raises(ConfigError, match=r"^model: "):
        term(Step(torch.zeros(1, C), torch.tensor([0]), backbone=NoMatrix((6,), C)))


# --- preset: reference ---


def test_reference_halves_lambda_and_keeps_batchnorm_statistics_local(tmp_path):
    paper, reference = CwFedAvg(lam=3.0), CwFedAvg(lam=3.0, preset="reference")
    losses = []
    for method in (paper, reference):
        (term,) = method.loss_terms
        term.shares = torch.tensor([0.7, 0.0, 0.1, 0.2])
        torch.manual_seed(0)
        losses.append(term(Step(torch.zeros(1, C), torch.tensor([0]), backbone=SMALL())).item())
    assert losses[0] > 0
    assert losses[1] == pytest.approx(losses[0] / 2)
    assert (paper.buffers, reference.buffers) == ("average", "local")
    assert CwFedAvg(preset="reference", buffers="average").buffers == "average"

    run = experiment(tmp_path, CwFedAvg(preset="reference"), model=NormMLP, **SHORT)
    rounds = record_rounds(run)
    run.fit()
    backbone = run.worker.template.backbone
    parameters, statistics = set(dict(backbone.named_parameters())), set(dict(backbone.named_buffers()))
    for upload in rounds[1][1]:
        assert set(upload.message.section("model")) == parameters
        assert set(run.memory[upload.client]["personal"]) == statistics
        module = run.worker.modules.build()
        run.algorithm.receive(module, run.server.download(3, upload.client), run.memory[upload.client])
        assert same_bytes(dict(module.backbone.named_buffers()), run.memory[upload.client]["personal"])


def by_hand_reference(run, client, epochs, lr, momentum, lam):
    """Train a client with the authors' loader and loss: full batches only, and half of lambda."""
    local = copy.deepcopy(run.worker.template.backbone)
    x, y = samples_of(run, client)
    size = run.worker.training.batch_size
    shares = torch.bincount(y, minlength=10) / len(y)
    order = torch.Generator().manual_seed(derive(run.seed, Stream.BATCHES, 1, client))
    optimizer = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum)
    for _ in range(epochs):
        shuffled = torch.randperm(len(y), generator=order)
        for first in range(0, len(y) - size + 1, size):
            chosen = shuffled[first : first + size]
            norms = local.head.weight.norm(dim=1)
            loss = F.cross_entropy(local(x[chosen]), y[chosen]) + lam / 2 * (shares - norms / norms.sum()).norm()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return local.state_dict()


def test_reference_trains_on_full_batches_only(tmp_path):
    options = {"rounds": 1, "clients_per_round": 3, "batch_size": 8}
    run = experiment(tmp_path / "reference", CwFedAvg(lam=3.0, preset="reference"), **options)
    rounds = record_rounds(run)
    run.fit()
    paper = experiment(tmp_path / "paper", CwFedAvg(lam=1.5), **options)
    others = record_rounds(paper)
    paper.fit()
    ragged = 0
    for upload, other in zip(rounds[0][1], others[0][1], strict=True):
        expected = by_hand_reference(run, upload.client, epochs=2, lr=0.1, momentum=0.9, lam=3.0)
        trained = upload.message.section("model")
        assert same_bytes(trained, expected)
        rest = len(run.data.shards[upload.client].train) % 8
        ragged += rest > 0
        assert same_bytes(trained, other.message.section("model")) == (rest == 0)
        assert upload.n_samples == len(run.data.shards[upload.client].train)  # dropped samples count
    assert ragged


def test_reference_refuses_a_client_without_a_full_batch(tmp_path):
    run = experiment(tmp_path, CwFedAvg(preset="reference"), rounds=1, batch_size=5000)
    message = (
        r"client \d, round 1: \d+ training sample\(s\) make no batch for a method that drops incomplete ones "
        r"\(algorithm.preset\), which needs 5000; use a smaller batch_size, or a larger scenario.partition.min_samples$"
    )
    with pytest.raises(ClientFailure, match=message):
        run.fit()
