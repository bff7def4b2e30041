"""`compute_gradients` gives what `loss.backward()` gives, without its checks."""

import pytest
import torch
from torch import nn

from fl_lightning.client.losses import compute_gradients


def loss_of(network):
    return network(torch.arange(6.0).reshape(2, 3).to(network.weight)).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_and_hooks_are_those_of_backward(dtype):
    network, called = nn.Linear(3, 2, dtype=dtype), []
    network.weight.register_hook(lambda gradient: called.append("gradient"))
    network.bias.register_post_accumulate_grad_hook(lambda parameter: called.append("accumulated"))
    loss_of(network).backward()
    expected, hooks = [parameter.grad for parameter in network.parameters()], sorted(called)
    network.zero_grad()
    called.clear()
    compute_gradients(loss_of(network))
    assert all(map(torch.equal, (parameter.grad for parameter in network.parameters()), expected))
    assert sorted(called) == hooks == ["accumulated", "gradient"]


def test_a_second_pass_adds_to_the_gradients():
    network = nn.Linear(3, 2)
    for _ in range(2):
        compute_gradients(loss_of(network))
    twice = [parameter.grad for parameter in network.parameters()]
    network.zero_grad()
    (2 * loss_of(network)).backward()
    torch.testing.assert_close(twice, [parameter.grad for parameter in network.parameters()])


def test_the_tensors_that_the_pass_needed_are_freed():
    loss = loss_of(nn.Linear(3, 2))
    compute_gradients(loss)
    with pytest.raises(RuntimeError, match="second time"):
        compute_gradients(loss)


@pytest.mark.parametrize("loss", [torch.zeros(()), torch.zeros(2, requires_grad=True)], ids=["constant", "vector"])
def test_what_is_no_loss_is_refused_as_by_backward(loss):
    with pytest.raises(RuntimeError) as expected:
        loss.backward()
    with pytest.raises(RuntimeError) as refused:
        compute_gradients(loss)
    assert str(refused.value) == str(expected.value)


def test_a_tensor_of_another_class_computes_its_gradients_itself():
    class Counted(torch.Tensor):
        passes = 0

        def backward(self, *args, **options):
            Counted.passes += 1

    compute_gradients(torch.zeros(()).as_subclass(Counted))
    assert Counted.passes == 1
