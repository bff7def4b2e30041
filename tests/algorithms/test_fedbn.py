"""FedBN: which parameters and statistics stay on their client (Li et al., ICLR 2021)."""

import copy

import pytest
from experiments import UNEQUAL, descend, experiment, finished, in_float64, same_bytes
from loops import assert_equals_loop, steps_of
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms import FedBN
from fl_lightning.algorithms.personalized.fedbn import normalization_layers
from fl_lightning.core.errors import ConfigError
from fl_lightning.models import Backbone, ResNet8


class TwoNorms(Backbone):
    """A network with two BatchNorm layers and no dropout."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        encoder = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 12), nn.BatchNorm1d(12), nn.ReLU())
        super().__init__(encoder, nn.Linear(12, num_classes), 12)


NORMS = {f"encoder.{i}.{part}" for i in (1, 3) for part in TwoNorms((64,), 2).encoder[1].state_dict()}


class OtherNorms(Backbone):
    """A network with a LayerNorm, a GroupNorm and a BatchNorm layer, and an InstanceNorm layer without weights."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        norms = [nn.LayerNorm(12), nn.GroupNorm(3, 12), nn.BatchNorm1d(12)]
        encoder = nn.Sequential(nn.InstanceNorm2d(1), nn.Flatten(), nn.Linear(64, 12), *norms, nn.Sigmoid())
        super().__init__(encoder, nn.Linear(12, num_classes), 12)


@in_float64
def test_a_run_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedBN(), model=TwoNorms, **UNEQUAL)
    assert_run_equals_loop(run, NORMS)


class LayerAndGroupNorm(OtherNorms):
    """A network with a LayerNorm and a GroupNorm layer."""

    def __init__(self, in_shape: tuple[int, ...], num_classes: int) -> None:
        super().__init__(in_shape, num_classes)
        self.encoder[5] = nn.Identity()


@in_float64
@pytest.mark.thorough
def test_a_run_with_a_personal_layer_norm_equals_a_loop_by_hand(tmp_path):
    run = experiment(tmp_path, FedBN(layers=["LayerNorm"]), model=LayerAndGroupNorm, **UNEQUAL)
    assert_run_equals_loop(run, {"encoder.3.weight", "encoder.3.bias"})


def assert_run_equals_loop(run, norms):
    """Compare a run with a loop in which each client keeps the entries `norms`."""
    run.load()
    initial = copy.deepcopy(run.worker.template.backbone.state_dict())
    shared, own = {name: value for name, value in initial.items() if name not in norms}, {}
    for round in range(1, 4):
        ends, sizes = [], []
        for client in run.server.participants(round):
            local = copy.deepcopy(run.worker.template.backbone).train()
            local.load_state_dict(initial | own.get(client, {}) | shared)
            for x, y in steps_of(run, round, client):
                descend(local, F.cross_entropy(local(x), y), 0.2)
            end = copy.deepcopy(local.state_dict())
            own[client] = {name: end[name] for name in norms}
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


def test_patterns_choose_layers_by_name_or_class_and_only_normalization_layers_with_weights():
    network = OtherNorms((1, 8, 8), 3)
    assert normalization_layers(network) == ["encoder.5"]
    assert normalization_layers(network, ["*"]) == ["encoder.3", "encoder.4", "encoder.5"]
    assert normalization_layers(network, ["GroupNorm", "encoder.3"]) == ["encoder.3", "encoder.4"]
    assert normalization_layers(network, ["InstanceNorm*", "Linear", "encoder", "layernorm"]) == []
    affine = nn.Sequential(nn.InstanceNorm2d(2, affine=True), nn.InstanceNorm2d(2, track_running_stats=True))
    assert normalization_layers(affine, ["InstanceNorm2d"]) == ["0", "1"]


def test_the_default_keeps_the_batchnorm_layers_and_their_pattern_does_the_same(tmp_path):
    options = UNEQUAL | {"model": TwoNorms}
    default = finished(tmp_path / "default", FedBN(), **options)
    named = finished(tmp_path / "named", FedBN(layers=["BatchNorm1d"]), **options)
    assert same_bytes(default.state["model"], named.state["model"])
    assert default.memory.keys() == named.memory.keys()
    for client, kept in default.memory.items():
        assert same_bytes(kept["personal"], named.memory[client]["personal"])


def test_the_layers_of_a_group_norm_network_are_kept():
    method = FedBN(layers=["GroupNorm"])
    module = method.client_module(ResNet8((3, 8, 8), 3, norm="group"))
    names = {name for name, layer in module.backbone.named_modules() if isinstance(layer, nn.GroupNorm)}
    assert {*method.personal} == {f"{name}." for name in names}
    assert len(names) == 9
    shared = method.shared_names(module.backbone)
    assert not [name for name in shared if name.startswith(tuple(method.personal))]


@pytest.mark.parametrize("layers", [["InstanceNorm2d"], ["LayerNorm", "encoder.2"], ["norm"]])
def test_a_pattern_without_a_normalization_layer_is_refused_with_the_layers_of_the_model(layers):
    with pytest.raises(ConfigError, match=r"^algorithm\.layers: .*encoder\.3 \(LayerNorm\), encoder\.4 \(GroupNorm\)"):
        FedBN(layers=layers).client_module(OtherNorms((1, 8, 8), 3))
