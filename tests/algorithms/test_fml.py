"""FML: its losses, its identities with FedAvg and Local, and whole runs by hand, also with another shared network."""

import copy
from functools import partial

import pytest
import torch
from experiments import (
    ALL_OPTIONS,
    RECEIVED,
    SGD,
    UNEQUAL,
    NormMLP,
    descend,
    experiment,
    finished,
    in_float64,
    same_bytes,
    samples_of,
)
from loops import assert_equals_loop, steps_of
from methods import assert_same_run
from peers import mean_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FML, FedAvg, FedKD, Local
from fl_lightning.algorithms.personalized import fml
from fl_lightning.analysis.export import described_model
from fl_lightning.cli.commands.export import describe_model
from fl_lightning.core.errors import ClientFailure, ConfigError
from fl_lightning.models import MLP

SMALL, MEME = partial(MLP, hidden=(16,)), partial(MLP, hidden=(6, 5))


def divergence(logits, teacher):
    """Return the batch mean of `KL(teacher || network)`, sample by sample and class by class."""
    total = 0.0
    for one, other in zip(logits, teacher, strict=True):
        q, p = one.exp() / one.exp().sum(), other.exp() / other.exp().sum()
        total = total + sum(p[c] * (p[c] / q[c]).log() for c in range(len(one)))
    return total / len(logits)


def kl_div(logits, teacher):
    return F.kl_div(logits.log_softmax(dim=1), teacher.softmax(dim=1), reduction="batchmean")


def cross_entropy(logits, targets):
    return -sum((z.exp()[y] / z.exp().sum()).log() for z, y in zip(logits, targets, strict=True)) / len(targets)


@in_float64
def test_the_loss_is_a_mixture_of_labels_and_the_other_networks_outputs():
    logits, teacher = torch.randn(5, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
    y = torch.tensor([0, 3, 1, 1, 2])
    parts = fml.mutual_losses({"ce": 0.9 * cross_entropy(logits, y), "l1": logits.abs().mean()}, logits, teacher, 0.3)
    assert list(parts) == ["ce", "l1", "distillation"]
    loss = sum(parts.values())
    task = 0.9 * cross_entropy(logits, y) + logits.abs().mean()
    expected = 0.3 * task + 0.7 * divergence(logits, teacher)
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(expected, [logits], retain_graph=True)
    loss.backward()
    torch.testing.assert_close(logits.grad, gradient)
    assert teacher.grad is None


@pytest.mark.filterwarnings("ignore:.* contain initial weights")
@pytest.mark.thorough
@pytest.mark.parametrize("method", [FML(alpha=1, beta=1), FedKD(distillation=0, energy_start=1, energy_end=1)])
def test_without_distillation_the_networks_are_those_of_fedavg_and_local(tmp_path, method):
    run, avg, local = (
        finished(tmp_path / str(number), algorithm, evaluation=RECEIVED, **ALL_OPTIONS)
        for number, algorithm in enumerate((method, FedAvg(), Local()))
    )
    assert same_bytes(run.state["model"], avg.state["model"])
    for client in range(6):  # also clients that never took part
        mine, theirs = (each.client_module(client).backbone.state_dict() for each in (run, local))
        assert same_bytes(dict(mine), dict(theirs))
    for mine, shared, own in zip(run.csv.rows, avg.csv.rows, local.csv.rows, strict=True):
        assert mine["client/acc_mean"] == own["client/acc_mean"]
        for name in ("global/acc", "global/loss", "comm/total_bytes"):
            assert mine[name] == shared[name]


@pytest.mark.parametrize("share", ["alpha", "beta"])
def test_each_share_changes_one_network_in_the_first_step(tmp_path, share):
    options = {"model": SMALL, "rounds": 1, "trainer": {"accelerator": "cpu", "max_steps": 1}}
    plain = finished(tmp_path / "plain", FML(alpha=1.0, beta=1.0, shared_model=MEME), **options)
    run = finished(tmp_path / share, FML(**{"alpha": 1.0, "beta": 1.0} | {share: 0.4}, shared_model=MEME), **options)
    assert same_bytes(run.state["model"], plain.state["model"]) == (share == "alpha")
    own = all(same_bytes(run.memory[k]["own_network"], plain.memory[k]["own_network"]) for k in run.memory)
    assert own == (share == "beta")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("shared_model", [None, MEME])
@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path, shared_model):
    alpha, beta, lr = 0.3, 0.6, 0.2
    run = experiment(tmp_path, FML(alpha=alpha, beta=beta, shared_model=shared_model), **UNEQUAL)
    run.load()
    module = run.worker.template
    shared, initial, own = copy.deepcopy(module.backbone), copy.deepcopy(module.own), {}
    assert (len(list(shared.parameters())) == len(list(initial.parameters()))) == (shared_model is None)
    for round in (1, 2, 3):
        trained, weights = [], []
        for client in run.server.participants(round):
            w, v = copy.deepcopy(shared), own.setdefault(client, copy.deepcopy(initial))
            for x, y in steps_of(run, round, client):
                of_w, of_v = w(x), v(x)
                loss_w = beta * F.cross_entropy(of_w, y) + (1 - beta) * kl_div(of_w, of_v.detach())
                loss_v = alpha * F.cross_entropy(of_v, y) + (1 - alpha) * kl_div(of_v, of_w.detach())
                descend(w, loss_w, lr)
                descend(v, loss_v, lr)
            trained.append(w.state_dict())
            weights.append(len(run.data.shards[client].train))
        shared.load_state_dict(mean_by_hand(trained, weights))
    run.fit()
    assert_equals_loop(run, run.state["model"], shared.state_dict())
    assert run.memory.keys() == own.keys()
    for client, v in own.items():
        assert_equals_loop(run, run.memory[client]["own_network"], v.state_dict())


