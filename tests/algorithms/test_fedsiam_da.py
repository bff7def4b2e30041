"""FedSiam-DA's equations against brute force, and its identities (spec: 3. FedSiam-DA)."""

import copy
import math
from functools import partial

import lightning as L
import pytest
import torch
from aggregation import finish
from experiments import UNEQUAL, NormMLP, assert_near, experiment, finished, in_float64, local_batches, same_bytes
from hypothesis import assume, given
from hypothesis import strategies as st
from loops import assert_equals_loop
from peers import mean_by_hand
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.algorithms import DualAggregation, FedAvg, FedSiamDA, HistoryContrast, SiameseAlignment
from fl_lightning.algorithms.global_model import fedsiam_da as siam
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.models import MLP, Backbone, Head

pytestmark = pytest.mark.numeric

C = 4
SIAM = partial(MLP, hidden=(16,), head=Head(projection=16, prediction=16))
SMALL = partial(MLP, in_shape=(6,), num_classes=C, hidden=(5,), head=Head(projection=7, prediction=8))
SHORT = {"model": SIAM, "rounds": 2, "clients_per_round": 2, "trainer": {"accelerator": "cpu", "max_epochs": 1}}

plain_lightning = pytest.mark.filterwarnings("ignore:.*(many workers|val_dataloader|LeafSpec).*")


def cosine(one, other):
    """Return the cosine of two vectors, computed number by number; zero if a norm is zero."""
    pairs = list(zip(one.tolist(), other.tolist(), strict=True))
    norms = math.sqrt(sum(a * a for a, _ in pairs)) * math.sqrt(sum(b * b for _, b in pairs))
    return sum(a * b for a, b in pairs) / norms if norms else 0.0


def similarity(one, other):
    """Return Eq. 3, with a gradient."""
    return ((one * other).sum(dim=1) / (one**2).sum(dim=1).sqrt() / (other**2).sum(dim=1).sqrt()).mean()


class SiamNorm(Backbone):
    """A siamese network with BatchNorm in the encoder and in the predictor."""

    def __init__(self):
        encoder = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 7))
        predictor = nn.Sequential(nn.Linear(7, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 7))
        super().__init__(encoder, nn.Linear(7, C), 7, predictor)


def client(algorithm=None, model=SMALL, lr=0.3, momentum=0.9):
    """Return a client's module in float64, and a list that receives the parameters of each optimizer it builds."""
    torch.manual_seed(0)
    seen = []

    def optimizer(parameters):
        seen.append(list(parameters))
        return torch.optim.SGD(seen[-1], lr=lr, momentum=momentum)

    module = (algorithm or FedSiamDA(mu=0.4)).client_module(model().double(), optimizer)
    return module.train(), seen


def batches(n=5, size=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, size, 6, generator=generator, dtype=torch.float64)
    return list(zip(x, torch.randint(0, C, (n, size), generator=generator), strict=True))


