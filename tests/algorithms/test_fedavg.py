"""FedAvg runs compared with a plain PyTorch loop, and reproducibility by the seed."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from experiments import (
    UNEQUAL,
    NoDropout,
    NormMLP,
    digits,
    experiment,
    finished,
    in_float64,
    record_rounds,
    same_bytes,
    untimed,
    weights_after,
)
from loops import assert_equals_loop, rounds_by_hand
from torch.nn import functional as F

from fl_lightning.algorithms import FedAvg, FedSKC
from fl_lightning.models import MLP

pytestmark = pytest.mark.numeric


def test_a_run_equals_a_plain_pytorch_loop_bit_for_bit(tmp_path):
    seed, rounds, epochs, batch_size, lr, momentum = 3, 3, 2, 64, 0.1, 0.9

    def spawned(*key):
        return np.random.SeedSequence(seed, spawn_key=key)

    data = digits().build(seed)
    x, y = data.data.x_train, data.data.y_train
    torch.manual_seed(int(spawned(2).generate_state(1, np.uint64)[0]) >> 1)
    model = MLP(in_shape=(1, 8, 8), num_classes=10, hidden=(16,))
    for round in range(1, rounds + 1):
        chosen = np.random.default_rng(spawned(3, round)).choice(6, 4, replace=False)
        sums, total = {name: torch.zeros_like(w, dtype=torch.float64) for name, w in model.state_dict().items()}, 0
        for client in sorted(chosen.tolist()):
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=lr, momentum=momentum)
            order_seed = int(spawned(4, round, client).generate_state(1, np.uint64)[0]) >> 1
            shuffle = torch.Generator().manual_seed(order_seed)
            own = data.shards[client].train
            for _ in range(epochs):
                order = own[torch.randperm(len(own), generator=shuffle)]
                for batch in order.split(batch_size):
                    optimizer.zero_grad()
                    F.cross_entropy(local(x[batch]), y[batch]).backward()
                    optimizer.step()
            for name, weight in local.state_dict().items():
                sums[name] += len(own) * weight.double()
            total += len(own)
        model.load_state_dict({name: (value / total).float() for name, value in sums.items()})

    assert same_bytes(weights_after(tmp_path, seed=seed), dict(model.state_dict()))


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedAvg(), model=NoDropout, **UNEQUAL)
    expected, _ = rounds_by_hand(run)
    run.fit()
    assert_equals_loop(run, run.state["model"], expected)


@in_float64
def test_one_full_batch_step_of_all_clients_is_one_step_on_all_data(tmp_path):
    scenario = digits()
    options = {
        "clients_per_round": None,
        "rounds": 1,
        "batch_size": 10_000,
        "trainer": {"accelerator": "cpu", "max_epochs": 1},
        "optimizer": partial(torch.optim.SGD, lr=0.5),
    }
    run = finished(tmp_path, scenario=scenario, **options)
    central = copy.deepcopy(run.worker.template.backbone)
    everybody = torch.cat([shard.train for shard in run.data.shards])
    x, y = run.data.data.x_train[everybody], run.data.data.y_train[everybody]
    F.cross_entropy(central(x), y).backward()
    for name, parameter in central.named_parameters():
        torch.testing.assert_close(run.state["model"][name], parameter.detach() - 0.5 * parameter.grad)


def test_uniform_weighting_is_the_plain_mean(tmp_path):
    run = experiment(tmp_path, FedAvg(weighting="uniform"), rounds=1)
    rounds = record_rounds(run)
    run.fit()
    ((_, seen, _),) = rounds
    for name, value in run.state["model"].items():
        mean = torch.stack([u.message.section("model")[name].double() for u in seen]).mean(dim=0)
        torch.testing.assert_close(value.double(), mean, rtol=0, atol=1e-7)


def test_one_participant_keeps_its_weights_bit_for_bit(tmp_path):
    run = experiment(tmp_path, rounds=1, clients_per_round=1, model=NormMLP)
    uploads = []
    upload = run.algorithm.upload
    run.algorithm.upload = lambda *args: uploads.append(upload(*args)) or uploads[-1]
    run.fit()
    assert same_bytes(run.state["model"], uploads[0].section("model"))


def test_the_same_seed_gives_the_same_result(tmp_path):
    first, second = (experiment(tmp_path / name) for name in ("first", "second"))
    first.fit()
    second.fit()
    assert same_bytes(first.state["model"], second.state["model"])
    assert untimed(first.csv.rows) == untimed(second.csv.rows)
    assert not same_bytes(first.state["model"], weights_after(tmp_path / "third", seed=1))


def test_methods_with_one_seed_have_the_same_partition_initial_model_and_participants(tmp_path):
    runs = [experiment(tmp_path / type(a).__name__, a, seed=5) for a in (FedAvg(), FedSKC())]
    for run in runs:
        run.fit()
    one, other = runs
    for mine, theirs in zip(one.data.shards, other.data.shards, strict=True):
        assert torch.equal(mine.train, theirs.train)
        assert torch.equal(mine.test, theirs.test)
    assert same_bytes(
        dict(one.worker.template.backbone.state_dict()), dict(other.worker.template.backbone.state_dict())
    )
    assert [one.server.participants(r) for r in range(1, 9)] == [other.server.participants(r) for r in range(1, 9)]
