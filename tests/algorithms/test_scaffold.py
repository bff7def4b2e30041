"""SCAFFOLD compared with Algorithm 1, and its identities (baselines: A3)."""

import copy
from functools import partial

import pytest
import torch
from aggregation import aggregate
from experiments import UNEQUAL, NormMLP, assert_near, experiment, in_float64, same_bytes, weights_after
from loops import assert_equals_loop, steps_of
from servers import mean_of, watched
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

from fl_lightning.algorithms import SCAFFOLD, ControlVariates, FedAvg, ServerMomentum
from fl_lightning.algorithms.global_model import scaffold
from fl_lightning.client.loss_term import Step
from fl_lightning.client.module import ClientModule
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.message import Message, Upload
from fl_lightning.engines.trainer import quiet_trainer
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric

CPU = {"accelerator": "cpu", "max_epochs": 2}
PLAIN = {"optimizer": partial(torch.optim.SGD, lr=0.1)}
UNIFORM = partial(FedAvg, weighting="uniform")


# --- Equations ---


def test_a_clients_next_control_is_the_mean_of_its_gradients():
    """With `y ← y - η (g_k - c_i + c)`, option II's `c_i⁺` is the mean of the `g_k`, whatever `c` and `c_i` are."""
    own, server, start = torch.randn(3, 4, dtype=torch.float64)
    gradients, lr, end = torch.randn(5, 4, dtype=torch.float64), 0.3, start
    for gradient in gradients:
        end = end - lr * (gradient - own + server)
    found = scaffold.next_control(start, end, 5, lr, server - own)
    for i in range(4):
        wanted = own[i] - server[i] + (start[i] - end[i]) / (5 * lr)
        assert found[i].item() == pytest.approx(wanted.item(), abs=1e-12)
    torch.testing.assert_close(found, gradients.mean(dim=0))


def test_the_gradient_of_the_term_is_the_correction():
    module, c, own = begun_module()
    with torch.no_grad():
        for p in module.backbone.parameters():
            p += torch.randn_like(p)
    (term,) = module.terms()
    term(Step(torch.zeros(1, 3), torch.tensor([0]), backbone=module.backbone)).backward()
    for name, p in module.backbone.named_parameters():
        torch.testing.assert_close(p.grad, c[name] - own[name])


def test_the_term_is_zero_at_the_start_of_a_fit_and_outside_of_one():
    module, _, _ = begun_module()
    (term,) = module.terms()
    step = Step(torch.zeros(1, 3), torch.tensor([0]), backbone=module.backbone)
    assert term(step).item() == 0
    assert ControlVariates().eval()(step).item() == 0


def begun_module():
    """Return a module whose fit has begun, with random `c` and `c_i`."""
    module = SCAFFOLD().client_module(MLP(in_shape=(4,), num_classes=3, hidden=(5,)))
    (term,) = module.terms()
    c, own = ({name: torch.randn_like(p) for name, p in module.backbone.named_parameters()} for _ in range(2))
    term.load(c)
    term.recall(own)
    module.trainer = quiet_trainer(CPU)
    module.on_fit_start()
    return module, c, own


def test_a_client_without_steps_keeps_its_control():
    module, _, own = begun_module()
    (term,) = module.terms()
    new, change = term.controls(module)
    assert same_bytes(new, own)
    assert not any(value.any() for value in change.values())


def test_frozen_parameters_have_no_control():
    backbone = MLP(in_shape=(4,), num_classes=3, hidden=(5,))
    backbone.head.weight.requires_grad_(False)
    state = SCAFFOLD().initial_state(backbone, 3, 7, None)
    assert "head.weight" in state["model"]
    assert set(state["control"]) == {name for name, p in backbone.named_parameters() if name != "head.weight"}


@pytest.mark.parametrize("arrived", [1, 3])
def test_weights_are_averaged_over_uploads_and_controls_over_all_clients(arrived):
    backbone, clients, lr = NormMLP((4,), 3), 8, 0.7
    method = SCAFFOLD(server_lr=lr)
    method.start([10] * clients, frozenset())
    state = method.initial_state(backbone, 3, clients, None)
    state["control"] = {name: torch.randn_like(value) for name, value in state["control"].items()}
    uploads = []
    for client in range(arrived):
        model = {n: torch.randn_like(v) if v.is_floating_point() else v + client for n, v in state["model"].items()}
        control = {name: torch.randn_like(value) for name, value in state["control"].items()}
        uploads.append(Upload(client, Message.pack({"model": model, "control": control}, n_samples=10 + client)))
    seen, fold = [], method.aggregator.fold
    method.aggregator.fold = lambda folded, upload: fold(folded, seen.append(upload.message) or upload)
    after = aggregate(method, state, uploads)
    assert len(seen) == arrived
    assert not any(message.section("control") for message in seen)  # controls are added as they arrive
    for name, value in state["model"].items():
        theirs = [upload.message.section("model")[name] for upload in uploads]
        wanted = sum(theirs) / arrived if value.is_floating_point() else max(theirs)
        if name in state["control"]:
            wanted = value + lr / arrived * sum(one - value for one in theirs)
            change = sum(upload.message.section("control")[name] for upload in uploads)
            torch.testing.assert_close(after["control"][name], state["control"][name] + change / clients)
        torch.testing.assert_close(after["model"][name], wanted)
    assert after["control"].keys() == state["control"].keys()


# --- Identities ---


