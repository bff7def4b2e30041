"""FedBN: which parameters and statistics stay on their client (Li et al., ICLR 2021)."""

import copy

import pytest
from experiments import (
    UNEQUAL,
    descend,
    experiment,
    finished,
    in_float64,
    same_bytes,
)
from loops import assert_equals_loop, steps_of
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import FedBN
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import MLP, Backbone


class TwoNorms(Backbone):
    """A network with two BatchNorm layers and no dropout."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        encoder = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())
        super().__init__(encoder, nn.Linear(12, num_classes), 12)


NORMS = {f"encoder.{i}.{part}" for i in (1, 3) for part in TwoNorms((64,), 2).encoder[1].state_dict()}


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedBN(), model=TwoNorms, **UNEQUAL)
    run.load()
    initial = copy.deepcopy(run.worker.template.backbone.state_dict())
    shared, own = {name: value for name, value in initial.items() if name not in NORMS}, {}
    for round in range(1, 4):
        ends, sizes = [], []
        for client in run.server.participants(round):
            local = copy.deepcopy(run.worker.template.backbone).train()
            local.load_state_dict(initial | own.get(client, {}) | shared)
            for x, y in steps_of(run, round, client):
                descend(local, F.cross_entropy(local(x), y), 0.2)
            end = copy.deepcopy(local.state_dict())
            own[client] = {name: end[name] for name in NORMS}
            ends.append(end)
            sizes.append(len(run.data.shards[client].train))
        shared = {n: sum(s * e[n] for s, e in zip(sizes, ends, strict=True)) / sum(sizes) for n in shared}
    run.fit()
    assert_equals_loop(run, run.state["model"], shared)
    assert run.memory.keys() == own.keys()
    for client, entries in own.items():
        assert_equals_loop(run, run.memory[client]["personal"], dict(sorted(entries.items())))


def test_a_client_is_evaluated_with_its_own_norm_layers(tmp_path):
    run = finished(tmp_path, FedBN(), model=TwoNorms, **UNEQUAL)
    for client, kept in run.memory.items():
        model = run.client_module(client).backbone.state_dict()
        assert same_bytes({name: model[name] for name in kept["personal"]}, kept["personal"])
        assert same_bytes({name: model[name] for name in run.state["model"]}, run.state["model"])
    assert "global/acc" not in run.csv.rows[-1]


def test_a_model_without_batchnorm_is_refused_before_round_1(tmp_path):
    with pytest.raises(ConfigError, match=r"^model: FedBN keeps BatchNorm layers on their client, and MLP has none"):
        experiment(tmp_path / "run", FedBN(), model=MLP).fit()
    assert not (tmp_path / "run").exists()
