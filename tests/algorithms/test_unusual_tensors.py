"""Every method with parameters without dimensions, without elements and of integers, and with buffers of all types."""

import pytest
import torch
from adapters import LowRankMLP
from experiments import assert_near, digits, finished
from methods import ADAPTERS, CLASSES, METHODS, SIAMESE
from test_methods import NOT_STACKED, tiers
from torch import nn

from fl_lightning.engines import StackedEngine

DOUBLE = {"accelerator": "cpu", "max_epochs": 1, "precision": "64-true"}


class Scaled(nn.Module):
    """A network with its outputs multiplied by a parameter.

    Args:
        network: The network.
        unusual: Give the parameter no dimension, as CLIP's `logit_scale`, and add tensors that training never changes.
    """

    def __init__(self, network, unusual):
        super().__init__()
        self.network = network
        self.scale = nn.Parameter(torch.full(() if unusual else (1,), 1.5))
        if unusual:
            self.empty = nn.Parameter(torch.zeros(0, 3))
            self.whole = nn.Parameter(torch.arange(4), requires_grad=False)
            self.register_buffer("factor", torch.tensor(2.0))
            self.register_buffer("nothing", torch.zeros(0))
            self.register_buffer("count", torch.tensor(3))
            self.register_buffer("flags", torch.tensor([True, False]))
            self.register_buffer("absent", None)
            self.register_buffer("hidden", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.scale * self.network(x)


def network(unusual, name):
    def build(in_shape, num_classes):
        backbone = (LowRankMLP if name in ADAPTERS else SIAMESE)(in_shape=in_shape, num_classes=num_classes)
        backbone.encoder = Scaled(backbone.encoder, unusual)
        return backbone

    return build


def models_of(run):
    """Return the shared model and those of the clients, with tensors of one dimension at least."""
    models = [run.state["model"], *(run.client_module(k).backbone.state_dict() for k in range(run.scenario.clients))]
    return [{name: value.reshape(-1) if not value.ndim else value for name, value in one.items()} for one in models]


@pytest.mark.numeric
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", tiers([name for name in CLASSES if name != "Algorithm"]))
def test_unusual_tensors_change_nothing_else(tmp_path, name):
    method, options = METHODS[name]
    options = options | {"scenario": digits(4, alpha=0.5), "clients_per_round": 3, "trainer": DOUBLE, "rounds": 2}
    plain = finished(tmp_path / "plain", method(), **options | {"model": network(False, name)})
    run = finished(tmp_path / "unusual", method(), **options | {"model": network(True, name)})
    initial = run.worker.template.backbone.state_dict()
    for model, expected in zip(models_of(run), models_of(plain), strict=True):
        others = {entry: initial[entry].reshape(value.shape) for entry, value in model.items() if entry not in expected}
        assert_near(model, expected | others)


@pytest.mark.numeric
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", tiers([name for name in CLASSES if name not in ("Algorithm", *NOT_STACKED)]))
def test_unusual_tensors_are_stacked(tmp_path, name):
    method, options = METHODS[name]
    options = options | {"scenario": digits(4, alpha=0.5), "trainer": DOUBLE, "rounds": 1, "model": network(True, name)}
    plain = finished(tmp_path / "plain", method(), engine="sequential", **options)
    stacked = finished(tmp_path / "stacked", method(), engine=StackedEngine(), **options)
    assert_near(stacked.state["model"], plain.state["model"])
