"""What a config can name, told in one line each."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.resources import files

# Each kind's base class, and the config key that takes one.
BASES = {
    "algorithms": ("Algorithm", "algorithm"),
    "datasets": ("Dataset", "scenario.dataset"),
    "models": ("Backbone", "model"),
    "partitions": ("Partition", "scenario.partition"),
    "callbacks": ("RoundCallback", "callbacks"),
}
KINDS = (*BASES, "configs")


def things(kind: str) -> dict[str, str]:
    """Names and one-line descriptions of a kind, from the docstrings; of configs, from their first line."""
    if kind == "configs":
        folder = files("fl_lightning.configs")
        paths = sorted((p for p in folder.iterdir() if p.name.endswith(".yaml")), key=lambda p: p.name)
        return {path.name: path.read_text().splitlines()[0].lstrip("# ") for path in paths}
    module = import_module(f"fl_lightning.{'data' if kind in ('datasets', 'partitions') else kind}")
    base = getattr(module, BASES[kind][0])
    members = (getattr(module, name) for name in module.__all__)
    classes = [m for m in members if inspect.isclass(m) and issubclass(m, base) and m is not base]
    classes.sort(key=lambda cls: cls.__name__.lower())
    return {cls.__name__: (inspect.getdoc(cls) or "").partition("\n")[0] for cls in classes}
