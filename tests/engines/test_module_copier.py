"""A copy from a copier is a deep copy: whatever is done to one reaches neither the next nor the original."""

import copy
import functools
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning.algorithms import UAPDFL, CwFedAvg, FedAvg, FedDW, FedProx, FedSiamDA, FedSKC
from fl_lightning.engines import module_copier
from fl_lightning.engines.module_copier import ModuleCopier
from fl_lightning.models import CNN, MLP, Head, ResNet8

SIAMESE = partial(MLP, head=Head(projection=8, prediction=8))


def everything(module):
    """Each attribute of each part of a module, tensors by their bytes; identity shows as the same number."""
    seen: dict[int, int] = {}

    def told(value):
        if id(value) in seen:
            return seen[id(value)]
        if isinstance(value, (torch.Tensor, nn.Module, list, dict)):
            seen[id(value)] = len(seen)
        if isinstance(value, torch.Tensor):
            return type(value).__name__, value.dtype, value.requires_grad, value.tolist()
        if isinstance(value, nn.Module):
            return type(value).__name__, told(value.__dict__)
        if isinstance(value, dict):
            return [(name, told(one)) for name, one in value.items()]
        if isinstance(value, (list, tuple)):
            return [told(one) for one in value]
        return value if isinstance(value, (int, float, str, bool, type(None))) else type(value).__name__

    return told(module)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("algorithm", [FedAvg, FedProx, FedSKC, FedDW, FedSiamDA, CwFedAvg, UAPDFL])
@pytest.mark.parametrize("model", [SIAMESE, CNN, ResNet8])
def test_a_copy_is_what_a_deep_copy_is(algorithm, model, monkeypatch):
    module = algorithm().client_module(model(in_shape=(3, 16, 16), num_classes=4), lambda p: torch.optim.SGD(p, lr=0.1))
    monkeypatch.setattr(module_copier, "copy_network", None)  # a deep copy would always be equal
    assert everything(ModuleCopier(module).build()) == everything(copy.deepcopy(module))


class Tied(nn.Module):
    """Two names for one weight, and a tensor that is no parameter."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.other.weight = self.one.weight
        self.frozen = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.plain = {"list": [torch.ones(2)]}


def test_a_copy_keeps_tied_and_frozen_weights_and_shares_nothing():
    module = Tied()
    before = everything(module)
    copier = ModuleCopier(module)
    spoilt = copier.build()
    assert spoilt.one.weight is spoilt.other.weight
    assert isinstance(spoilt.frozen, nn.Parameter)
    assert everything(spoilt) == before
    with torch.no_grad():
        spoilt.one.weight.fill_(7)
    spoilt.plain["list"][0].fill_(7)
    spoilt.plain["list"].append("more")
    spoilt.one = nn.Identity()
    spoilt.frozen.requires_grad_(True)
    spoilt.register_forward_hook(lambda *args: None)
    spoilt.eval()
    assert everything(module) == before
    assert everything(copier.build()) == before


class OwnCopy(nn.Module):
    """Says itself what a copy of it is."""

    def __init__(self, copies=0):
        super().__init__()
        self.copies = copies

    def __deepcopy__(self, memo):
        return OwnCopy(self.copies + 1)


class Unpicklable(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def __reduce_ex__(self, protocol):
        if protocol > 4:
            raise TypeError("not by this protocol")
        return super().__reduce_ex__(protocol)


def test_what_pickle_would_change_or_refuse_is_deep_copied():
    assert ModuleCopier(nn.Sequential(OwnCopy())).build()[0].copies == 1
    copier = ModuleCopier(Unpicklable())
    assert copier.build().weight is not copier.build().weight


def test_functions_and_classes_are_taken_over_as_they_are(monkeypatch):
    monkeypatch.setattr(module_copier, "copy_network", None)
    module = nn.Module()
    module.made = lambda: 3
    module.kind = type("Local", (), {})
    module.partly = functools.partial(module.made)
    copied = ModuleCopier(module).build()
    assert copied.made is module.made
    assert copied.kind is module.kind
    assert copied.partly() == 3
