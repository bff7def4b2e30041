"""Descriptions of objects by class and constructor arguments."""

import pickle
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import IID, MLP, Classification, FedProx, Head, ProcessesEngine
from fl_lightning.core.arguments import ArgumentsMixin, describe


class Base(ArgumentsMixin):
    def __init__(self, a, b=2):
        self.sum = a + b


class Derived(Base):
    def __init__(self, *values, scale=1.5, **options):
        super().__init__(7, b=8)


@dataclass
class Options(ArgumentsMixin):
    width: int = 3


def network(in_shape, num_classes):
    """Build a network."""


HERE = __name__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (np.float32(0.5), 0.5),
        (Path("a/b"), "a/b"),
        ((1, {"k": [True]}), [1, {"k": [True]}]),
        (list(range(101)), {"class_path": "builtins.list"}),
        (torch.zeros(3), {"class_path": "torch.Tensor"}),
        (network, {"class_path": f"{HERE}.network"}),
        (lambda: 0, {"class_path": f"{HERE}.<lambda>"}),
        (Options(4), {"width": 4}),
        (Base(1), {"class_path": f"{HERE}.Base", "init_args": {"b": 2, "a": 1}}),
        (
            Derived(1, 2, scale=2, c=3),
            {"class_path": f"{HERE}.Derived", "init_args": {"scale": 2, "values": [1, 2], "options": {"c": 3}}},
        ),
        (IID(), {"class_path": "fl_lightning.IID"}),
    ],
)
def test_values_are_described_as_in_a_config(value, expected):
    assert describe(value) == expected


def test_objects_of_the_package_are_described_with_their_defaults():
    described = describe(FedProx(mu=0.1))
    assert described["class_path"] == "fl_lightning.FedProx"
    assert described["init_args"] == {"mu": 0.1, "loss_terms": None, "aggregator": None, "buffers": "average"}
    model = describe(partial(MLP, hidden=(16,), head=Head(mapping=(8,))))
    assert (model["class_path"], model["init_args"]["hidden"]) == ("fl_lightning.MLP", [16])
    assert model["init_args"]["head"]["mapping"] == [8]
    assert describe(partial(torch.optim.SGD, lr=0.2))["init_args"]["lr"] == 0.2
    assert describe(nn.Linear(3, 4))["class_path"] == "torch.nn.modules.linear.Linear"
    assert describe(ProcessesEngine(workers=3))["init_args"]["workers"] == 3
    assert describe(Classification(0.1))["init_args"] == {"label_smoothing": 0.1}


def test_a_copied_object_keeps_its_arguments_and_data_are_not_kept():
    data = torch.zeros(1000)
    assert describe(pickle.loads(pickle.dumps(Base(3)))) == describe(Base(3))
    assert describe(Derived(data))["init_args"]["values"] == [{"class_path": "torch.Tensor"}]
    assert "0.0" not in repr(vars(Derived(data)))
