"""Describe objects by their class and constructor arguments, for the `config.yaml` of runs started from Python."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

import numpy as np

PLAIN = (bool, int, float, str)
MOST_ELEMENTS = 100
"""Maximum length of a list or mapping whose elements `describe` returns. For a longer one, it returns the class."""


class ArgumentsMixin:
    """Base class that records constructor arguments, so that an object can be described in a config file."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__init__" in vars(cls):
            cls.__init__ = _keep_arguments(cls.__init__)  # type: ignore[method-assign]


def _keep_arguments(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def init_and_keep(self: ArgumentsMixin, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in vars(self):  # otherwise a subclass's constructor calls this one
            vars(self)["_arguments"] = (tuple(map(describe, args)), describe(kwargs))
        init(self, *args, **kwargs)

    return init_and_keep


def describe(value: Any) -> Any:
    """Convert a value to its form in a config: for example, an object to its `class_path` and `init_args`.

    Arguments with defaults are included, as in a resolved config. The arguments of an object are known if its class
    derives from `ArgumentsMixin` or is a dataclass. Of other objects, only plain attributes with the names of arguments
    are known. A tensor is described by its class path only.
    """
    if isinstance(value, np.generic):
        value = value.item()
    for kind in PLAIN:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict | list | tuple):
        if len(value) > MOST_ELEMENTS:
            return {"class_path": _import_path(type(value))}
        if isinstance(value, dict):
            return {str(key): describe(each) for key, each in value.items()}
        return [describe(each) for each in value]
    if value is None or isinstance(value, Path):
        return value and str(value)
    if isinstance(value, partial):
        return _describe_call(value.func, value.args, value.keywords)
    if callable(value) and hasattr(value, "__qualname__"):
        return _describe_call(value)
    if "_arguments" in getattr(value, "__dict__", {}):
        return _describe_call(type(value), *vars(value)["_arguments"])
    if is_dataclass(value):
        return {field.name: describe(getattr(value, field.name)) for field in fields(value) if field.init}
    attributes, signature = getattr(value, "__dict__", {}), _signature(type(value))
    known = {name: attributes[name] for name in signature.parameters if isinstance(attributes.get(name), PLAIN)}
    return _describe_call(type(value), (), known)


def _describe_call(function: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}) -> dict[str, Any]:
    """Describe a call of a class or function as `class_path` and `init_args`, default arguments included."""
    signature = _signature(function)
    defaults = {name: each.default for name, each in signature.parameters.items() if each.default is not each.empty}
    try:
        given = signature.bind_partial(*args, **kwargs).arguments
    except TypeError:  # the call itself raises an error that names the argument
        given = dict(kwargs)
    arguments = describe(defaults) | describe(given)
    return {"class_path": _import_path(function)} | ({"init_args": arguments} if arguments else {})


def _signature(function: Any) -> inspect.Signature:
    """Return the signature of a class or function, or an empty signature if Python does not know it (some builtins)."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return inspect.Signature()


def _import_path(kind: Any) -> str:
    """Return the import path of a class or function. If this package exports it, this is `fl_lightning.<name>`."""
    from fl_lightning import HOMES

    module, name = getattr(kind, "__module__", None) or "builtins", kind.__qualname__
    return f"fl_lightning.{name}" if module.startswith("fl_lightning.") and name in HOMES else f"{module}.{name}"
