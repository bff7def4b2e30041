"""Adapters in a network, means of products, and adapters of a smaller rank in a larger one."""

import copy
from functools import partial

import pytest
import torch
from adapters import ADAPTED, Adapter, LowRankMLP, factor
from torch import nn
from torch.nn import functional as F

from fl_lightning.algorithms.adapters.low_rank import AdapterLayer, adapter_layers, stack_factors
from fl_lightning.algorithms.adapters.ranks import cut_ranks, pad_ranks
from fl_lightning.core.errors import ConfigError


def test_the_layers_with_adapters_are_found_with_their_scaling_and_orientation():
    network = LowRankMLP((1, 8, 8), 10)
    assert adapter_layers(network) == (AdapterLayer("encoder.1", 0.5), AdapterLayer("encoder.3", 0.5, True))
    assert {layer.a for layer in adapter_layers(network)} == {factor(path, "A") for path in ADAPTED}
    names = network.state_dict().keys()
    assert all({layer.a, layer.b, layer.base} <= names for layer in adapter_layers(network))


@pytest.mark.parametrize(("m", "n"), [(4, 4), (5, 3)])
def test_the_product_of_the_stacked_factors_is_the_mean_of_the_products(float64, m, n):
    """Of unequal ranks and weights."""
    factors, weights = [(torch.randn(m, r), torch.randn(r, n)) for r in (1, 3, 2)], [7, 1, 3]
    exact = sum(w / 11 * b @ a for w, (b, a) in zip(weights, factors, strict=True))
    b, a = stack_factors(factors, weights)
    assert (b.shape, a.shape) == ((m, 6), (6, n))
    torch.testing.assert_close(b @ a, exact, rtol=0, atol=1e-12)


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_is_added_in_the_orientation_of_the_weight(float64, transposed):
    layer = Adapter(nn.Linear(3, 3), rank=2, scaling=0.7, transposed=transposed)
    nn.init.normal_(layer.lora_B["default"].weight)
    product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    merged = AdapterLayer("", 0.7, transposed).add(layer.base_layer.weight, product, torch.float64)
    x = torch.randn(4, 3)
    expected = F.linear(x, merged.T if transposed else merged, layer.base_layer.bias)
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)


def smaller(network, rank):
    """Return a network with adapters of a smaller rank: the first rows and columns of another's."""
    one = LowRankMLP((1, 8, 8), 10, rank=rank, dropout=0.0)
    one.load_state_dict(cut_ranks(network.state_dict(), rank))
    return one


OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "Adam": partial(torch.optim.Adam, lr=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_padded_adapter_trains_as_a_smaller_one(float64, optimizer):
    whole = LowRankMLP((1, 8, 8), 10, rank=4, dropout=0.0)
    for layer in (whole.encoder[1], whole.encoder[3]):
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    small = smaller(whole, 2)
    padded = copy.deepcopy(whole)
    padded.load_state_dict(pad_ranks(small.state_dict(), whole))
    x, y = torch.randn(20, 64), torch.arange(20) % 10
    for network in (small, padded):
        step = OPTIMIZERS[optimizer](network.parameters())
        for _ in range(5):
            step.zero_grad()
            F.cross_entropy(network(x), y).backward()
            for name, parameter in network.named_parameters():
                if network is padded and "lora" in name:
                    unused = parameter.grad[2:] if "lora_A" in name else parameter.grad[:, 2:]
                    assert not unused.any()
            step.step()
    end = padded.state_dict()
    for name, value in small.state_dict().items():
        torch.testing.assert_close(cut_ranks(end, 2)[name], value, rtol=0, atol=1e-12)
    for path in ADAPTED:
        assert not end[factor(path, "A")][2:].any()
        assert not end[factor(path, "B")][:, 2:].any()
        assert not torch.equal(end[factor(path, "A")][:2], whole.state_dict()[factor(path, "A")][:2])
        assert not torch.equal(
            end[factor(path, "A")], pad_ranks(smaller(whole, 2).state_dict(), whole)[factor(path, "A")]
        )


def test_without_a_rank_nothing_is_cut():
    model = LowRankMLP((1, 8, 8), 10).state_dict()
    assert cut_ranks(model, None) is model


class Tied(nn.Module):
    """A layer with an adapter, whose weight is also another layer's."""

    def __init__(self):
        super().__init__()
        self.out = Adapter(nn.Linear(4, 4))
        self.embed = nn.Embedding(4, 4)
        self.embed.weight = self.out.base_layer.weight


class WrongSize(nn.Module):
    """A layer with an adapter of another size."""

    def __init__(self):
        super().__init__()
        self.out = Adapter(nn.Linear(4, 4))
        self.out.lora_B["default"] = nn.Linear(2, 8, bias=False)


class WithMagnitude(nn.Module):
    """A layer with an adapter of DoRA."""

    def __init__(self):
        super().__init__()
        self.out = Adapter(nn.Linear(4, 4))
        self.out.lora_magnitude_vector = nn.ModuleDict({"default": nn.Linear(1, 1)})


@pytest.mark.parametrize("network", [Tied, WrongSize, WithMagnitude])
def test_other_adapters_are_refused_with_the_name_of_the_layer(network):
    with pytest.raises(ConfigError, match=r"^model: .*\bout\b"):
        adapter_layers(network())
