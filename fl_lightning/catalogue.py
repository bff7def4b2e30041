"""What a config can name, and what the commands take: from a file that is made beforehand, so that it needs no torch.

The file is `index.json`, beside this one. `python -m fl_lightning.indexing` makes it anew, which is due when a class or
an option came or went, or its docstring changed; a test tells.
"""

from __future__ import annotations

import inspect
import json
from functools import cache
from importlib import import_module
from importlib.resources import files
from typing import Any

# Each kind's base class, the module that lists its classes, both below this package, and the config key that takes one.
BASES: dict[str, tuple[str, str, str]] = {
    "algorithms": ("algorithms.Algorithm", "algorithms", "algorithm"),
    "loss_terms": ("client.LossTerm", "algorithms", "algorithm.loss_terms"),
    "aggregators": ("algorithms.Aggregator", "algorithms", "algorithm.aggregator"),
    "graphs": ("graphs.Graph", "algorithms", "algorithm.graph"),
    "datasets": ("data.Dataset", "data", "scenario.dataset"),
    "models": ("models.Backbone", "models", "model"),
    "partitions": ("data.Partition", "data", "scenario.partition"),
    "objectives": ("objectives.Objective", "objectives", "scenario.objective"),
    "engines": ("engines.Engine", "engines", "engine"),
    "callbacks": ("callbacks.RoundCallback", "callbacks", "callbacks"),
}
FILES = ("configs", "papers")
KINDS = (*BASES, *FILES)
FAMILIES = ("global_model", "personalized", "clustered", "decentralized")

_SCHEDULERS = (
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR"),
    *("MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR"),
)
OTHERS: dict[str, tuple[str, ...]] = {
    "optimizer": (
        *("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    ),
    "lr_scheduler": _SCHEDULERS,
    "round_lr_scheduler": _SCHEDULERS,
    "logger": ("CSVLogger", "MLFlowLogger", "TensorBoardLogger", "WandbRoundLogger"),
}
"""Keys that take classes which are mostly not ours, and the usual ones of those."""


@cache
def index() -> dict[str, Any]:
    """What `index.json` holds: `classes` by kind and name, and the options of `commands`."""
    return json.loads(files("fl_lightning").joinpath("index.json").read_text(encoding="utf-8"))


def things(kind: str) -> dict[str, str]:
    """Names and one-line descriptions of a kind, from the docstrings; of files, from their first line."""
    if kind in FILES:
        folder = files(f"fl_lightning.{kind}")
        paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
        return {path.name: path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for path in paths}
    return {name: entry["line"] for name, entry in index()["classes"][kind].items()}


def groups(kind: str) -> dict[str, dict[str, str]]:
    """What `things` gives, in groups with a heading each: algorithms by family, any other kind under its own name."""
    if kind != "algorithms":
        return {kind: things(kind)}
    entries = index()["classes"][kind]
    return {
        f"{kind}, {one.replace('_', ' ')}": {
            name: entry["line"] for name, entry in entries.items() if entry["family"] == one
        }
        for one in FAMILIES
    }


def kind_of(key: str) -> str | None:
    """The kind of what a config key takes, `algorithms` for `algorithm`; None where it is none of `BASES`."""
    return next((kind for kind, (_, _, taken) in BASES.items() if taken == key), None)


def names(key: str) -> list[str]:
    """The classes that a config key may name, without their modules; none where it takes no class."""
    kind = kind_of(key)
    return list(index()["classes"][kind]) if kind else list(OTHERS.get(key, ()))


# --- The classes themselves, which need torch ------------------------------------------------------------------------


def base(kind: str) -> type:
    """The class that all of a kind are."""
    module, _, name = f"fl_lightning.{BASES[kind][0]}".rpartition(".")
    return getattr(import_module(module), name)


def classes(kind: str) -> list[Any]:
    """The classes of a kind as the package exports them, by name; not its base class."""
    module = import_module(f"fl_lightning.{BASES[kind][1]}")
    members = (getattr(module, name) for name in module.__all__)
    found = [m for m in members if inspect.isclass(m) and issubclass(m, base(kind)) and m is not base(kind)]
    return sorted(found, key=lambda cls: cls.__name__.lower())
