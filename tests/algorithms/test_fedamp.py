"""FedAMP and HeurFedAMP compared with their equations (baselines: B8)."""

import copy
import math
from functools import partial

import pytest
import torch
from aggregation import finish
from experiments import UNEQUAL, NormMLP, descend, experiment, finished, in_float64, same_bytes
from loops import assert_equals_loop, steps_of
from torch.nn import functional as F

from fl_lightning.algorithms import FedAMP, HeurFedAMP, LastUploads
from fl_lightning.algorithms.personalized.fedamp import heuristic_weights, message_weights
from fl_lightning.client.loss_term import Step
from fl_lightning.core.message import Message, Upload
from fl_lightning.core.state_dicts import VisibleState

pytestmark = pytest.mark.numeric


def test_message_weights_equal_the_formula():
    own, *others = torch.randn(4, 7, dtype=torch.float64)
    alpha, sigma = 0.3, 5.0
    weights = message_weights(own, others, alpha, sigma)
    for weight, other in zip(weights.tolist(), others, strict=True):
        square = sum((a - b) ** 2 for a, b in zip(own.tolist(), other.tolist(), strict=True))
        assert weight == pytest.approx(alpha * math.exp(-square / sigma) / sigma, rel=1e-12)
    assert weights.sum() < 1
    alike = message_weights(own, [own, own, others[0]], 10.0, 1.0)
    assert alike.sum().item() == pytest.approx(1)
    assert alike[0] == alike[1] > alike[2]


def test_heuristic_weights_equal_the_formula():
    own, *others = torch.randn(5, 7, dtype=torch.float64)
    weights = heuristic_weights(own, others, 0.2, 3.0)
    parts = []
    for other in others:
        product = sum(a * b for a, b in zip(own.tolist(), other.tolist(), strict=True))
        parts.append(math.exp(3.0 * product / (math.hypot(*own.tolist()) * math.hypot(*other.tolist()))))
    assert weights.tolist() == pytest.approx([0.8 * part / sum(parts) for part in parts], rel=1e-12)
    assert heuristic_weights(own, others, 0.2, 0.0).tolist() == pytest.approx([0.2] * 4)


def state_of(models, last, ever, start):
    marks = {"last": torch.zeros(6, dtype=torch.bool), "ever": torch.zeros(6, dtype=torch.bool)}
    marks["last"][last], marks["ever"][ever] = True, True
    return VisibleState({"heard": marks, "model": {"w": start}}, lambda k: {"w": models[k]})


@pytest.mark.parametrize(
    "kind", [partial(FedAMP, alpha=2.0, sigma=4.0), partial(HeurFedAMP, self_weight=0.3, sigma=2.0)]
)
def test_a_cloud_model_mixes_the_clients_model_and_the_last_participants(kind):
    method = kind()
    models = {k: torch.randn(5) for k in range(4)}
    start = torch.randn(5)
    state = state_of(models, [1, 3], [0, 1, 3], start)  # 2 has a model too, of an earlier life: it must not count
    for client, own in ((0, models[0]), (1, models[1]), (4, start)):
        others = [models[j] for j in (1, 3) if j != client]
        weights = method.weights(own.double(), [o.double() for o in others])
        wanted = (1 - weights.sum()) * own.double() + sum(w * o.double() for w, o in zip(weights, others, strict=True))
        torch.testing.assert_close(method.cloud_model(state, client)["w"], wanted.float())
        assert 0 < weights.sum() < 1


def test_the_server_records_the_last_participants_and_all_participants():
    before = {"heard": {"last": torch.zeros(4, dtype=torch.bool), "ever": torch.tensor([True, False, False, False])}}
    uploads = (Upload(k, Message({}, {"n_samples": 1})) for k in (1, 3))
    notes = LastUploads()
    after = finish(notes, uploads, before)["heard"]
    assert after["last"].tolist() == [False, True, False, True]
    assert after["ever"].tolist() == [True, True, False, True]
    assert before["heard"]["ever"].tolist() == [True, False, False, False]
    assert not before["heard"]["last"].any()


def test_without_other_participants_the_cloud_model_is_the_clients_own():
    state = state_of({2: torch.randn(5)}, [2], [2], torch.randn(5))
    assert torch.equal(FedAMP().cloud_model(state, 2)["w"], state.peer(2)["w"])
    assert torch.equal(HeurFedAMP().cloud_model(state, 2)["w"], state.peer(2)["w"])


