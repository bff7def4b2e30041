"""FedProto's equations against brute force, its identity, and a whole run by hand (baselines: B6)."""

import copy

import pytest
import torch
from experiments import UNEQUAL, descend, experiment, finished, full_batch, in_float64, same_bytes, samples_of
from loops import assert_equals_loop
from torch.nn import functional as F

from fl_lightning.algorithms import FedProto, PrototypeAlignment, Prototypes
from fl_lightning.algorithms.personalized import fedproto as fp
from fl_lightning.client.knowledge import mean_over_holders
from fl_lightning.client.loss_term import Step
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.round import Round
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric

C, WIDTH = 4, 3


def uploads(local, held):
    sections = [{"prototypes": {"values": v, "known": h}} for v, h in zip(local, held, strict=True)]
    return [Upload(k, Message.pack(section, n_samples=10**k)) for k, section in enumerate(sections)]


# --- The formulas ---


@pytest.mark.parametrize("clients", [1, 3])
def test_prototypes_are_the_mean_over_clients_that_hold_the_class(clients):
    local = torch.randn(clients, C, WIDTH)
    held = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.bool)[:clients]
    previous = {"values": torch.randn(C, WIDTH), "known": torch.tensor([True, False, True, False])}
    for before in ({}, previous):
        merged = Prototypes().merge(before, uploads(local, held), Round(1, {}))
        for c in range(C):
            owned = [local[k, c] for k in range(clients) if held[k, c]]
            old = before["values"][c] if before else torch.zeros(WIDTH)
            expected = sum(owned) / len(owned) if owned else old
            torch.testing.assert_close(merged["values"][c], expected)
        assert merged["known"].tolist() == ([True, True, bool(before), False])


def test_the_prototype_of_a_single_holder_is_unchanged():
    local, held = torch.randn(2, C, WIDTH), torch.eye(2, C, dtype=torch.bool)
    local[0, 1] = torch.nan
    means, known = mean_over_holders(local, held)
    assert torch.equal(means[0], local[0, 0])
    assert torch.equal(means[1], local[1, 1])
    assert not means[2:].any()
    assert known.tolist() == [True, True, False, False]


def test_the_distance_is_a_mean_over_samples_and_features():
    features = torch.randn(6, WIDTH, requires_grad=True)
    targets, known = torch.tensor([0, 1, 2, 2, 3, 0]), torch.tensor([True, False, True, False])
    prototypes = torch.randn(C, WIDTH)
    loss = fp.prototype_distance(features, targets, prototypes, known)
    pairs = [(i, int(y)) for i, y in enumerate(targets) if known[y]]
    by_hand = sum((features[i, j] - prototypes[y, j]).item() ** 2 for i, y in pairs for j in range(WIDTH))
    assert loss.item() == pytest.approx(by_hand / (6 * WIDTH), rel=1e-5)
    loss.backward()
    for i, y in enumerate(targets):
        expected = 2 * (features[i] - prototypes[y]) / (6 * WIDTH) if known[y] else torch.zeros(WIDTH)
        torch.testing.assert_close(features.grad[i], expected.detach())


def test_the_term_is_lam_times_the_distance_and_zero_without_prototypes():
    term = PrototypeAlignment(lam=3.0)
    step = Step(torch.zeros(2, C), torch.tensor([0, 3]), features=torch.randn(2, WIDTH))
    assert term(step) == 0
    assert not PrototypeAlignment(lam=0.0).active  # skipped, not multiplied by zero
    prototypes, known = torch.randn(C, WIDTH), torch.tensor([True, True, True, False])
    term.prototypes.load({"values": prototypes, "known": known})
    expected = 3 * fp.prototype_distance(step.features, step.targets, prototypes, known)
    torch.testing.assert_close(term(step), expected)


# --- Which features make a prototype ---


