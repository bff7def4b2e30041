"""A client's optimizer from round to round: fresh, or kept with the client."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from commands import rows, run, tiny
from experiments import NormMLP, digits, experiment, same_bytes, untimed, weights_after
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR

from fl_lightning.algorithms import UAPDFL, ErdosRenyi, FedAvg, FedSiamDA, PeerAlgorithm
from fl_lightning.client.loss_term import FitContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import load_optimizer_tensors, optimizer_tensors
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import Engine
from fl_lightning.models import MLP, Head

SEED, EPOCHS, BATCH, CLIENTS = 3, 2, 64, 6
MODEL = partial(MLP, hidden=(16,))
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": partial(torch.optim.Adam, lr=0.003),
    "amsgrad": partial(torch.optim.AdamW, lr=0.003, amsgrad=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}


class PlainClient:
    """A model with one optimizer for all rounds."""

    def __init__(self, model, optimizer, data, client):
        self.model = copy.deepcopy(model)
        self.optimizer = optimizer(self.model.parameters())
        self.lr = self.optimizer.param_groups[0]["lr"]
        self.data, self.client, self.own = data.data, client, data.shards[client].train

    def fit(self, round, factor=1.0):
        self.optimizer.param_groups[0]["lr"] = self.lr * factor
        key = np.random.SeedSequence(SEED, spawn_key=(4, round, self.client)).generate_state(1, np.uint64)[0]
        shuffle = torch.Generator().manual_seed(int(key) >> 1)
        for _ in range(EPOCHS):
            order = self.own[torch.randperm(len(self.own), generator=shuffle)]
            for batch in order.split(BATCH):
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(self.data.x_train[batch]), self.data.y_train[batch]).backward()
                self.optimizer.step()


def initial_model():
    key = np.random.SeedSequence(SEED, spawn_key=(2,)).generate_state(1, np.uint64)[0]
    torch.manual_seed(int(key) >> 1)
    return MODEL(in_shape=(1, 8, 8), num_classes=10)


def kept(run_dir, algorithm=None, **options):
    return experiment(run_dir, algorithm, **{"seed": SEED, "optimizer_state": "kept"} | options)


def same_state(one, other):
    return one.keys() == other.keys() and all(same_bytes(one[name], other[name]) for name in one)


# --- A kept state equals one optimizer for all rounds ---


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.fast_cases(1)
def test_a_single_client_equals_a_plain_loop_bit_for_bit(tmp_path, name):
    scenario, optimizer = digits(clients=1), OPTIMIZERS[name]
    plain = PlainClient(initial_model(), optimizer, scenario.build(SEED), 0)
    for round in range(1, 4):
        plain.fit(round)
    options = {"scenario": scenario, "clients_per_round": 1, "optimizer": optimizer}
    one = kept(tmp_path / "kept", **options)
    one.fit()
    assert same_bytes(one.state["model"], dict(plain.model.state_dict()))
    assert not same_bytes(one.state["model"], weights_after(tmp_path / "fresh", seed=SEED, **options))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_each_participant_continues_with_its_own_optimizer_state(tmp_path, name):
    """FedAvg by hand: four of six clients per round, a halving learning rate, and one optimizer per client."""
    optimizer, data = OPTIMIZERS[name], digits().build(SEED)
    model = initial_model()
    clients = [PlainClient(model, optimizer, data, client) for client in range(CLIENTS)]
    for round in range(1, 5):
        rng = np.random.default_rng(np.random.SeedSequence(SEED, spawn_key=(3, round)))
        chosen = sorted(rng.choice(CLIENTS, 4, replace=False).tolist())
        total, sums = 0, {name: torch.zeros_like(w, dtype=torch.float64) for name, w in model.state_dict().items()}
        for client in (clients[k] for k in chosen):
            client.model.load_state_dict(model.state_dict())  # in place: the optimizer stays
            client.fit(round, 0.5 ** (round - 1))
            total += len(client.own)
            for name, weight in client.model.state_dict().items():
                sums[name] += len(client.own) * weight.double()
        model.load_state_dict({name: (value / total).float() for name, value in sums.items()})
    halving = partial(ExponentialLR, gamma=0.5)
    assert same_bytes(
        weights_after(
            tmp_path, rounds=4, seed=SEED, optimizer=optimizer, optimizer_state="kept", round_lr_scheduler=halving
        ),
        dict(model.state_dict()),
    )


def test_a_peer_without_neighbours_equals_a_plain_loop(tmp_path):
    one = kept(tmp_path, PeerAlgorithm(graph=ErdosRenyi(p=0.0)), clients_per_round=CLIENTS)
    one.fit()
    for client in range(CLIENTS):
        plain = PlainClient(initial_model(), OPTIMIZERS["sgd"], one.data, client)
        for round in range(1, 4):
            plain.fit(round)
        published = one.memory[client]["laid_out"]
        for name, value in plain.model.state_dict().items():
            assert torch.equal(published[f"model/{name}"], value)


def test_optimizer_state_never_leaves_the_client(tmp_path):
    sizes = []
    for state in ("fresh", "kept"):
        one = kept(tmp_path / state, UAPDFL(n_com=2), optimizer_state=state)
        one.fit()
        assert {"optimizer" in memory for memory in one.memory.values()} == (
            {True, False} if state == "kept" else {False}
        )
        sizes.append(one.csv.rows[0]["comm/total_bytes"])
        assert not any("momentum" in name for tensors in one.state.values() for name in tensors)
    assert sizes[0] == sizes[1]


# --- Fresh ---


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_optimizers_are_fresh_by_default(tmp_path, name):
    options = {"optimizer": OPTIMIZERS[name]}
    default, fresh, keeps = (
        weights_after(tmp_path / str(state), optimizer_state=state, **options) for state in (None, "fresh", "kept")
    )
    assert same_bytes(default, fresh)
    assert not same_bytes(fresh, keeps)


def test_an_optimizer_without_momentum_keeps_no_state(tmp_path):
    plain = partial(torch.optim.SGD, lr=0.1)
    one = kept(tmp_path / "kept", optimizer=plain)
    one.fit()
    assert same_bytes(one.state["model"], weights_after(tmp_path / "fresh", seed=SEED, optimizer=plain))


@pytest.mark.thorough
def test_the_option_overrides_the_presets_default(tmp_path):
    """The reference preset of UA-PDFL keeps the state, unless the option says otherwise."""
    weights = {}
    for preset in ("paper", "reference"):
        for state in (None, "fresh", "kept"):
            method = UAPDFL(n_com=2, preset=preset)
            weights[preset, state] = weights_after(tmp_path / f"{preset}-{state}", method, optimizer_state=state)
    assert same_bytes(weights["paper", None], weights["paper", "fresh"])
    assert same_bytes(weights["reference", None], weights["reference", "kept"])
    for preset in ("paper", "reference"):
        assert not same_bytes(weights[preset, "fresh"], weights[preset, "kept"])


def test_the_copy_of_fedsiam_da_has_a_fresh_optimizer():
    backbone = MLP(in_shape=(4,), num_classes=3, head=Head(projection=6, prediction=5))
    momentum = {f"{i}/momentum_buffer": torch.ones_like(p) for i, p in enumerate(backbone.parameters())}
    batch, losses = (torch.randn(8, 4), torch.arange(8) % 3), []
    for state in ({}, momentum):
        module = FedSiamDA().client_module(copy.deepcopy(backbone), OPTIMIZERS["sgd"])
        module.optimizer_state = state
        module.on_fit_start()
        assert len(module.configure_optimizers().state) == len(state)
        losses.append(module.losses(module.step(batch))["siamese"])  # that of the copy after its first step
    assert torch.equal(*losses)


# --- Interrupted runs ---


class Broken(Engine):
    """An engine that fails in a round after two clients have trained."""

    def __init__(self, round):
        self.round = round

    def run(self, worker, tasks, done):
        for n, task in enumerate(tasks):
            if task.round == self.round and n == 2:
                raise RuntimeError("the machine is gone")
            done(worker.run(task))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("method", [FedAvg, partial(UAPDFL, n_com=2, preset="reference")], ids=["server", "peers"])
@pytest.mark.fast_cases(1)
def test_a_run_interrupted_within_a_round_resumes_to_the_same_bytes(tmp_path, method, name):
    options = {"rounds": 5, "optimizer": OPTIMIZERS[name], "model": NormMLP, "checkpoint_every": 10}
    whole = kept(tmp_path / "whole", method(), **options)
    whole.fit()
    with pytest.raises(RuntimeError, match="the machine is gone"):
        kept(tmp_path / "parts", method(), engine=Broken(4), **options).fit()
    rest = kept(tmp_path / "parts", method(), **options)
    rest.load()
    assert rest.round == 3
    rest.fit(resume=True)
    assert same_state(whole.state, rest.state)
    assert whole.memory.keys() == rest.memory.keys()
    assert all(same_state(memory, rest.memory[client]) for client, memory in whole.memory.items())
    assert any(memory.get("optimizer") for memory in whole.memory.values())
    assert untimed(whole.csv.rows) == untimed(rest.csv.rows)


def test_a_task_does_not_change_the_given_client_state(tmp_path):
    one = kept(tmp_path, rounds=1)
    one.fit()
    client = one.server.participants(1)[0]
    before = copy.deepcopy(one.memory[client])
    first, second = (one.worker.run(one.server.task(1, client, one.server.download(1, client))) for _ in range(2))
    assert same_state(one.memory[client], before)
    assert same_state(first.memory, second.memory)
    assert not same_state(first.memory, before)


# --- The tensors ---


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_tensors_restore_the_state_but_not_the_options(name):
    def stepped(optimizer, weight):
        weight.grad = torch.sin(weight.detach())
        optimizer.step()

    one = torch.nn.Parameter(torch.randn(3, 2))
    first = OPTIMIZERS[name]([one])
    for _ in range(3):
        stepped(first, one)
    other = torch.nn.Parameter(one.detach().clone())
    second = OPTIMIZERS[name]([other], lr=0.7)
    load_optimizer_tensors(second, optimizer_tensors(first))
    assert second.param_groups[0]["lr"] == 0.7
    first.param_groups[0]["lr"] = 0.7
    for _ in range(2):
        stepped(first, one)
        stepped(second, other)
    assert torch.equal(one, other)


class Counting(torch.optim.SGD):
    """Counts its steps in a Python number."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
        return super().step(closure)


