"""The gate that everything named by an untrusted config passes: objects, paths to write to, other machines.

While a config that somebody else may have written is in use, `find_object` returns only what `allowed_objects` lists,
`check_writable` accepts only paths inside the run's folder, and `require_trust` refuses what leads to other machines.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fl_lightning import MOVED
from fl_lightning.core.catalogue import BASES, base
from fl_lightning.core.config import flatten
from fl_lightning.core.errors import ConfigError, one_line

CLIENT_CALLBACKS = ("EarlyStopping", "LearningRateMonitor", "DeviceStatsMonitor", "Timer", "EMAWeightAveraging")
"""Lightning's callbacks that any config may name: they take numbers and names, and touch no files."""


@dataclass
class Untrusted:
    """A config that somebody else may have written.

    Args:
        config: The config.
        source: What to call it in messages.
        fix: What the user can do where it is refused.
        folder: The only folder that it may write to, if any.

    Attributes:
        refusal: What was refused last; jsonargparse may have made something else of that error.
    """

    config: Mapping[str, Any]
    source: str
    fix: str
    folder: Path | None = None
    refusal: ConfigError | None = None

    def refuse(self, value: Any, key: str | None = None) -> ConfigError:
        """Return the error for a value that the config may not hold."""
        settings = flatten(self.config).items()
        key = key or next((name for name, held in settings if str(value) in str(held)), "config")
        what = f"{one_line(str(value))[:200]} is not allowed in a file that is not known to be yours"
        self.refusal = ConfigError(f"{self.source}{key}: {what}. {self.fix}")
        return self.refusal


_UNTRUSTED: ContextVar[Untrusted | None] = ContextVar("untrusted", default=None)


def begin(config: Untrusted) -> None:
    """Apply the gate to a config from here on, in the calling context."""
    _guard_jsonargparse()
    _UNTRUSTED.set(config)


@contextmanager
def untrusted(config: Untrusted) -> Iterator[None]:
    """Apply the gate to a config inside."""
    before = _UNTRUSTED.get()
    begin(config)
    try:
        yield
    finally:
        _UNTRUSTED.set(before)


def is_untrusted() -> bool:
    """Return whether the config in use may be somebody else's."""
    return _UNTRUSTED.get() is not None


def refusal() -> ConfigError | None:
    """Return what the gate refused last of the config in use, if anything."""
    config = _UNTRUSTED.get()
    return config.refusal if config else None


def find_object(path: str) -> Any:
    """Return the object that an import path names; the only way from text to an object.

    Raises:
        ConfigError: The config in use is untrusted and the path is not in `allowed_objects`.
        ImportError, AttributeError: There is no such object.
    """
    config = _UNTRUSTED.get()
    if config is None:
        try:
            return resolve_name(path)
        except ValueError as error:
            raise ImportError(error) from error
    if path not in allowed_objects():
        raise config.refuse(path)
    return allowed_objects()[path]


def check_writable(key: str, path: Path) -> None:
    """Refuse to write outside the run's folder for an untrusted config.

    Args:
        key: The key of the config that names the path.
        path: The file to write; links are resolved.

    Raises:
        ConfigError: Names the key and the path.
    """
    config = _UNTRUSTED.get()
    if config and not (config.folder and path.resolve().is_relative_to(config.folder.resolve())):
        raise config.refuse(path, key)


def require_trust(key: str, value: Any) -> None:
    """Refuse a value of an untrusted config that leads to another place or machine.

    Args:
        key: The key that has it.
        value: The value; nothing is refused for None, False and empty text.

    Raises:
        ConfigError: Names the key and the value.
    """
    config = _UNTRUSTED.get()
    if config and value:
        raise config.refuse(value, key)


@cache
def allowed_objects() -> dict[str, Any]:
    """Return all that an untrusted config may name, by import path."""
    from lightning.pytorch import callbacks
    from lightning.pytorch.loggers import Logger
    from torch import nn, optim
    from torchvision import models

    kinds = tuple(map(base, BASES))
    places: list[tuple[str, tuple[type, ...]]] = [
        ("fl_lightning", (*kinds, Logger)),
        ("fl_lightning.loggers.collection", (Logger,)),
        *((f"fl_lightning.{home}", kinds) for _, home, _ in BASES.values()),
        ("torch.optim", (optim.Optimizer,)),
        ("torch.optim.lr_scheduler", (optim.lr_scheduler.LRScheduler,)),
        ("torch.nn", (nn.Module,)),
    ]
    found: dict[str, Any] = {}
    for place, bases in places:
        module, root = import_module(place), f"{place.partition('.')[0]}."
        for name in getattr(module, "__all__", vars(module)):
            value = getattr(module, name)
            if inspect.isclass(value) and issubclass(value, bases) and value.__module__.startswith(root):
                found |= {f"{place}.{name}": value, f"{value.__module__}.{name}": value}
    found |= {
        f"fl_lightning.{before}.{name}": value
        for before, now in MOVED.items()
        for name, value in vars(import_module(f"fl_lightning.{now}")).items()
        if f"fl_lightning.{now}.{name}" in found
    }
    others = [getattr(callbacks, name) for name in CLIENT_CALLBACKS]
    others += [models.get_model_builder(name) for name in models.list_models(models)]
    for value in others:
        home = ".".join(value.__module__.split(".")[:-1])
        found |= {f"{home}.{value.__name__}": value, f"{value.__module__}.{value.__name__}": value}
    return found


@cache
def _guard_jsonargparse() -> None:
    """Have jsonargparse import by `find_object`, and read no other files, for an untrusted config."""
    from jsonargparse import _util, typing  # half a second

    usual_import, usual_mode = _util.import_object, _util._get_config_read_mode

    def import_object(name: Any, *args: Any, **options: Any) -> Any:
        if _UNTRUSTED.get() is None:
            return usual_import(name, *args, **options)
        if not isinstance(name, str) or "." not in name:
            raise ValueError(f"Expected a dot import path string: {name}")
        return find_object(name)

    def read_mode() -> str:
        if _UNTRUSTED.get():
            raise TypeError("an untrusted config names no other file of settings")  # then it is taken as text
        return usual_mode()

    ours = {"import_object": import_object, "_get_config_read_mode": read_mode}
    for module in [module for name, module in sys.modules.items() if name.startswith("jsonargparse.")]:
        # jsonargparse.typing imports only what its own code registers
        for name in ours.keys() & vars(module).keys() if module is not typing else ():
            setattr(module, name, ours[name])
