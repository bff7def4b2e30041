"""Descriptions of objects by class and constructor arguments."""

import inspect
import pickle
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn

from fl_lightning import IID, MLP, Algorithm, Classification, ConfigError, FedAvg, FedProx, Head, ProcessesEngine
from fl_lightning.algorithms import HistoryContrast, Proximal, TrainedPrototypeAlignment, WeightedMean
from fl_lightning.cli.catalogue import BASES, classes
from fl_lightning.core.arguments import (
    ArgumentsMixin,
    FieldsMixin,
    PartMixin,
    argument_types,
    choice,
    count,
    describe,
    number,
)


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


class Fields(FieldsMixin):
    section = "part"
    size: int = 1
    rate: float = number(0.5, "(0, 1]")


class More(Fields):
    name: str
    size: int = field(default=3, init=False)
    kind = "no option"


class Written(Fields):
    def __init__(self, sizes: "list[int]") -> None:  # a text, as after `from __future__ import annotations`
        super().__init__(size=len(sizes))


class Inherits(Written):
    pass


def test_fields_are_keyword_options_with_the_class_s_own_first():
    assert list(inspect.signature(More).parameters) == ["name", "rate"]
    assert (More(name="a").size, More(name="a", rate=1.0).rate) == (3, 1.0)
    assert describe(More(name="a"))["init_args"] == {"name": "a", "rate": 0.5}
    with pytest.raises(TypeError, match="size"):
        More(name="a", size=2)
    with pytest.raises(TypeError, match="positional"):
        Fields(2)


class Part(PartMixin):
    size: int = 1


class LargerPart(Part):
    rate: float = 0.5


def test_the_options_of_a_part_have_positions_with_the_base_class_s_first():
    assert list(inspect.signature(LargerPart).parameters) == ["size", "rate"]
    assert vars(LargerPart(2, 0.1)).items() >= {"size": 2, "rate": 0.1}.items()
    assert describe(LargerPart(2))["init_args"] == {"size": 2, "rate": 0.5}


def test_a_number_out_of_its_interval_is_refused():
    with pytest.raises(ConfigError, match=r"^part\.rate: 2\.0 "):
        Fields(rate=2.0)


class Checked(PartMixin):
    section = "part"
    size: int = count(2)
    kind: Literal["one", "two"] = choice("one", Literal["one", "two"])


@pytest.mark.parametrize(("key", "value"), [("size", 0), ("size", 10**13), ("kind", "three"), ("kind", None)])
def test_a_count_below_1_and_an_unknown_choice_are_refused(key, value):
    assert vars(Checked(3, "two")).items() >= {"size": 3, "kind": "two"}.items()
    with pytest.raises(ConfigError, match=rf"^part\.{key}: "):
        Checked(**{key: value})


def test_an_option_without_its_type_is_refused():
    with pytest.raises(TypeError, match=r"^Untyped\.size: "):
        type("Untyped", (Fields,), {"size": 2})


@pytest.mark.parametrize("kind", [Written, Inherits])
def test_a_written_constructor_is_kept_with_its_types(kind):
    assert (kind([1, 2]).size, describe(kind([1]))["init_args"]) == (2, {"sizes": [1]})
    assert argument_types(kind)["sizes"] == list[int]
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--part", type=Fields)
    assert parser.parse_args([f"--part={HERE}.{kind.__name__}", "--part.sizes=[4]"]).part.init_args.sizes == [4]
    with pytest.raises(ArgumentError, match="sizes"):
        parser.parse_args([f"--part={HERE}.{kind.__name__}", "--part.sizes=[a]"])


def test_the_parts_of_a_method_come_before_the_given_ones():
    class Own(Algorithm):
        beta: float = 0.1

        def own_terms(self):
            return [Proximal(self.beta)]

    given = HistoryContrast()
    assert [term.name for term in Own(loss_terms=[given]).loss_terms] == ["proximal", "history"]
    assert isinstance(FedAvg(weighting="uniform").aggregator, WeightedMean)
    assert FedAvg(weighting="uniform").aggregator.weighting == "uniform"


class OwnTerm(TrainedPrototypeAlignment):
    """A term of a user's module, which does not import the types of the options that it inherits."""

    extra: bool = True


@pytest.mark.parametrize("option", ["lam", "server_epochs", "margin", "extra"])
def test_a_wrong_value_of_an_inherited_option_of_a_term_is_refused(option):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(OwnTerm)
    with pytest.raises(ArgumentError, match=option):
        parser.parse_object({option: "hello"})


@pytest.mark.parametrize("kind", [kind for name in BASES for kind in classes(name) if issubclass(kind, PartMixin)])
def test_the_types_of_all_options_are_known(kind):
    """Otherwise the command line would pass any value on to the constructor."""
    assert not [one.name for one in inspect.signature(kind).parameters.values() if isinstance(one.annotation, str)]