def test_optimizer_state_that_is_not_a_tensor_is_refused(tmp_path):
    message = r"optimizer_state: Counting's 'steps' is of type int, and only tensors can be kept; set fresh"
    with pytest.raises(ConfigError, match=message):
        kept(tmp_path / "kept", optimizer=partial(Counting, lr=0.1)).fit()
    weights_after(tmp_path / "fresh", optimizer=partial(Counting, lr=0.1))


def test_a_state_of_none_is_not_kept():
    """Some versions of torch set None for a parameter without momentum."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = OPTIMIZERS["sgd"]([weight])
    optimizer.state[weight]["momentum_buffer"] = None
    assert optimizer_tensors(optimizer) == {}


def test_a_module_in_a_plain_trainer_continues_from_the_given_state():
    """In a plain `Trainer` the module's optimizer starts from the given state."""
    module = ClientModule(torch.nn.Linear(2, 2), optimizer=OPTIMIZERS["sgd"])
    given = {"0/momentum_buffer": torch.full((2, 2), 3.0)}
    module.optimizer_state, module.context = given, FitContext(lr_scale=0.5)
    optimizer = module.configure_optimizers()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert torch.equal(optimizer.state[module.backbone.weight]["momentum_buffer"], given["0/momentum_buffer"])
    assert module.backbone.bias not in optimizer.state


# --- The command line ---

MOMENTUM = ["--optimizer.momentum", "0.9", "--optimizer.lr", "0.05"]


@pytest.mark.thorough
def test_optimizer_state_is_an_option_that_a_resume_cannot_change(tmp_path):
    tiny(tmp_path / "fresh", *MOMENTUM)
    tiny(tmp_path / "kept", *MOMENTUM, "--optimizer_state", "kept")
    losses = [[row["global/loss"] for row in rows(tmp_path / name)] for name in ("fresh", "kept")]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]
    code, _, err = run("fit", "--resume", tmp_path / "kept", "--rounds", "4", "--optimizer_state", "fresh")
    assert code == 2
    assert "optimizer_state (kept -> fresh)" in err
    assert run("fit", "--resume", tmp_path / "kept", "--rounds", "4").code == 0
    whole = tiny(tmp_path / "whole", *MOMENTUM, "--optimizer_state", "kept", "--rounds", "4")
    assert whole.code == 0
    assert rows(tmp_path / "kept")[3]["global/loss"] == rows(tmp_path / "whole")[3]["global/loss"]