@in_float64
@pytest.mark.parametrize("heuristic", [False, True])
def test_a_run_equals_a_loop_by_hand(tmp_path, heuristic):
    """Cloud models mix a client's own last model with those of the last round's other participants."""
    alpha, sigma, lam = (1.0, 2.0, 0.4) if heuristic else (0.5, 50.0, 0.2)
    method = (
        HeurFedAMP(self_weight=0.3, sigma=sigma, lam=lam) if heuristic else FedAMP(alpha=alpha, sigma=sigma, lam=lam)
    )
    run = experiment(tmp_path, method, **UNEQUAL)
    run.load()
    models, last = {k: copy.deepcopy(run.worker.template.backbone) for k in range(4)}, []
    for round in range(1, 4):
        before = {k: [p.detach().clone() for p in model.parameters()] for k, model in models.items()}
        flat = {k: torch.cat([p.flatten() for p in parameters]) for k, parameters in before.items()}
        participants = run.server.participants(round)
        for k in participants:
            others = [j for j in last if j != k]
            if heuristic:
                cosines = [float(flat[k] @ flat[j] / flat[k].norm() / flat[j].norm()) for j in others]
                scores = [math.exp(sigma * cosine) for cosine in cosines]
                weights = [0.7 * score / sum(scores) for score in scores]
            else:
                squares = [float((flat[k] - flat[j]).square().sum()) for j in others]
                weights = [alpha / sigma * math.exp(-square / sigma) for square in squares]
            clouds = [
                (1 - sum(weights)) * own + sum(w * p for w, p in zip(weights, theirs, strict=True))
                for own, *theirs in zip(before[k], *(before[j] for j in others), strict=True)
            ]
            for x, y in steps_of(run, round, k):
                loss = F.cross_entropy(models[k](x), y)
                if last:
                    gaps = zip(models[k].parameters(), clouds, strict=True)
                    loss = loss + lam / (2 * alpha) * sum((p - cloud).square().sum() for p, cloud in gaps)
                descend(models[k], loss, 0.2)
        last = participants
    run.fit()
    for k, memory in run.memory.items():
        assert_equals_loop(run, memory["uploaded"], models[k].state_dict())


def test_a_new_client_is_pulled_to_a_cloud_model_that_includes_the_initial_model(tmp_path):
    run = finished(tmp_path, FedAMP(sigma=100.0), rounds=1, clients_per_round=2)
    late = next(k for k in range(6) if k not in run.server.participants(1))
    cloud, start = run.server.download(2, late).section("cloud"), run.worker.template.backbone.state_dict()
    assert cloud.keys() == start.keys()
    assert not same_bytes(cloud, start)
    others = [run.memory[k]["uploaded"] for k in run.server.participants(1)]
    squares = [sum(float((start[n].double() - o[n].double()).square().sum()) for n in start) for o in others]
    shares = [math.exp(-square / 100) / 100 for square in squares]
    for n, value in start.items():
        mixed = sum(share * o[n].double() for share, o in zip(shares, others, strict=True))
        torch.testing.assert_close(cloud[n].double(), (1 - sum(shares)) * value.double() + mixed, rtol=1e-6, atol=1e-7)
    module = run.worker.modules.receive(run.server.task(1, late, run.server.download(2, late)))
    assert same_bytes(module.backbone.state_dict(), start)
    module.on_fit_start()
    term = module.loss_terms[0]
    distance = sum((start[name].double() - cloud[name].double()).square().sum() for name in start)
    loss = term(Step(torch.zeros(1, 10), torch.tensor([0]), backbone=module.backbone)).detach()
    assert float(loss) == pytest.approx(float(distance) / 2, rel=1e-4)


def test_batchnorm_statistics_never_leave_the_client(tmp_path):
    run = finished(tmp_path, FedAMP(sigma=100.0), model=NormMLP, rounds=2)
    client = run.server.participants(2)[0]
    assert not [name for name in run.server.download(3, client).tensors if "running" in name or "num_batches" in name]
    module = run.client_module(client)
    kept = run.memory[client]
    both = kept["uploaded"] | kept["personal"]
    assert same_bytes(module.backbone.state_dict(), {name: both[name] for name in module.backbone.state_dict()})
    assert kept["personal"].keys() == {
        f"encoder.2.{what}" for what in ("running_mean", "running_var", "num_batches_tracked")
    }