# --- Eq. 3, 4, 6 and 7 ---


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 999), st.booleans())
def test_eq3_and_4_equal_a_brute_force_loop(size, width, seed, with_zero):
    one, other = torch.randn(2, size, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if with_zero:
        one[0] = 0
    expected = sum(cosine(a, b) for a, b in zip(one, other, strict=True)) / size
    assert siam.positive_similarity(one, other).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert siam.negative_similarity(one, other).item() == pytest.approx(-expected, rel=1e-9, abs=1e-12)


def test_the_similarity_of_zeros_has_a_finite_gradient():
    zeros = torch.zeros(3, 4, requires_grad=True)
    siam.positive_similarity(zeros, torch.randn(3, 4)).backward()
    assert torch.isfinite(zeros.grad).all()


def test_eq6_has_a_gradient_for_the_prediction_only():
    prediction, representation = torch.randn(2, 5, 7, dtype=torch.float64).requires_grad_()
    prediction.retain_grad()
    representation.retain_grad()
    loss = siam.stop_gradient_half(prediction, representation)
    mean = sum(cosine(a, b) for a, b in zip(prediction, representation, strict=True)) / 5
    assert loss.item() == pytest.approx(-mean / 2)
    loss.backward()
    assert prediction.grad.any()
    assert representation.grad is None


# --- Eq. 8 and 9: the two models take turns ---


def halves(local, received, x, mu):
    """Return the first half of Eq. 7, and a function that computes the second with the current weights."""
    with torch.no_grad():
        z = local.encoder(x)
    first = -mu * similarity(received.predictor(received.encoder(x)), z) / 2

    def second():
        with torch.no_grad():
            seen = received.encoder(x)
        return -mu * similarity(local.predictor(local.encoder(x)), seen) / 2

    return first, second


def test_each_half_has_a_gradient_for_its_own_model_only():
    module, seen = client(FedAvg(loss_terms=[SiameseAlignment(0.4)]))
    module.on_fit_start()
    (received,) = seen
    local, reference = module.backbone, copy.deepcopy(module.backbone)
    (x, y) = batches()[0]
    (term,) = module.terms()
    loss = term(module.step((x, y)))
    assert all(p.grad is None for p in local.parameters())  # the first half has trained the copy only
    first, _ = halves(reference, reference, x, 0.4)
    first.backward()
    after_first = [None if p.grad is None else p.grad.clone() for p in received]
    for own, p in zip(after_first, reference.parameters(), strict=True):
        assert (own is None) == (p.grad is None)
        torch.testing.assert_close(own, p.grad)
    loss.backward()
    for own, p in zip(after_first, received, strict=True):
        assert own is None or torch.equal(own, p.grad)
    without = {name for name, p in local.named_parameters() if p.grad is None}
    assert without == {"head.weight", "head.bias"}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_copy_is_updated_before_the_clients_half_is_computed(momentum):
    mu, lr = 0.4, 0.3
    module, seen = client(FedAvg(loss_terms=[SiameseAlignment(mu)]), lr=lr, momentum=momentum)
    module.on_fit_start()
    (received,) = seen
    reference = copy.deepcopy(module.backbone)
    moving = [p for name, p in reference.named_parameters() if not name.startswith("head")]
    velocity = [torch.zeros_like(p) for p in moving]
    (term,) = module.terms()
    for x, y in batches():
        first, second = halves(module.backbone, reference, x, mu)
        stale = second()
        for p, v, g in zip(moving, velocity, torch.autograd.grad(first, moving), strict=True):
            v.mul_(momentum).add_(g)
            p.data -= lr * v
        own = term(module.step((x, y)))
        torch.testing.assert_close(own, second())
        assert abs(own - stale) > 1e-6
        for p, expected in zip(received, reference.parameters(), strict=True):
            torch.testing.assert_close(p, expected)
        with torch.no_grad():
            for p in module.backbone.parameters():
                p += 0.05  # the client's own step


def test_the_copy_uses_the_learning_rate_of_the_round():
    module, _ = client(FedAvg(loss_terms=[SiameseAlignment(0.4)]), lr=0.3)
    module.context = FitContext(lr_scale=0.5)
    slow, _ = client(FedAvg(loss_terms=[SiameseAlignment(0.4)]), lr=0.15)
    losses = []
    for one in (module, slow):
        one.on_fit_start()
        (term,) = one.terms()
        losses.append([term(one.step(batch)).item() for batch in batches()])
    assert losses[0] == losses[1]


def test_the_copy_is_not_part_of_the_clients_module():
    module, _ = client()
    before = set(module.state_dict())
    module.on_fit_start()
    assert set(module.state_dict()) == before
    assert len(list(module.parameters())) == len(list(module.backbone.parameters()))
    assert set(FedSiamDA().remember(module, Message())) == {"term_history"}


def test_the_updated_copy_is_used_despite_autocasts_cache():
    losses = []
    for cache in (True, False):  # only torch's autocast has a cache by default
        torch.manual_seed(0)
        module = ClientModule(SMALL(), [SiameseAlignment(1.0)], optimizer=partial(torch.optim.SGD, lr=5.0)).train()
        module.on_fit_start()
        (term,) = module.terms()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            losses.append(term(module.step((torch.ones(8, 6).cumsum(dim=0), torch.zeros(8, dtype=torch.long)))).item())
    assert losses[0] == losses[1]


# --- Eq. 10: history ---


def test_eq10_equals_a_brute_force_loop():
    mu, (x, y) = 0.4, batches()[0]
    module, _ = client(FedAvg(loss_terms=[HistoryContrast(mu)]), SiamNorm)
    torch.manual_seed(1)
    earlier = SiamNorm().double().encoder.eval()
    (term,) = module.terms()
    term.recall(earlier.state_dict())
    module.on_fit_start()
    for one in (x, x[:2]):
        step = module.step((one, y[: len(one)]))
        expected = sum(cosine(a, b) for a, b in zip(earlier(one), step.features, strict=True)) / len(one)
        assert module.losses(step)["history"].item() == pytest.approx(mu * expected, rel=1e-9)


def plain_fit(module, data, epochs):
    x, y = (torch.stack(part).flatten(0, 1) for part in zip(*data, strict=True))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    loader = DataLoader(TensorDataset(x, y), batch_size=len(data[0][1]))
    L.Trainer(accelerator="cpu", max_epochs=epochs, **quiet).fit(module, loader)


def by_hand(local, epochs, mu, lr, momentum, kept=None):
    """Train a client in plain PyTorch, and return the mean losses per step."""
    received = copy.deepcopy(local)
    own = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum)
    other = torch.optim.SGD(received.parameters(), lr=lr, momentum=momentum)
    earlier, sums = kept, [0.0, 0.0, 0.0]
    for epoch, data in enumerate(epochs):
        if epoch:
            earlier = copy.deepcopy(local.encoder).eval()
        for x, y in data:
            z = local.encoder(x)
            other.zero_grad()
            (-mu * similarity(received.predictor(received.encoder(x)), z.detach()) / 2).backward()
            other.step()
            ce = F.cross_entropy(local.head(z), y)
            history = mu * similarity(earlier(x).detach(), z) if earlier else torch.zeros(())
            siamese = -mu * similarity(local.predictor(z), received.encoder(x).detach()) / 2
            own.zero_grad()
            (ce + history + siamese).backward()
            own.step()
            sums = [s + v.item() for s, v in zip(sums, (ce, history, siamese), strict=True)]
    return [s / sum(map(len, epochs)) for s in sums]


