"""APPLE's formulas against brute force, its identities, and a whole run by hand (baselines: B10)."""

import copy
import math
from functools import partial

import pytest
import torch
from experiments import UNEQUAL, NormMLP, experiment, finished, in_float64, same_bytes, samples_of, task_of_round
from lightning.pytorch.plugins import MixedPrecision
from loops import assert_equals_loop
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fl_lightning.algorithms import APPLE, FedAvg, Local, Proximal
from fl_lightning.algorithms.personalized import apple
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.core.message import Message, tensors_to_message, unbundle
from fl_lightning.engines.trainer import quiet_lightning, quiet_trainer
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.models import MLP

RECEIVED = {"evaluation": Evaluation(client_model="received")}
PLAIN = partial(torch.optim.SGD, lr=0.5)
FULL_BATCHES = {"batch_size": 10_000, "trainer": {"accelerator": "cpu", "max_epochs": 2}, "optimizer": PLAIN}


class FixedRatios(APPLE):
    """APPLE whose initial ratios of client i are row i of a matrix."""

    def __init__(self, rows, **options):
        super().__init__(**options)
        self.rows = rows

    def receive(self, module, download, memory):
        row = self.rows[int(download.section(apple.RATIOS)["client"])]
        super().receive(module, Message(download.tensors | {"ratios/first": row}, download.numbers), memory)


CONSTANT = {"dr_lr": 0.0, "mu": 0.0}


# --- The formulas ---


def test_gradients_of_the_core_and_the_ratios_equal_the_formulas():
    torch.manual_seed(0)
    module = apple.MixedModule(MLP((6,), 4, hidden=(5,)), mu=0.0)
    shapes = [p.shape for p in module.backbone.parameters()]
    cores = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    ratios, me = torch.tensor([0.5, -0.2, 0.8]), 1
    others = [torch.stack([c * (j != me) for j, c in enumerate(values)]) for values in zip(*cores, strict=True)]
    module.set_mixture(me, ratios, ratios, cores[me], others)
    module.on_fit_start()
    for k, weights in enumerate(module.backbone.parameters()):
        torch.testing.assert_close(weights.detach(), sum(p * cores[j][k] for j, p in enumerate(ratios)))
    batch = torch.randn(9, 6), torch.arange(9) % 4
    loss = F.cross_entropy(module(batch[0]), batch[1])
    g = torch.autograd.grad(loss, list(module.backbone.parameters()))
    module.training_step(batch, 0).backward()
    module.on_after_backward()
    for own, gradient in zip(module.core, g, strict=True):
        torch.testing.assert_close(own.grad, ratios[me] * gradient)
    for j in range(3):
        inner = sum(float((gradient * c).sum()) for gradient, c in zip(g, cores[j], strict=True))
        assert float(module.ratios.grad[j]) == pytest.approx(inner, rel=1e-4, abs=1e-6)
    assert all(p.grad is None for p in module.backbone.parameters())


def test_the_penalty_weight_falls_from_one_to_zero():
    for r in range(5):
        assert apple.penalty_weight(r, 5, "epsilon") == pytest.approx(0.001 ** (r / 5))
        assert apple.penalty_weight(r, 5, "cosine") == pytest.approx((math.cos(math.pi * r / 5) + 1) / 2)
    for schedule in ("epsilon", "cosine"):
        assert apple.penalty_weight(0, 5, schedule) == 1
        assert apple.penalty_weight(5, 5, schedule) == 0
        assert apple.penalty_weight(0, 0, schedule) == 0


def test_the_penalty_equals_the_formula():
    module = apple.MixedModule(MLP((6,), 4), mu=0.3, length=4, schedule="cosine")
    like = list(module.backbone.parameters())
    ratios, first = torch.tensor([0.5, -0.2]), torch.tensor([0.25, 0.75])
    module.set_mixture(0, ratios, first, like, [torch.zeros(2, *p.shape) for p in like])
    step = module.step((torch.randn(3, 6), torch.tensor([0, 1, 2])))
    for round, weight in ((1, 1.0), (3, 0.5)):
        module.context = FitContext(round=round)
        expected = 0.3 * weight * (0.25**2 + 0.95**2)
        assert module.losses(step)["ratios"].item() == pytest.approx(expected, rel=1e-5)
    module.context = FitContext(round=5)
    assert list(module.losses(step)) == ["ce"]


