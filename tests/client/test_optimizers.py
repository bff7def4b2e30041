"""Steps of plain SGD, with the results of torch's optimizer."""

import copy
from functools import partial

import pytest
import torch
from experiments import same_bytes
from torch import nn
from torch.optim.lr_scheduler import StepLR

from fl_lightning.client.optimizers import step_function, step_plain_sgd

SGD = torch.optim.SGD


class Sparse(nn.Module):
    """An embedding with sparse gradients, a layer, and a layer without gradients."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(7, 5, sparse=True)
        self.layer, self.unused = nn.Linear(5, 3), nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(self.words(x)).pow(2).sum()


def groups_of(network):
    return [
        {"params": network.words.parameters(), "lr": 0.3},
        {"params": [*network.layer.parameters(), *network.unused.parameters()]},
    ]


def is_fast(optimizer):
    return getattr(step_function(optimizer), "func", None) is step_plain_sgd


def backward(network, batch):
    network.zero_grad()
    loss = network(batch)
    loss.backward()
    return loss


def test_plain_sgd_changes_the_weights_as_torch_does():
    torch.manual_seed(0)
    start = Sparse()
    ours, theirs, batches = copy.deepcopy(start), copy.deepcopy(start), torch.randint(0, 7, (4, 6))
    for network in (ours, theirs):
        optimizer = SGD(groups_of(network), lr=0.1)
        assert is_fast(optimizer)
        step = step_function(optimizer) if network is ours else optimizer.step
        for batch in batches:
            optimizer.param_groups[1]["lr"] *= 0.5
            step(partial(backward, network, batch))
    assert same_bytes(ours.state_dict(), theirs.state_dict())
    assert not torch.equal(ours.layer.weight, start.layer.weight)


def test_plain_sgd_does_nothing_without_gradients():
    network = nn.Linear(2, 1)
    before = copy.deepcopy(network.state_dict())
    step_function(SGD(network.parameters(), lr=0.1))(lambda: torch.zeros(()))
    assert same_bytes(network.state_dict(), before)


class Own(SGD):
    """A subclass, whose steps may differ."""


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9},
        {"weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True},
        {"maximize": True},
        {"differentiable": True},
        {"foreach": True},
        {"fused": True},
        {"lr": torch.tensor(0.1)},
    ],
    ids=str,
)
def test_other_options_of_sgd_are_left_to_torch(options):
    parameters = [*nn.Linear(2, 1).parameters()]
    assert is_fast(SGD(parameters, lr=0.1))
    assert not is_fast(SGD(parameters, **{"lr": 0.1} | options))
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], **options}]
    assert not is_fast(SGD(groups, lr=0.1))


@pytest.mark.parametrize("kind", [Own, torch.optim.Adam])
def test_other_optimizers_are_left_to_torch(kind):
    assert not is_fast(kind(nn.Linear(2, 1).parameters(), lr=0.1))


def test_a_scheduler_sees_the_steps():
    optimizer = SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    StepLR(optimizer, 1)
    assert not is_fast(optimizer)