def test_clients_are_evaluated_with_their_own_network_and_send_the_shared_one(tmp_path):
    run = finished(tmp_path, FML(shared_model=MEME), model=SMALL, rounds=1)
    scores = []
    for client in run.server.participants(1):
        network = SMALL(in_shape=(1, 8, 8), num_classes=10)
        network.load_state_dict(run.memory[client]["own_network"])
        x, y = samples_of(run, client, "test")
        scores.append(float((network.eval()(x).argmax(dim=1) == y).float().mean()))
        assert type(run.client_module(client).backbone) is MLP
        assert same_bytes(dict(run.client_module(client).backbone.state_dict()), dict(network.state_dict()))
    assert run.csv.rows[0]["client/acc_mean"] == pytest.approx(sum(scores) / len(scores))
    shared = MEME(in_shape=(1, 8, 8), num_classes=10)
    shared.load_state_dict(run.state["model"])
    data = run.data.data
    accuracy = (shared.eval()(data.x_test).argmax(dim=1) == data.y_test).float().mean()
    assert run.csv.rows[0]["global/acc"] == pytest.approx(float(accuracy))
    assert run.csv.rows[0]["comm/up_bytes"] == 4 * (4 * sum(p.numel() for p in shared.parameters()) + 8)
    assert torch.load(tmp_path / "final" / "model.pt", weights_only=True).keys() == shared.state_dict().keys()


def frozen_first_layer(in_shape, num_classes):
    network = MLP(in_shape, num_classes, hidden=(8,))
    network.encoder[1].requires_grad_(False)
    return network


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("model", "shared_model"), [(SMALL, frozen_first_layer), (frozen_first_layer, SMALL)])
def test_frozen_parameters_of_either_network_are_neither_sent_nor_kept(tmp_path, model, shared_model):
    run = finished(tmp_path, FML(shared_model=shared_model), model=model, rounds=2)
    whole, rest = {"encoder.1.weight", "encoder.1.bias", "head.weight", "head.bias"}, {"head.weight", "head.bias"}
    assert run.state["model"].keys() == (rest if shared_model is frozen_first_layer else whole)
    for client, memory in run.memory.items():
        assert memory["own_network"].keys() == (rest if model is frozen_first_layer else whole)
        run.client_module(client)