@plain_lightning
def test_two_fits_equal_a_loop_by_hand():
    """In the first round the history starts in the second epoch, in the next round at once."""
    method = FedSiamDA(mu=0.4)
    reference, kept, memory = client(method, SiamNorm)[0].backbone, None, {}
    for round in range(2):
        module, _ = client(method, SiamNorm)
        method.receive(module, Message.pack({"model": reference.state_dict()}), memory)
        plain_fit(module, batches(seed=round), epochs=2)
        losses = by_hand(reference, [batches(seed=round)] * 2, 0.4, lr=0.3, momentum=0.9, kept=kept)
        assert_near(module.backbone.state_dict(), reference.state_dict())
        measured = module.train_losses()
        assert [measured[name] for name in ("ce", "history", "siamese")] == pytest.approx(losses)
        memory, kept = method.remember(module, Message()), copy.deepcopy(reference.encoder).eval()
        assert same_bytes(memory["term_history"], dict(module.backbone.encoder.state_dict()))
        with torch.no_grad():  # the server changes the model
            for p in reference.parameters():
                p *= 0.9


def whole_run_by_hand(run, mu, with_history=True):
    """Return the shared model and the clients' last encoders after three rounds with dual aggregation."""
    model, kept = copy.deepcopy(run.worker.template.backbone), {}
    for round in range(1, 4):
        trained = []
        for k in run.server.participants(round):
            local = copy.deepcopy(model)
            by_hand(local, local_batches(run, round, k), mu, lr=0.2, momentum=0.0, kept=kept.get(k))
            trained.append(local)
            if with_history:
                kept[k] = copy.deepcopy(local.encoder)
        xi = by_hand_xi([torch.cat([p.detach().flatten() for p in local.parameters()]) for local in trained])
        model.load_state_dict(mean_by_hand([local.state_dict() for local in trained], xi))
    return model.state_dict(), kept


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """In a client's next round, its first epoch uses its last model."""
    mu = 0.5
    run = finished(tmp_path, FedSiamDA(mu), model=SIAM, **UNEQUAL)
    expected, kept = whole_run_by_hand(run, mu)
    assert_equals_loop(run, run.state["model"], expected)
    for k, encoder in kept.items():
        assert_near(run.memory[k]["term_history"], encoder.state_dict())
    without, _ = whole_run_by_hand(run, mu, with_history=False)
    assert max((without[name] - value).abs().max() for name, value in expected.items()) > 1e-4


# --- Eq. 5: without the stop-gradient ---


def test_eq5_equals_a_brute_force_loop():
    mu = 0.4
    without_predictor = partial(MLP, in_shape=(6,), num_classes=C, hidden=(5,), head=Head(projection=7))
    module, optimized = client(FedSiamDA(mu, stop_gradient=False), without_predictor)
    torch.manual_seed(1)
    earlier, received = without_predictor().double().encoder, copy.deepcopy(module.backbone)
    history, _ = module.terms()
    history.recall(earlier.state_dict())
    module.on_fit_start()
    for x, y in batches():
        losses = module.losses(module.step((x, y)))
        z = module.backbone.encoder(x)
        to_history = sum(cosine(a, b) for a, b in zip(earlier(x), z, strict=True)) / len(x)
        to_global = -sum(cosine(a, b) for a, b in zip(received.encoder(x), z, strict=True)) / len(x)
        assert losses["history"].item() == pytest.approx(mu * to_history / 2, rel=1e-9)
        assert losses["siamese"].item() == pytest.approx(mu * to_global / 2, rel=1e-9)
        expected = mu * (similarity(earlier(x).detach(), z) - similarity(received.encoder(x).detach(), z)) / 2
        parameters = list(module.backbone.encoder.parameters())
        own = torch.autograd.grad(losses["history"] + losses["siamese"], parameters)
        for g, h in zip(own, torch.autograd.grad(expected, parameters), strict=True):
            torch.testing.assert_close(g, h)
        with torch.no_grad():
            for p in module.backbone.parameters():
                p += 0.05
    assert not optimized  # the received model stays as it is