def test_a_module_without_other_cores_trains_like_a_client_module():
    data = TensorDataset(torch.randn(40, 6), torch.arange(40) % 4)
    trained = []
    for kind in (ClientModule, partial(apple.MixedModule, dr_lr=0.0)):
        torch.manual_seed(0)
        module = kind(MLP((6,), 4), [], [], PLAIN)
        with quiet_lightning():
            quiet_trainer({"max_epochs": 2, "accelerator": "cpu"}).fit(module, DataLoader(data, 8))
        trained.append(module.backbone.state_dict())
    assert same_bytes(*trained)
    copy.deepcopy(module)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("batches", [1, 2])
def test_the_loss_scale_of_half_precision_does_not_change_the_updates(batches):
    """The gradients of cores and ratios come from the mixture, which no optimizer and no gradient scaler knows."""
    torch.manual_seed(0)
    nets = [MLP((6,), 4, hidden=(5,)) for _ in range(2)]
    own, other = ([p.detach().clone() for p in net.parameters()] for net in nets)
    others = [torch.stack([torch.zeros_like(p), p]) for p in other]
    data = DataLoader(TensorDataset(torch.randn(32, 6), torch.arange(32) % 4), 8)
    half = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    moved = []
    for options in ({}, {"plugins": half}):
        module = apple.MixedModule(nets[0], [], [], PLAIN, dr_lr=0.05)
        module.set_mixture(0, torch.tensor([0.6, 0.4]), torch.tensor([0.5, 0.5]), own, others)
        with quiet_lightning():
            quiet_trainer({"accelerator": "cpu", "accumulate_grad_batches": batches} | options).fit(module, data)
        moved.append([end.detach() - start for end, start in zip(module.core, own, strict=True)])
        moved[-1].append(module.ratios.detach() - torch.tensor([0.6, 0.4]))
    for plain, scaled in zip(*moved, strict=True):
        assert plain.norm() > 1e-3
        assert (plain - scaled).norm() < 0.02 * plain.norm()


# --- The spec's two facts ---


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.thorough
def test_constant_ratios_of_the_own_core_are_local_training_bit_for_bit(tmp_path):
    own, alone = (
        experiment(tmp_path / type(method).__name__, method, model=NormMLP, rounds=2, **RECEIVED)
        for method in (FixedRatios(torch.eye(6), **CONSTANT), Local())
    )
    own.fit()
    alone.fit()
    assert own.memory.keys() == alone.memory.keys()
    for k, memory in own.memory.items():
        model = tensors_to_message(memory[apple.CORE]).section("model") | memory.get("personal", {})
        assert same_bytes(dict(sorted(model.items())), dict(sorted(alone.memory[k]["personal"].items())))
        assert same_bytes(
            dict(sorted(own.client_module(k).backbone.state_dict().items())),
            dict(sorted(alone.client_module(k).backbone.state_dict().items())),
        )
    for one, other in zip(own.csv.rows, alone.csv.rows, strict=True):
        assert one["client/acc_mean"] == other["client/acc_mean"]


@pytest.mark.thorough
@in_float64
def test_constant_equal_ratios_are_fedavg_with_an_nth_of_the_learning_rate(tmp_path):
    """One full-batch step of all clients per round, without momentum, and FedAvg's unweighted mean."""
    one_step = {
        "rounds": 4,
        "clients_per_round": 6,
        "batch_size": 10_000,
        "trainer": {"accelerator": "cpu", "max_epochs": 1},
    }
    mixed = finished(
        tmp_path / "apple", FixedRatios(torch.full((6, 6), 1 / 6), **CONSTANT), optimizer=PLAIN, **one_step
    )
    slow = partial(torch.optim.SGD, lr=0.5 / 6)
    average = finished(tmp_path / "avg", FedAvg(weighting="uniform"), optimizer=slow, **one_step)
    for client in range(6):
        w = dict(mixed.client_module(client).backbone.state_dict())
        torch.testing.assert_close(w, average.state["model"], rtol=1e-9, atol=1e-9)