def with_outputs(number):
    return partial(lambda in_shape, number: MLP(in_shape, number, hidden=(4,)), number=number)


@pytest.mark.parametrize(("key", "option"), [("model", "model"), ("algorithm.shared_model", "shared_model")])
def test_a_network_with_other_outputs_is_refused_by_its_key(tmp_path, key, option):
    wrong = with_outputs(3)
    run = experiment(
        tmp_path / "run",
        FML(shared_model=wrong if option == "shared_model" else MEME),
        model=wrong if option == "model" else SMALL,
    )
    with pytest.raises(ConfigError, match=f"^{key}: forward returned \\(3,\\) outputs"):
        run.fit()


def test_a_diverged_own_network_is_reported(tmp_path):
    class Diverging(fml.MutualModule):
        def own_losses(self, own, shared):
            return {name: 1e38 * loss for name, loss in super().own_losses(own, shared).items()}

    class Own(FML):
        def __post_init__(self):
            super().__post_init__()
            self.module_class = partial(Diverging, alpha=1.0, beta=1.0)

    options = {"trainer": {"accelerator": "cpu", "max_steps": 1}, "optimizer": partial(torch.optim.SGD, lr=1e3)}
    with pytest.raises(ClientFailure, match=r"own network's '.*' is NaN"):
        finished(tmp_path, Own(), model=SMALL, rounds=1, **options)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_all_losses_are_recorded_under_their_names(tmp_path, share):
    run = experiment(tmp_path, FML(alpha=share, beta=share, shared_model=MEME), model=SMALL, rounds=1)
    run.load()
    names = ["ce", "distillation", "own_ce", "own_distillation"] if share < 1 else ["ce", "own_ce"]
    assert run.worker.template.loss_names == names
    result = run.worker.run(run.server.task(1, 0, run.server.download(1, 0)))
    assert list(result.losses) == ["loss", *names]
    assert result.losses["loss"] == pytest.approx(sum(result.losses[name] for name in names))


def test_the_networks_are_kept_under_their_keys():
    module = FML(shared_model=MEME).client_module(SMALL((1, 8, 8), 10), SGD, shared=MEME((1, 8, 8), 10))
    assert module.networks == {"model": module.own, "algorithm.shared_model": module.backbone}
    assert module.own.feature_dim == 16
    assert module.backbone.feature_dim == 5


def test_the_description_of_the_global_model_is_that_of_the_shared_network():
    shared, own = ({"class_path": name} for name in ("fl_lightning.models.MLP", "fl_lightning.models.CNN"))
    config = {"model": own, "algorithm": {"class_path": "FML", "init_args": {"shared_model": shared}}}
    assert described_model(config, shared=True) == shared
    assert described_model(config) == own
    for method in ({"class_path": "FML", "init_args": {"shared_model": None}}, {"class_path": "Own"}, "FML"):
        assert described_model(config | {"algorithm": method}, shared=True) == own


def test_own_networks_of_another_architecture_are_not_called_the_global_model(tmp_path):
    run = finished(tmp_path, FML(shared_model=MEME), model=SMALL, rounds=1)
    assert describe_model(run, 0) == "the model of client 0"


@pytest.mark.thorough
@pytest.mark.parametrize("engine", ["sequential", "processes"])
def test_a_resumed_run_and_processes_have_the_same_bytes_with_another_shared_network(tmp_path, engine):
    options = {"model": NormMLP, "clients_per_round": 3, "rounds": 2}
    method = partial(FML, shared_model=MEME)
    whole = finished(tmp_path / "whole", method(), **options)
    finished(tmp_path / "parts", method(), engine=engine, **options | {"rounds": 1})
    rest = experiment(tmp_path / "parts", method(), engine=engine, **options)
    rest.fit(resume=True)
    assert_same_run(whole, rest)
