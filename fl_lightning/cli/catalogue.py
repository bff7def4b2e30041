"""List the names that a config can use: classes, configs and papers. Reads source files, without importing torch."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fl_lightning.cli.signatures import Class, find_class, parameters
from fl_lightning.cli.signatures import classes as classes_in
from fl_lightning.core.config_files import shipped, shipped_text

BASES: dict[str, tuple[str, str, str]] = {
    "algorithms": ("algorithms.Algorithm", "algorithms", "algorithm"),
    "loss_terms": ("client.loss_term.LossTerm", "algorithms", "algorithm.loss_terms"),
    "aggregators": ("algorithms.Aggregator", "algorithms", "algorithm.aggregator"),
    "graphs": ("algorithms.decentralized.topology.Graph", "algorithms", "algorithm.graph"),
    "client_samplers": ("algorithms.client_sampling.ClientSampler", "algorithms", "client_sampler"),
    "clocks": ("scheduling.Clock", "scheduling", "clock"),
    "round_policies": ("scheduling.RoundPolicy", "scheduling", "round_policy"),
    "adversaries": ("attacks.Adversary", "attacks", "adversary"),
    "compressors": ("compression.Compressor", "compression", "compression"),
    "datasets": ("data.Dataset", "data", "scenario.dataset"),
    "models": ("models.Backbone", "models", "model"),
    "partitions": ("data.Partition", "data", "scenario.partition"),
    "objectives": ("core.objectives.Objective", "core.objectives", "scenario.objective"),
    "engines": ("engines.Engine", "engines", "engine"),
    "callbacks": ("callbacks.RoundCallback", "callbacks", "callbacks"),
}
"""For each kind of class: its base class, the module that exports its classes, and the config key that takes them.