@pytest.mark.thorough
def test_one_step_of_all_clients_is_fedavg_in_every_round(tmp_path):
    trainer = {"accelerator": "cpu", "precision": "64-true", "max_steps": 1}
    options = PLAIN | {"rounds": 4, "clients_per_round": None, "trainer": trainer}
    mine, average = (
        weights_after(tmp_path / name, method, **options) for name, method in (("mine", SCAFFOLD()), ("avg", UNIFORM()))
    )
    assert_near(mine, average)


# --- Whole runs ---


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    """Algorithm 1, with a decaying learning rate."""
    rate, decay, server_lr, rounds = 0.2, 0.01, 0.8, 3
    options = UNEQUAL | {"optimizer": partial(torch.optim.SGD, lr=rate, weight_decay=decay)}
    run = experiment(
        tmp_path, SCAFFOLD(server_lr=server_lr), round_lr_scheduler=partial(ExponentialLR, gamma=0.9), **options
    )
    run.load()
    model = copy.deepcopy(run.worker.template.backbone)
    c = [torch.zeros_like(p) for p in model.parameters()]
    own = {client: [torch.zeros_like(p) for p in model.parameters()] for client in range(4)}
    seen = []
    for round in range(1, rounds + 1):
        lr, moves, changes = rate * 0.9 ** (round - 1), [], []
        for client in run.server.participants(round):
            local, steps = copy.deepcopy(model), 0
            for x, y in steps_of(run, round, client):
                gradients = torch.autograd.grad(F.cross_entropy(local(x), y), list(local.parameters()))
                steps += 1
                with torch.no_grad():
                    for p, g, ci, cs in zip(local.parameters(), gradients, own[client], c, strict=True):
                        p -= lr * (g + decay * p - ci + cs)
            ends, starts = list(local.parameters()), list(model.parameters())
            new = [
                (ci - cs + (s - e) / (steps * lr)).detach()
                for ci, cs, s, e in zip(own[client], c, starts, ends, strict=True)
            ]
            moves.append([(e - s).detach() for e, s in zip(ends, starts, strict=True)])
            changes.append([n - o for n, o in zip(new, own[client], strict=True)])
            own[client] = new
            seen.append(client)
        with torch.no_grad():
            for p, *theirs in zip(model.parameters(), *moves, strict=True):
                p += server_lr / len(theirs) * sum(theirs)
        c = [value + sum(theirs) / 4 for value, *theirs in zip(c, *changes, strict=True)]
    assert len(seen) > len(set(seen))  # some take part twice
    run.fit()
    assert_equals_loop(run, run.state["model"], model.state_dict())
    names = [name for name, _ in model.named_parameters()]
    assert_near(run.state["control"], dict(zip(names, c, strict=True)), 1e-12)
    assert set(run.memory) == set(seen)
    for client in run.memory:
        assert_near(run.memory[client]["term_control"], dict(zip(names, own[client], strict=True)), 1e-12)


def test_another_aggregator_averages_the_weights_only(tmp_path):
    method = SCAFFOLD(aggregator=ServerMomentum(0.0, weighting="samples"))
    _, rounds = watched(tmp_path, method, rounds=2, model=NormMLP, **PLAIN)
    for before, uploads, after in rounds:
        assert_near(after["model"], mean_of(uploads, "samples"), 1e-6)
        changes = mean_of(uploads, "uniform", "control")
        wanted = {name: value.double() + 4 / 6 * changes[name] for name, value in before["control"].items()}
        assert_near(after["control"], wanted, 1e-6)


# --- Refusals ---


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": partial(torch.optim.SGD, lr=0.1, momentum=0.9)}, "optimizer: SCAFFOLD needs plain SGD"),
        ({"optimizer": partial(torch.optim.SGD, lr=0.1, maximize=True)}, "optimizer: SCAFFOLD needs SGD, and"),
        ({"optimizer": torch.optim.Adam}, "optimizer: SCAFFOLD needs SGD, and this is Adam"),
        ({"lr_scheduler": partial(ExponentialLR, gamma=0.5)}, "lr_scheduler: .* Use round_lr_scheduler"),
        ({"trainer": CPU | {"accumulate_grad_batches": 2}}, "trainer.accumulate_grad_batches: .*larger batch_size"),
        ({"trainer": CPU | {"gradient_clip_val": 1.0}}, "trainer.gradient_clip_val: .* Remove it"),
    ],
)
def test_anything_except_plain_sgd_is_refused_before_round_1(tmp_path, options, message):
    run = experiment(tmp_path, SCAFFOLD(), **PLAIN | options)
    with pytest.raises(ConfigError, match=f"^{message}"):
        run.fit()
    assert not (tmp_path / "metrics.csv").exists()


def test_loss_scaling_and_several_learning_rates_are_refused():
    module, _, _ = begun_module()
    module.trainer.precision_plugin.precision = "16-mixed"  # on a CPU Lightning makes bf16 of it
    with pytest.raises(ConfigError, match=r"^trainer.precision: 16-mixed skips steps"):
        module.on_fit_start()

    def two_rates(parameters):
        first, *rest = parameters
        return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}])

    module = ClientModule(NormMLP((4,), 3), [ControlVariates()], optimizer=two_rates)
    module.trainer = quiet_trainer(CPU)
    with pytest.raises(ConfigError, match=r"^optimizer: SCAFFOLD "):
        module.on_fit_start()