# --- A run ---


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """With partial participation: absent clients have their last core, and untrained clients the initial model."""
    mu, length, lr, dr_lr = 0.5, 2.5, 0.5, 0.05
    run = finished(tmp_path, APPLE(dr_lr=dr_lr, mu=mu, length=length), **UNEQUAL | FULL_BATCHES)
    n = 4
    sizes = [len(shard.train) for shard in run.data.shards]
    first = torch.tensor([size / sum(sizes) for size in sizes])
    backbone = copy.deepcopy(run.worker.template.backbone)
    cores = {k: [p.detach().clone() for p in run.worker.template.backbone.parameters()] for k in range(n)}
    ratios = {k: first.clone() for k in range(n)}
    for round in range(1, 4):
        seen = copy.deepcopy(cores)
        for k in run.server.participants(round):
            x, y = samples_of(run, k)
            theirs = [cores[k] if j == k else seen[j] for j in range(n)]
            for _ in range(2):
                with torch.no_grad():
                    for i, p in enumerate(backbone.parameters()):
                        p.copy_(sum(ratios[k][j] * theirs[j][i] for j in range(n)))
                g = torch.autograd.grad(F.cross_entropy(backbone(x), y), list(backbone.parameters()))
                weight = mu * (0.001 ** ((round - 1) / length) if round - 1 < length else 0.0)
                slope = torch.stack([sum((a * c).sum() for a, c in zip(g, core, strict=True)) for core in theirs])
                share = float(ratios[k][k])
                for c, gradient in zip(cores[k], g, strict=True):
                    c -= lr * share * gradient
                ratios[k] = ratios[k] - dr_lr * (slope + 2 * weight * (ratios[k] - first))
    names = [name for name, _ in backbone.named_parameters()]
    assert len(run.memory) > 2
    for k, memory in run.memory.items():
        held = tensors_to_message(memory[apple.CORE]).section("model")
        assert_equals_loop(run, held, dict(zip(names, cores[k], strict=True)))
        torch.testing.assert_close(memory[apple.RATIOS]["values"], ratios[k], rtol=1e-9, atol=1e-9)
        for j, message, *_ in unbundle(run.server.download(4, k)):
            assert j != k
            assert same_bytes(message.section("model"), tensors_to_message(run.memory[j][apple.CORE]).section("model"))
        own = run.client_module(k).backbone
        for i, p in enumerate(own.parameters()):
            torch.testing.assert_close(
                p.detach(), sum(ratios[k][j] * cores[j][i] for j in range(n)), rtol=1e-9, atol=1e-9
            )


def test_clients_upload_the_core_and_evaluate_the_mixture(tmp_path):
    run = finished(tmp_path, APPLE(dr_lr=0.1), model=NormMLP, rounds=2, optimizer=PLAIN)
    task = task_of_round(run, 3, run.server.participants(1)[0])
    module = run.worker.modules.receive(task)
    result = run.worker.run(task)
    sent = result.upload.section("model")
    parameters = dict(module.backbone.named_parameters())
    assert sent.keys() == parameters.keys()  # BatchNorm's statistics stay
    assert same_bytes(sent, tensors_to_message(result.memory[apple.CORE]).section("model"))
    assert all(not torch.equal(sent[name], parameters[name]) for name in sent)
    assert not any("ratios" in name for name in result.upload.tensors)
    assert not torch.equal(result.memory[apple.RATIOS]["values"], run.memory[task.client][apple.RATIOS]["values"])
    assert set(result.memory["personal"]) == set(module.backbone.state_dict()) - set(parameters)


def test_loss_terms_use_the_mixture_and_clipping_the_trained_parameters(tmp_path):
    trainer = {"accelerator": "cpu", "max_epochs": 2, "gradient_clip_val": 1e-9}
    run = finished(tmp_path, APPLE(loss_terms=[Proximal(1.0)]), rounds=1, trainer=trainer, optimizer=PLAIN)
    start = dict(run.worker.template.backbone.named_parameters())
    for memory in run.memory.values():
        core = tensors_to_message(memory[apple.CORE]).section("model")
        assert all(torch.allclose(core[name], start[name].detach(), atol=1e-7) for name in core)
    assert run.csv.rows[0]["client/train_proximal"] < 1e-9
