"""One optimizer over stacked rows against an optimizer for each row."""

from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import load_optimizer_tensors, optimizer_tensors
from fl_lightning.engines.stacked import OPTIMIZERS
from fl_lightning.engines.stacked_optimizer import BlockOptimizer

pytestmark = pytest.mark.numeric

ROWS = 7


class Odd(nn.Module):
    """Parameters of several shapes, one a single number, one that never has a gradient."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
        self.idle = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def in_groups(parameters):
    """Two groups with options of their own, in another order than the module's."""
    scale, weight, idle, bias = parameters
    groups = [{"params": [bias, scale], "lr": 0.03}, {"params": [idle, weight], "weight_decay": 0.1}]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


TOGETHER = [range(ROWS), range(4), range(ROWS)]
APART = [range(ROWS), range(ROWS), [0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [5], range(ROWS), [1, 3, 5], range(ROWS)]


def alone(factory, weights, started):
    """A module and its optimizer for each row."""
    for own, state in zip(weights, started, strict=True):
        module = Odd()
        module.load_state_dict(own)
        optimizer = factory(list(module.parameters()))
        if state:
            load_optimizer_tensors(optimizer, state)
        yield module, optimizer


def assert_rows_step_as_alone(factory, started, steps, tolerance=1e-12):
    torch.manual_seed(0)
    names = list(dict(Odd().named_parameters()))
    weights = [{name: torch.randn_like(value) for name, value in Odd().state_dict().items()} for _ in range(ROWS)]
    each = list(alone(factory, weights, started))
    client = ClientModule(Odd(), optimizer=lambda parameters: factory(list(parameters)))
    stacks = {name: torch.stack([own[name] for own in weights]) for name in names}
    blocks = BlockOptimizer(client, stacks, started)
    for step in steps:
        rows = list(step)
        gradients = {name: torch.randn(len(rows), *weights[0][name].shape).double() for name in names if name != "idle"}
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]) if len(rows) == 5 else (rows,):  # of two kinds
            blocks.set_gradients(
                half, {name: value[[rows.index(row) for row in half]] for name, value in gradients.items()}
            )
        blocks.optimizer.step()
        blocks.optimizer.zero_grad()
        for place, row in enumerate(rows):
            module, optimizer = each[row]
            for name, gradient in gradients.items():
                module.get_parameter(name).grad = gradient[place]
            optimizer.step()
            optimizer.zero_grad()
    for row, (module, optimizer) in enumerate(each):
        for name, value in module.state_dict().items():
            assert torch.allclose(stacks[name][row], value, rtol=tolerance, atol=tolerance), (row, name)
        kept, state = optimizer_tensors(optimizer), blocks.state_of(row)
        assert state.keys() == kept.keys()
        for key, value in kept.items():
            assert state[key].shape == value.shape
            assert torch.allclose(state[key], value, rtol=tolerance, atol=tolerance), (row, key)
    return blocks


def kept_after(factory, steps):
    """What an optimizer keeps after so many steps."""
    module = Odd()
    optimizer = factory(list(module.parameters()))
    for _ in range(steps):
        for name, parameter in module.named_parameters():
            parameter.grad = None if name == "idle" else torch.randn_like(parameter)
        optimizer.step()
    return optimizer_tensors(optimizer) if steps else {}


FACTORIES = {name: partial(getattr(torch.optim, name), lr=0.01) for name in OPTIMIZERS} | {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "Adam with maxima": partial(torch.optim.Adam, lr=0.01, amsgrad=True, foreach=False),
    "Adam fused": partial(torch.optim.Adam, lr=0.01, fused=True),
    "groups": in_groups,
}


@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("begun", [[0] * ROWS, [3, 3, 0, 0, 2, 2, 2]], ids=["fresh", "kept"])
@pytest.mark.parametrize("steps", [TOGETHER, APART], ids=["together", "apart"])
def test_rows_step_as_under_optimizers_of_their_own(name, begun, steps):
    torch.manual_seed(1)
    factory = FACTORIES[name]
    tolerance = 1e-7 if name == "ASGD" else 1e-12  # whose step size torch keeps in float32 for several parameters
    assert_rows_step_as_alone(factory, [kept_after(factory, taken) for taken in begun], steps, tolerance)


def test_rows_that_step_together_are_one_parameter():
    blocks = assert_rows_step_as_alone(FACTORIES["Adam"], [{}] * ROWS, APART)
    assert blocks.blocks == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7)]
    client = ClientModule(Odd(), optimizer=FACTORIES["Adam"])
    stacks = {name: torch.zeros(ROWS, *value.shape).double() for name, value in Odd().named_parameters()}
    blocks = BlockOptimizer(client, stacks, [{}] * ROWS)
    for rows in (range(ROWS), range(4), range(ROWS), [4, 5]):
        blocks.set_gradients(list(rows), {})
    assert blocks.blocks == [(0, 4), (4, 6), (6, 7)]
    assert [len(group["params"]) for group in blocks.optimizer.param_groups] == [3 * 4]
    assert all(group["foreach"] for group in blocks.optimizer.param_groups)
