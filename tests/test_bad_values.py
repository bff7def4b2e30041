"""Numbers that nothing can be computed with are refused where they are given, before round 1."""

import inspect
import math

import numpy as np
import pytest
from experiments import experiment

from fl_lightning.catalogue import classes
from fl_lightning.errors import ConfigError, blame, check_number
from fl_lightning.models import CNN

SHAPES = {"BiLSTM": (12,), "FastText": (12,), "TextCNN": (12,)}
REQUIRED = {"Splits": {"eps1": 0.4, "eps2": 1.6, "min_rounds": 20, "min_size": 2, "weighting": "uniform"}}
INFINITE = {("UAPDFL", "th_i")}
"""Where a class says what infinity means."""


def numbers(type_name):
    """Each number that a config can give to a class: the kind of class, the class, the name."""
    for kind in ("algorithms", "loss_terms", "aggregators", "graphs", "models", "engines"):
        for cls in classes(kind):
            for parameter in inspect.signature(cls).parameters.values():
                if parameter.annotation.split(" | ")[0] == type_name and parameter.name != "num_classes":
                    yield pytest.param(kind, cls, parameter.name, id=f"{cls.__name__}.{parameter.name}")


def made(kind, cls, **given):
    """An instance, as a config would have it made."""
    if kind == "models":
        given |= {"in_shape": SHAPES.get(cls.__name__, (3, 32, 32)), "num_classes": 3}
        with blame("model"):
            return cls(**given)
    return cls(**REQUIRED.get(cls.__name__, {}) | given)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("kind", "cls", "name"), list(numbers("float")))
def test_every_number_of_every_class_is_finite(kind, cls, name, value):
    if value == math.inf and (cls.__name__, name) in INFINITE:
        assert getattr(made(kind, cls, **{name: value}), name) == math.inf
        return
    with pytest.raises(ConfigError, match=rf"^(algorithm|model|engine)\.[\w.]+: {value} is ") as told:
        made(kind, cls, **{name: value})
    assert name in str(told.value) or name == "value"  # UnitAlignment's is `unit` to its algorithm


@pytest.mark.parametrize("value", [0, -1, 10**18])
@pytest.mark.parametrize(("kind", "cls", "name"), list(numbers("int")))
def test_every_count_is_refused_in_one_line_or_runs(kind, cls, name, value, tmp_path):
    """What is not refused at once is either a count that makes sense or refused before round 1."""
    try:
        thing = made(kind, cls, **{name: value})
        if kind in ("algorithms", "engines") and cls.__name__ != "RayEngine":
            experiment(tmp_path / "run", **{kind.removesuffix("s"): thing})._build()
        elif kind == "graphs":
            assert thing.links(6, np.random.default_rng(0)).shape == (6, 6)
        refused = ""
    except ConfigError as error:
        refused = str(error)
    assert refused or value >= 0
    assert value >= 0 or name in refused
    assert "\n" not in refused
    assert "[enforce fail" not in refused
    assert not list(tmp_path.iterdir())


def test_there_are_numbers_to_try():
    assert len(list(numbers("float"))) > 60
    assert len(list(numbers("int"))) > 30


@pytest.mark.parametrize(
    ("within", "inside", "outside"),
    [
        ("[0, inf)", [0, 0.5, 1e308, 10**400], {-1: "below 0", math.inf: "no finite number", math.nan: "no finite"}),
        ("(0, inf)", [5e-324], {0: "not above 0", -math.inf: "no finite number"}),
        ("[0, 1)", [0, 0.999], {1: r"outside \[0, 1\)", -0.1: r"outside \[0, 1\)", math.nan: "no finite number"}),
        ("(0, 1]", [1, 0.1], {0: r"outside \(0, 1\]", 1.1: r"outside \(0, 1\]"}),
        ("[0, inf]", [math.inf], {math.nan: "no finite number", -1: "below 0"}),
        ("[2, inf)", [2], {1: "below 2"}),
        ("(-inf, inf)", [-1e308, 0], {math.inf: "no finite number", -math.inf: "no finite number"}),
    ],
)
def test_a_number_is_in_its_interval(within, inside, outside):
    for value in [None, *inside]:
        check_number("key", value, within, "mend")
    for value, message in outside.items():
        with pytest.raises(ConfigError, match=rf"^key: {value} is {message}.*; mend$"):
            check_number("key", value, within, "mend")


@pytest.mark.parametrize("width", [10**9, 10**13, 10**18, 10**30])
def test_a_model_larger_than_the_memory_is_told_of_as_such(width):
    with pytest.raises(ConfigError, match=r"^model: too large for this machine's memory$"):
        made("models", CNN, feature_dim=width)
