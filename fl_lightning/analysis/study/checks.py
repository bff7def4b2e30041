"""Checks of what describes a study: YAML files and options. An error is one line that begins with the place."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.spelling import nearest, suggest


def require(condition: object, message: str) -> None:
    """Raise a `ConfigError` if a condition is false."""
    if not condition:
        raise ConfigError(message)


@contextmanager
def errors_at(place: object) -> Iterator[None]:
    """Context that puts a place before the message of a `ConfigError`: `<place>: <message>`. It may be empty."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}" if str(place) else str(error)) from error


def check_keys(where: str, content: Any, keys: Collection[str], needed: Collection[str] = ()) -> None:
    """Raise a `ConfigError` if a part of a file is not a mapping, has an unknown key, or lacks a needed one.

    Args:
        where: The place of the part; empty for the whole file.
        content: The part.
        keys: The keys that it may have.
        needed: Those that it must have.
    """
    where = where and f"{where}: "
    require(isinstance(content, Mapping), f"{where}it needs lines `key: value` ({content!r})")
    for key in content:
        require(key in keys, f"{where}unknown key {key}. {suggest(nearest(str(key), keys), sorted(keys))}")
    for key in needed:
        require(key in content, f"{where}{key} is missing")


def check_seeds(where: str, content: Any) -> tuple[int, ...]:
    """Return a list of seeds as a tuple. Raise a `ConfigError` if it is not a list of different numbers from 0."""
    valid = isinstance(content, list) and content and all(is_count(number, 0) for number in content)
    example = "is not a list of different numbers from 0, such as [0, 1, 2]"
    require(valid and len(set(content)) == len(content), f"{where}: {content!r} {example}")
    return tuple(content)


def is_count(value: Any, minimum: int) -> bool:
    """Return whether a value is a whole number of at least `minimum`. Truth values are no numbers."""
    return type(value) is int and value >= minimum


def is_number(value: Any) -> bool:
    """Return whether a value is a number. Truth values are no numbers."""
    return type(value) in (int, float)