def trained_module(seen, batches):
    """Return a module after two epochs of two batches each, and the features of each step."""
    module = FedProto(seen=seen).client_module(MLP((4,), C, hidden=(WIDTH,)))
    (piece,) = module.pieces()
    outputs = []
    for number, batch in enumerate(batches):
        step = module.step(batch)
        outputs.append(step.features.detach())
        if piece.observes:
            piece.observe(step, number // 2)
        with torch.no_grad():
            for p in module.backbone.parameters():
                p += 0.1
    return module, outputs


@pytest.mark.parametrize("seen", ["after", "last_epoch", "round"])
def test_prototypes_come_from_a_pass_after_training_or_from_training_features(seen):
    batches = [(torch.randn(5, 4), torch.randint(0, C - 1, (5,))) for _ in range(4)]
    module, outputs = trained_module(seen, batches)
    (piece,) = module.pieces()
    own = [batches[0], batches[3]]
    sent = piece.summarize(module, own, C)
    if seen == "after":
        pairs = [(module.backbone.encoder(x), y) for x, y in own]
    else:
        first = 2 if seen == "last_epoch" else 0
        pairs = [(outputs[i], batches[i][1]) for i in range(first, 4)]
    features, targets = (torch.cat(part) for part in zip(*pairs, strict=True))
    for c in range(C):
        assert sent["known"][c] == bool((targets == c).any())
        expected = features[targets == c].mean(dim=0) if sent["known"][c] else torch.zeros(WIDTH)
        torch.testing.assert_close(sent["values"][c], expected)
    assert not sent["known"][C - 1]


# --- The method ---


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    lam, lr = 2.0, 0.1
    run = finished(tmp_path, FedProto(lam=lam), **UNEQUAL | full_batch(lr))
    models = {k: copy.deepcopy(run.worker.template.backbone) for k in range(4)}
    values, known = torch.zeros(10, 16), [False] * 10
    for round in (1, 2, 3):
        sent = []
        for k in run.server.participants(round):
            x, y = samples_of(run, k)
            model = models[k]
            for _ in range(2):
                features = model.encoder(x)
                aims = torch.stack([values[c] if known[c] else z.detach() for z, c in zip(features, y, strict=True)])
                loss = F.cross_entropy(model.head(features), y) + lam * (features - aims).square().mean()
                descend(model, loss, lr)
            with torch.no_grad():
                features = model.encoder(x)
            sent.append({c: features[y == c].mean(dim=0) for c in y.unique().tolist()})
        for c in range(10):
            owned = [prototypes[c] for prototypes in sent if c in prototypes]
            if owned:
                values[c], known[c] = torch.stack(owned).mean(dim=0), True
        if round == 1:
            assert False in known or len({len(prototypes) for prototypes in sent}) > 1  # some lack classes
    torch.testing.assert_close(run.state["prototypes"]["values"], values, rtol=1e-9, atol=1e-9)
    assert run.state["prototypes"]["known"].tolist() == known
    for k, memory in run.memory.items():
        assert_equals_loop(run, memory["personal"], models[k].state_dict())


# --- Nearest prototypes ---


def test_the_nearest_known_prototype_is_predicted():
    features, prototypes = torch.randn(7, WIDTH), torch.randn(C, WIDTH)
    known = torch.tensor([True, False, True, True])
    scores = fp.NearestPrototype(prototypes, known)(features)
    for i in range(7):
        gaps = {c: float(((features[i] - prototypes[c]) ** 2).mean()) for c in range(C) if known[c]}
        assert int(scores[i].argmax()) == min(gaps, key=gaps.get)
        assert scores[i].tolist() == pytest.approx([-gaps.get(c, float("inf")) for c in range(C)], rel=1e-4)


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
def test_prediction_by_prototypes_changes_only_the_evaluation(tmp_path):
    received = {"evaluation": Evaluation(client_model="received")}
    runs = {
        how: experiment(tmp_path / how, FedProto(predict=how), **received, rounds=2) for how in ("logits", "prototypes")
    }
    for run in runs.values():
        run.fit()
    logits, nearest = runs.values()
    assert all(same_bytes(logits.memory[k]["personal"], nearest.memory[k]["personal"]) for k in logits.memory)
    values = nearest.state["prototypes"]["values"]
    client = min(nearest.memory)
    own = copy.deepcopy(nearest.worker.template.backbone)
    own.load_state_dict(nearest.memory[client]["personal"])
    test = nearest.data.shards[client].test
    x, y = nearest.data.data.x_train[test], nearest.data.data.y_train[test]
    with torch.no_grad():
        gaps = torch.cdist(own.encoder(x), values)
        assert torch.equal(nearest.client_module(client)(x).argmax(dim=1), gaps.argmin(dim=1))
        assert torch.equal(logits.client_module(client)(x).argmax(dim=1), own(x).argmax(dim=1))
    assert len(y) == 0 or nearest.csv.rows[-1]["client/acc_mean"] != logits.csv.rows[-1]["client/acc_mean"]
