"""Fixed tensors: which they are, copies that share them, and the memory of another process."""

import copy

import torch
from torch import nn

from fl_lightning.core.fixed_tensors import (
    alias,
    copy_network,
    copy_shared_tensors,
    fixed_tensors,
    is_shared,
    share,
    shared_memory,
    shared_tensors,
    use_memory,
)


class Views(nn.Module):
    """A frozen layer, a view that begins at its weight's address, empty tensors, tied names, and a trained layer."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(3, 2).requires_grad_(False)
        self.tied = nn.Linear(3, 2).requires_grad_(False)
        self.tied.weight = self.frozen.weight
        self.frozen.register_buffer("row", self.frozen.weight.detach()[0])
        self.frozen.register_buffer("empty", torch.zeros(0))
        self.frozen.register_buffer("other_empty", torch.zeros(0, 4))
        self.trained = nn.Linear(2, 2)


def shared_views():
    network = Views()
    share(network, fixed_tensors(network))
    return network


def values_of(network):
    return {name: value.clone() for name, value in [*network.named_parameters(), *network.named_buffers()]}


def test_memory_of_another_process_keeps_forms_values_and_ties():
    network = shared_views()
    before, memory = values_of(network), shared_memory(network)
    assert "tied.weight" not in memory
    received = {name: value.clone() for name, value in memory.items()}
    use_memory(network, received)
    for name, value in values_of(network).items():
        assert value.shape == before[name].shape
        assert torch.equal(value, before[name])
    assert network.frozen.weight.data_ptr() == received["frozen.weight"].data_ptr() == network.tied.weight.data_ptr()
    assert not shared_tensors(network).keys() & {"trained.weight", "trained.bias"}


def test_a_copy_shares_memory_but_no_options():
    network = shared_views()
    copied = copy_network(network)
    for name, tensor in shared_tensors(network).items():
        other = shared_tensors(copied)[name]
        assert other is not tensor
        assert other.data_ptr() == tensor.data_ptr()
    assert copied.trained.weight.data_ptr() != network.trained.weight.data_ptr()
    copied.requires_grad_(True)
    copied.to(torch.float64)
    assert not network.frozen.weight.requires_grad
    assert network.frozen.weight.dtype == torch.float32


def test_a_network_with_memory_of_its_own_shares_nothing():
    network = shared_views()
    copied = copy_network(network)
    copy_shared_tensors(copied, {"frozen.bias"})
    assert not is_shared(copied.frozen.bias)
    assert is_shared(copied.frozen.weight)
    copy_shared_tensors(copied)
    before = values_of(network)
    with torch.no_grad():
        for value in [*copied.parameters(), *copied.buffers()]:
            value.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in values_of(network).items())
    assert copied.tied.weight is copied.frozen.weight


def test_tensors_of_other_classes_are_copied():
    class Quantized(nn.Parameter):
        def __deepcopy__(self, memo):
            return Quantized(copy.deepcopy(self.data), False)

    original = Quantized(torch.ones(2), False)
    other = alias(original)
    assert type(other) is Quantized
    assert other.data_ptr() != original.data_ptr()