# --- Eq. 13-16: dual aggregation ---


def by_hand_xi(models):
    mean = torch.stack([m.double() for m in models]).sum(dim=0) / len(models)
    cosines = [cosine(m, mean) for m in models]
    return [c / sum(cosines) for c in cosines]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 999))
def test_eq13_to_15_equal_a_brute_force_loop(clients, width, seed):
    models = torch.randn(clients, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.7
    mean = models.sum(dim=0) / clients
    assume(min(cosine(m, mean) for m in models) > 1e-6)
    xi = siam.dual_weights(models)
    assert xi.tolist() == pytest.approx(by_hand_xi(list(models)), rel=1e-9)
    assert float(xi.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "models",
    [[[1.0, 0.0], [1.0, 0.2], [-0.5, 0.0]], [[1.0, 2.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0]], [[1.0], [-1.0]]],
    ids=["away from the mean", "one is zero", "all are zero", "the mean is zero"],
)
def test_cosines_that_are_not_all_positive_fall_back_to_uniform(models):
    with pytest.warns(UserWarning, match="All clients get the same weight"):
        xi = siam.dual_weights(torch.tensor(models, dtype=torch.float64))
    assert xi.tolist() == [1 / len(models)] * len(models)


def uploads(models, samples):
    messages = [Message.pack({"model": m}, n_samples=n) for m, n in zip(models, samples, strict=True)]
    return [Upload(k, message) for k, message in enumerate(messages)]


def random_model(seed):
    torch.manual_seed(seed)
    model = NormMLP(in_shape=(5,), num_classes=3).train()
    for _ in range(seed + 1):
        model(torch.randn(8, 5) * 3 + seed)  # changes BatchNorm's statistics
    return model


def test_eq16_averages_batchnorm_statistics_that_are_not_in_the_cosine():
    models = [random_model(seed) for seed in range(3)]
    flat = [torch.cat([p.detach().double().flatten() for p in model.parameters()]) for model in models]
    xi, states = by_hand_xi(flat), [model.state_dict() for model in models]
    aggregator = DualAggregation()
    result = finish(aggregator, uploads(states, [1, 50, 9]))
    assert result["weights"]["value"].tolist() == pytest.approx(xi, rel=1e-9)
    assert result["weights"]["client"].tolist() == [0, 1, 2]
    for name, value in result["model"].items():
        if value.is_floating_point():
            mean = sum(x * state[name].double() for x, state in zip(xi, states, strict=True))
            torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
        else:
            assert value.item() == 3
    assert len({round(x, 6) for x in xi}) == 3  # not the plain mean


def test_buffers_are_not_in_the_cosine():
    models = [{"w": torch.tensor([1.0, k]), "scale": torch.tensor([100.0 * k])} for k in range(3)]
    aggregator = DualAggregation()
    aggregator.buffers = frozenset({"scale"})
    weights = finish(aggregator, uploads(models, [1, 1, 1]))["weights"]["value"]
    assert weights.tolist() == pytest.approx(by_hand_xi([model["w"] for model in models]), rel=1e-9)


# --- Runs ---


def test_with_mu_zero_both_terms_are_off_and_nothing_is_kept():
    module, seen = client(FedSiamDA(mu=0.0))
    module.on_fit_start()
    assert module.losses(module.step(batches()[0])).keys() == {"ce"}
    assert seen == []
    assert FedSiamDA(mu=0.0).remember(module, Message()) == {}


@pytest.mark.thorough
def test_mixed_precision_runs_and_stays_finite(tmp_path):
    trainer = {"accelerator": "cpu", "max_epochs": 2, "precision": "bf16-mixed"}
    run = finished(tmp_path, FedSiamDA(mu=1.0), **SHORT | {"trainer": trainer})
    assert all(torch.isfinite(value).all() for value in run.state["model"].values())
    row = run.csv.rows[-1]
    assert 0 < row["client/train_history"] <= 1
    assert -0.5 <= row["client/train_siamese"] < 0


# --- Errors ---


def test_a_model_without_a_predictor_is_refused(tmp_path):
    message = r"^model\.head\.prediction: "
    without = partial(MLP, hidden=(16,), head=Head(projection=16))
    with pytest.raises(ConfigError, match=message):
        FedSiamDA().client_module(without(in_shape=(6,), num_classes=C)).on_fit_start()
    experiment(tmp_path / "no stop", FedSiamDA(stop_gradient=False), **SHORT | {"model": without}).fit()
