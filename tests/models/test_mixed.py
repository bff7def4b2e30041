"""Which client has which network, and features of one size."""

from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import CNN, MLP, FromModule, LeNet, Mixed, ResizedFeatures
from fl_lightning.core.errors import ConfigError
from fl_lightning.models.mixed import networks_of
from fl_lightning.models.wrapped import build_network

MODELS = [MLP, partial(CNN, feature_dim=16), partial(MLP, hidden=(8,))]
SHAPE = {"in_shape": (1, 8, 8), "num_classes": 5}


def groups(mixed: Mixed, clients: int = 200, seed: int = 0) -> list[int]:
    return [mixed.group_of(client, seed) for client in range(clients)]


def test_round_robin_is_the_client_modulo_the_number_of_networks():
    assert groups(Mixed(MODELS), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_random_networks_depend_on_the_seed_and_the_client_alone():
    mixed = Mixed(MODELS, assign="random")
    expected = [
        int(np.random.default_rng(np.random.SeedSequence(4, spawn_key=(16, client))).integers(3))
        for client in range(200)
    ]
    assert groups(mixed, seed=4) == expected != groups(mixed, seed=5)
    assert all(40 < groups(mixed, seed=4).count(number) < 95 for number in range(3))


def test_a_list_assigns_each_client_and_needs_one_number_for_each():
    mixed = Mixed(MODELS, assign=[2, 0, 0, 1])
    assert groups(mixed, 4) == [2, 0, 0, 1]
    mixed.check_clients(4)
    Mixed(MODELS).check_clients(5)
    for clients in (3, 5):
        with pytest.raises(ConfigError, match=r"^model.assign: "):
            mixed.check_clients(clients)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"models": []}, "model.models"),
        ({"assign": [0, 3]}, "model.assign"),
        ({"assign": [-1]}, "model.assign"),
        ({"assign": "first"}, "model.assign"),
        ({"feature_dim": 0}, "model.feature_dim"),
    ],
)
def test_bad_options_name_their_key(options, key):
    with pytest.raises(ConfigError, match=rf"^{key}: "):
        Mixed(**{"models": MODELS} | options)


class Own(nn.Module):
    """A user's network without a named head."""

    def __init__(self, in_shape, num_classes):
        super().__init__()
        self.last = nn.Linear(int(np.prod(in_shape)), num_classes)

    def forward(self, x):
        return self.last(x.flatten(1))


def build_own(in_shape, num_classes):
    return Own(in_shape, num_classes)


def test_architectures_have_different_names():
    wrapped = partial(FromModule, module="torchvision.models.resnet18", head="fc")
    assert Mixed([*MODELS, LeNet, wrapped, Own, build_own]).names == [
        *("MLP_0", "CNN", "MLP_2", "LeNet", "resnet18", "Own", "build_own")
    ]


def test_networks_of_any_other_model_are_that_model():
    assert networks_of(MLP) == [MLP]
    assert networks_of(Mixed(MODELS)) == MODELS


@pytest.mark.parametrize("model", MODELS)
def test_resized_features_are_a_linear_map_of_the_networks_own(model):
    network = ResizedFeatures(**SHAPE, model=model, feature_dim=6).double()
    x = torch.rand(3, 1, 8, 8, dtype=torch.float64)
    network.requires_grad_(False)
    features, logits = network.features_and_logits(x)
    inner, resize = network.encoder
    expected = [[float(row @ own + b) for row, b in zip(resize.weight, resize.bias, strict=True)] for own in inner(x)]
    torch.testing.assert_close(features, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(logits, features @ network.head.weight.T + network.head.bias)
    assert (network.feature_dim, logits.shape) == (6, (3, 5))
    assert features.min() < 0  # no ReLU


def test_all_heads_and_features_of_a_mixed_have_one_size():
    networks = [build_network(factory, **SHAPE) for factory in Mixed(MODELS, feature_dim=6).factories]
    assert {tuple(network.head.weight.shape) for network in networks} == {(5, 6)}
    assert {network.feature_dim for network in networks} == {6}
    assert len({len(network.state_dict()) for network in networks}) > 1


def test_a_network_without_a_named_head_cannot_be_resized():
    with pytest.raises(ConfigError, match=r"^model: .*feature_dim.*--model FromModule"):
        ResizedFeatures(**SHAPE, model=Own, feature_dim=6)


@pytest.mark.parametrize("size", [0, -1])
def test_features_have_a_size(size):
    with pytest.raises(ConfigError, match=r"model.feature_dim"):
        Mixed([MLP], feature_dim=size)
    with pytest.raises(ConfigError, match=r"model.feature_dim"):
        ResizedFeatures((1, 8, 8), 10, MLP, feature_dim=size)
