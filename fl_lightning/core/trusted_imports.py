"""Restrict what an untrusted config can import, where it can write, and which machines it can contact.

While a config that another user may have written is in use, `find_object` returns only the objects that the config is
allowed to name, `check_writable` accepts only paths inside the run's folder, and `require_trust` refuses what leads to
other machines.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from types import GenericAlias
from typing import Any

from fl_lightning.core.config import flatten
from fl_lightning.core.errors import ConfigError, one_line


@dataclass
class Untrusted:
    """A config that may have been written by another user.

    Args:
        config: The config.
        source: Name of the config in messages.
        fix: What the user can do if the config is refused.
        folder: The only folder that it may write to, if any.
        allowed: Returns the objects that the config may name, by import path; none by default. Called at each import.

    Attributes:
        refusal: The last refusal. jsonargparse may have raised another error instead.
    """

    config: Mapping[str, Any]
    source: str
    fix: str
    folder: Path | None = None
    allowed: Callable[[], Mapping[str, Any]] = dict
    refusal: ConfigError | None = None

    def refuse(self, value: Any, key: str | None = None) -> ConfigError:
        """Return a `ConfigError` for a value that this untrusted config may not contain. The caller raises it.

        The error is also stored in the attribute `refusal`.
        """
        settings = flatten(self.config).items()
        key = key or next((name for name, held in settings if str(value) in str(held)), "config")
        what = f"{one_line(str(value))[:200]} is not allowed in a file that is not known to be yours"
        self.refusal = ConfigError(f"{self.source}{key}: {what}. {self.fix}")
        return self.refusal


_UNTRUSTED: ContextVar[Untrusted | None] = ContextVar("untrusted", default=None)


def begin(config: Untrusted) -> None:
    """Restrict what an untrusted config can import and write, until the caller's `contextvars` context ends."""
    _guard_jsonargparse()
    _UNTRUSTED.set(config)


@contextmanager
def untrusted(config: Untrusted) -> Iterator[None]:
    """Context in which an untrusted config can import only allowed objects and write only to its run folder."""
    before = _UNTRUSTED.get()
    begin(config)
    try:
        yield
    finally:
        _UNTRUSTED.set(before)


def is_untrusted() -> bool:
    """Return whether the config in use may have been written by another user."""
    return _UNTRUSTED.get() is not None


def refusal() -> ConfigError | None:
    """Return the last error about a value that the config in use may not contain, or None if none was refused."""
    config = _UNTRUSTED.get()
    return config.refusal if config else None


def find_object(path: str) -> Any:
    """Import and return the object at an import path from a config. Refuse objects that the config may not name.

    Raises:
        ConfigError: The config in use is untrusted and may not name the object.
        ImportError, AttributeError: The object does not exist.
    """
    config = _UNTRUSTED.get()
    if config is None:
        try:
            return resolve_name(path)
        except ValueError as error:
            raise ImportError(error) from error
    allowed = config.allowed()
    if path not in allowed:
        raise config.refuse(path)
    return allowed[path]


def check_writable(key: str, path: Path) -> None:
    """Raise an error if the config in use is untrusted and the path to write is outside the run folder.

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
    """Raise an error if an untrusted config sets this option, such as a server address. Trusted configs may set it.

    Args:
        key: The config key of the value.
        value: The value; None, False and empty text are always accepted.

    Raises:
        ConfigError: Names the key and the value.
    """
    config = _UNTRUSTED.get()
    if config and value:
        raise config.refuse(value, key)


def public_classes(module: str, bases: tuple[type, ...]) -> dict[str, type]:
    """Return the public classes of a module that derive from one of `bases`, by import path.

    Each class is listed under the module and under the module that defines it. Classes of other packages are left out.
    """
    home, root = import_module(module), f"{module.partition('.')[0]}."
    found: dict[str, type] = {}
    for name in getattr(home, "__all__", vars(home)):
        value = getattr(home, name)
        is_class = inspect.isclass(value) and not isinstance(value, GenericAlias)  # counts as a class in Python 3.10
        if is_class and issubclass(value, bases) and value.__module__.startswith(root):
            found |= {f"{module}.{name}": value, f"{value.__module__}.{name}": value}
    return found


def by_import_path(values: Iterable[Any]) -> dict[str, Any]:
    """Return a dict from import path to function or class. Each has two paths: by its module and by its package."""
    found: dict[str, Any] = {}
    for value in values:
        package = value.__module__.rpartition(".")[0]
        found |= {f"{package}.{value.__name__}": value, f"{value.__module__}.{value.__name__}": value}
    return found


@cache
def _guard_jsonargparse() -> None:
    """Patch jsonargparse, so that untrusted configs import only allowed classes, and do not read other files.

    `find_object` imports the classes.
    """
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
            raise TypeError("an untrusted config names no other file of settings")  # jsonargparse then uses the text
        return usual_mode()

    ours = {"import_object": import_object, "_get_config_read_mode": read_mode}
    for module in [module for name, module in sys.modules.items() if name.startswith("jsonargparse.")]:
        # jsonargparse.typing imports only what its own code registers
        for name in ours.keys() & vars(module).keys() if module is not typing else ():
            setattr(module, name, ours[name])
