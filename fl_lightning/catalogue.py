"""What a config can name, told in one line each."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.resources import files
from typing import Any

from fl_lightning.algorithms import Aggregator, Algorithm, Graph
from fl_lightning.callbacks import RoundCallback
from fl_lightning.client import LossTerm
from fl_lightning.data import Dataset, Partition
from fl_lightning.engines import Engine
from fl_lightning.models import Backbone
from fl_lightning.objectives import Objective

# Each kind's base class, the module that lists them, and the config key that takes one.
BASES: dict[str, tuple[type, str, str]] = {
    "algorithms": (Algorithm, "algorithms", "algorithm"),
    "loss_terms": (LossTerm, "algorithms", "algorithm.loss_terms"),
    "aggregators": (Aggregator, "algorithms", "algorithm.aggregator"),
    "graphs": (Graph, "algorithms", "algorithm.graph"),
    "datasets": (Dataset, "data", "scenario.dataset"),
    "models": (Backbone, "models", "model"),
    "partitions": (Partition, "data", "scenario.partition"),
    "objectives": (Objective, "objectives", "scenario.objective"),
    "engines": (Engine, "engines", "engine"),
    "callbacks": (RoundCallback, "callbacks", "callbacks"),
}
FILES = ("configs", "papers")
KINDS = (*BASES, *FILES)
FAMILIES = ("global_model", "personalized", "clustered", "decentralized")


def things(kind: str) -> dict[str, str]:
    """Names and one-line descriptions of a kind, from the docstrings; of files, from their first line."""
    if kind in FILES:
        folder = files(f"fl_lightning.{kind}")
        paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
        return {path.name: path.read_text().splitlines()[0].lstrip("# ") for path in paths}
    return {cls.__name__: (inspect.getdoc(cls) or "").partition("\n")[0] for cls in classes(kind)}


def groups(kind: str) -> dict[str, dict[str, str]]:
    """What `things` gives, in groups with a heading each: algorithms by family, any other kind under its own name."""
    if kind != "algorithms":
        return {kind: things(kind)}
    family, lines = {cls.__name__: cls.family() for cls in classes(kind)}, things(kind)
    return {
        f"{kind}, {one.replace('_', ' ')}": {name: line for name, line in lines.items() if family[name] == one}
        for one in FAMILIES
    }


def classes(kind: str) -> list[Any]:
    """The classes of a kind, by name; not its base class."""
    base, listing, _ = BASES[kind]
    module = import_module(f"fl_lightning.{listing}")
    members = (getattr(module, name) for name in module.__all__)
    found = [m for m in members if inspect.isclass(m) and issubclass(m, base) and m is not base]
    return sorted(found, key=lambda cls: cls.__name__.lower())