The first two are relative to this package."""
FILES = ("configs", "papers")
KINDS = (*BASES, *FILES)
FAMILIES = ("global_model", "personalized", "clustered", "decentralized", "adapters")

_SCHEDULERS = (
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR", "LinearLR"),
    *("MultiStepLR", "OneCycleLR", "PolynomialLR", "ReduceLROnPlateau", "StepLR", "WarmupCosine"),
)
OTHERS: dict[str, tuple[str, ...]] = {
    "optimizer": (
        *("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    ),
    "lr_scheduler": _SCHEDULERS,
    "round_lr_scheduler": _SCHEDULERS,
    "logger": ("CSVLogger", "MLFlowLogger", "TensorBoardLogger", "WandbRoundLogger"),
    "client_callbacks": (
        *("DeviceStatsMonitor", "EarlyStopping", "EMAWeightAveraging", "LambdaCallback", "LearningRateMonitor"),
        *("ModelPruning", "ThroughputMonitor", "Timer", "WeightAveraging"),
    ),
}
"""For keys that take classes of other packages, such as `optimizer`: the classes to list and suggest."""
SEVERAL = {"models": ("Mixed",)}
"""Classes that stand for several objects of a kind, whose base class they do not have."""

SAME_KIND = {"model.models": "model", "adversary.data": "adversary", "download_compression": "compression"}
"""Keys that take classes that another key takes, or a list of them."""

CLASS_KEYS = {*(key for _, _, key in BASES.values()), *OTHERS, *SAME_KIND}
"""Keys that take a class, or a list of them."""

SET_BY_DATA = ("in_shape", "num_classes")
"""Arguments of models that are set from the dataset, not by the user."""

_SCHEDULER_SOURCES = (("torch", "optim/lr_scheduler.py"), ("fl_lightning.client", "schedules.py"))
SOURCES: dict[str, tuple[tuple[str, str], ...]] = {
    "optimizer": (("torch", "optim/*.py"),),
    "lr_scheduler": _SCHEDULER_SOURCES,
    "round_lr_scheduler": _SCHEDULER_SOURCES,
    "logger": (("fl_lightning.loggers", "*.py"), ("lightning", "pytorch/loggers/*.py")),
    "callbacks": (("lightning", "pytorch/callbacks/**/*.py"),),
    "client_callbacks": (("lightning", "pytorch/callbacks/**/*.py"), ("fl_lightning.callbacks", "*.py")),
    "model": (("torchvision", "models/*.py"),),
}
"""Source files of other packages in which to look up the classes that users give for a key."""


def classes_of(kind: str) -> dict[str, Class]:
    """Return a description (`Class`) of each class of one kind, such as `algorithms`, by name. Only reads sources."""
    base, package, _ = BASES[kind]
    several = {name: find_class(f"fl_lightning.{package}.{name}") for name in SEVERAL.get(kind, ())}
    found = classes_in(f"fl_lightning.{package}", f"fl_lightning.{base}") | several
    return dict(sorted(found.items(), key=lambda item: item[0].lower()))


@cache
def class_options(kind: str, name: str) -> dict[str, dict[str, Any]]:
    """Return the constructor arguments of a class that users can set, by name, described for help texts."""
    left_out = SET_BY_DATA if kind == "models" else ()
    return {one.name: one.option for one in parameters(classes_of(kind)[name]) if one.name not in left_out}


def descriptions(kind: str) -> dict[str, str]:
    """Return the one-line description of each class or file of one kind, such as `models` or `configs`, by name."""
    if kind in FILES:
        return {name: shipped_text(name, kind).partition("\n")[0].lstrip("# ") for name in shipped(kind)}
    return {name: one.summary for name, one in classes_of(kind).items()}


def groups(kind: str) -> dict[str, dict[str, str]]:
    """Return the classes or files of a kind, such as `models`, in groups: descriptions by heading and name.

    Algorithms have one heading per family. Other kinds have a single heading.
    """
    if kind != "algorithms":
        return {kind: descriptions(kind)}
    families: dict[str, dict[str, str]] = {family: {} for family in FAMILIES}
    for name, cls in classes_of(kind).items():
        families[cls.module.name.split(".")[2]][name] = cls.summary
    return {f"{kind}, {family.replace('_', ' ')}": lines for family, lines in families.items()}


def kind_of(key: str) -> str | None:
    """Return the kind of classes that a config key takes, such as `algorithms` for `algorithm`; None for other keys."""
    key = SAME_KIND.get(key, key)
    return next((kind for kind, (_, _, taken) in BASES.items() if taken == key), None)


def names(key: str) -> list[str]:
    """Return the names of the classes that a config key takes; an empty list if it takes no class."""
    kind = kind_of(key)
    return list(classes_of(kind)) if kind else list(OTHERS.get(key, ()))


# --- Classes of other packages, read from their sources because importing them takes seconds ---


def arguments(key: str, path: str) -> list[str] | None:
    """Return the argument names of a class or function, without importing it; None if its source is not at hand.

    Args:
        key: The key that names the class.
        path: The class's name or import path.
    """
    module, _, name = path.rpartition(".")
    kind = kind_of(key)
    known = classes_of(kind).get(name) if kind else None
    if kind and known and module in ("", "fl_lightning", known.module.name, f"fl_lightning.{BASES[kind][1]}"):
        return list(class_options(kind, name))
    if key == "engine" and not module:
        return arguments(key, f"fl_lightning.engines.{name.capitalize()}Engine")
    homes = {"", *(package.partition(".")[0] for package, _ in SOURCES.get(key, ()))}
    return _arguments_in_source(key, name) if module.partition(".")[0] in homes and name in names(key) else None


def is_in_source(key: str, name: str) -> bool:
    """Return whether `name` is a class or function in the packages for a config key, such as torchvision for `model`.

    The source files are searched without importing the packages.
    """
    return any(re.search(rf"^(class|def) {re.escape(name)}\b", text, re.MULTILINE) for text in _sources(key))


@cache
def _arguments_in_source(key: str, name: str) -> list[str] | None:
    found = (re.search(rf"^class {name}\b.*\n(?:[\s#)].*\n|\n)*", text, re.MULTILINE) for text in _sources(key))
    for part in filter(None, found):
        for one in ast.walk(ast.parse(part[0])):
            if isinstance(one, ast.FunctionDef) and one.name == "__init__" and not one.args.kwarg:
                return [argument.arg for argument in (*one.args.args[1:], *one.args.kwonlyargs)]
    return None


def _sources(key: str) -> Iterator[str]:
    for package, pattern in SOURCES.get(key, ()):
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for path in sorted(Path(folder).glob(pattern)):
                yield path.read_text(encoding="utf-8")


# --- Imported classes; these functions import torch ---


def base(kind: str) -> type:
    """Import and return the base class of one kind of classes, such as `Algorithm` for `algorithms`."""
    module, _, name = f"fl_lightning.{BASES[kind][0]}".rpartition(".")
    return getattr(import_module(module), name)


def classes(kind: str) -> list[Any]:
    """Import and return this package's classes of one kind in alphabetical order, without their base class."""
    module = import_module(f"fl_lightning.{BASES[kind][1]}")
    members = (getattr(module, name) for name in module.__all__)
    kept = [m for m in members if inspect.isclass(m) and issubclass(m, base(kind)) and m is not base(kind)]
    kept += [getattr(module, name) for name in SEVERAL.get(kind, ())]
    return sorted(kept, key=lambda cls: cls.__name__.lower())
