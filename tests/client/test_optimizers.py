"""Steps of plain SGD without torch's optimizer."""

import copy

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


def test_plain_sgd_changes_the_weights_as_torch_does():
    torch.manual_seed(0)
    ours = Sparse()
    theirs, batches = copy.deepcopy(ours), torch.randint(0, 7, (4, 6))
    steps = []
    for network in (ours, theirs):
        optimizer = SGD(groups_of(network), lr=0.1)
        step = step_function(optimizer) if network is ours else optimizer.step

        def closure(batch, network=network):
            network.zero_grad()
            loss = network(batch)
            loss.backward()
            return loss

        for batch in batches:
            optimizer.param_groups[1]["lr"] *= 0.5
            step(lambda batch=batch, closure=closure: closure(batch))
        steps.append(step)
    assert steps[0].func is step_plain_sgd
    assert same_bytes(ours.state_dict(), theirs.state_dict())
    assert not torch.equal(ours.layer.weight, Sparse().layer.weight)


def test_plain_sgd_does_nothing_without_gradients():
    network = nn.Linear(2, 1)
    before = copy.deepcopy(network.state_dict())
    step_function(SGD(network.parameters(), lr=0.1))(lambda: torch.zeros(()))
    assert same_bytes(network.state_dict(), before)


class Own(SGD):
    def step(self, closure=None):
        raise NotImplementedError


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
