"""Exceptions for errors that a user can fix. Each message is one line: what is wrong, and how to fix it."""

import math
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral, Real
from traceback import walk_tb
from typing import Any

from fl_lightning.core.terminal import printable

NO_ROOM = re.compile("can't allocate memory|out of memory|Storage size calculation overflowed|Overflow when unpacking")
"""Matches torch's messages about a tensor that does not fit in memory."""


class FLError(Exception):
    """An error that the command line prints as one line, without a traceback.

    Attributes:
        exit_code: The exit code of the command line.
    """

    exit_code = 2


class ConfigError(FLError, ValueError):
    """A setting, a combination of settings, or a file is invalid."""


class CheckpointError(FLError):
    """A checkpoint is missing, damaged, or of another experiment."""


class Damaged(CheckpointError):
    """A checkpoint or metrics file of a run is damaged, or was changed after it was written."""


class ClientFailure(FLError):
    """A client's training or evaluation failed in a round.

    Args:
        client: Id of the client.
        round: The round, from 1.
        reason: What happened, and how to fix it.

    Attributes:
        label: The client with its name, such as `client 3 (north)`. Tasks do not know the names, so it is set later.
        diverged: Whether a loss or an upload contains NaN or Inf.
        place: File and line in the user's own code that raised the error, see `locate_user_code`.
    """

    exit_code = 1
    label = place = ""
    diverged = False

    def __init__(self, client: int, round: int, reason: str) -> None:
        super().__init__(client, round, reason)
        self.client, self.round, self.reason = client, round, reason

    def __str__(self) -> str:
        return f"{self.label or f'client {self.client}'}, round {self.round}: {self.reason}"


class TooFewClients(FLError):
    """Fewer than `min_clients` clients of a round are left, because the others failed."""

    exit_code = 1


class NonFiniteError(FLError):
    """A loss or an upload contains NaN or Inf."""

    exit_code = 1


class Interrupted(FLError):
    """SIGINT or SIGTERM ended the run. Its finished rounds are saved.

    Args:
        signum: The signal's number; the exit code is 128 more, as shells expect.
        message: The number of finished rounds, and how to resume the run.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def one_line(error: BaseException | str) -> str:
    """Return an error's message, or any text, as one line without control characters."""
    try:
        text = str(error)
    except Exception:  # a __str__ of unknown code may raise anything
        text = "(no message)"
    return printable(" ".join(text.split()))


def reason_of(error: BaseException) -> str:
    """Return an error's message on one line; for an `OSError`, without the number of the error and the file."""
    return one_line(getattr(error, "strerror", None) or error)


LONGEST = 500
"""Maximum length of a text from another machine in a message."""


def one_short_line(error: BaseException | str, longest: int = LONGEST) -> str:
    """Return `one_line` of an error or a text from another machine, cut off with `…` if it is too long."""
    text = one_line(error if isinstance(error, BaseException) else error[: 4 * longest])
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def describe_error(error: BaseException) -> str:
    """Return the text of an error in one line. The errors of other libraries begin with the name of their class."""
    text = one_line(error)
    return text if isinstance(error, FLError) else ": ".join(filter(None, (type(error).__name__, text)))


def locate_user_code(error: BaseException) -> str:
    """Return the file and line of the user's code that raised an error, as ` (mine.py, line 7)`; empty if not found.

    It is the innermost frame called from this package that belongs neither to a library nor to this package.
    """
    place, inside = "", False
    for frame, line in walk_tb(error.__traceback__):
        path, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        inside = inside or module.startswith("fl_lightning")
        if inside and not module.startswith("fl_lightning") and not _is_library(path):
            near = os.path.relpath(path)
            place = f" ({path if near.startswith(os.pardir) else near}, line {line})"
    return place


def _is_library(path: str) -> bool:
    standard = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
    return path.startswith(("<", *standard)) or "site-packages" in path or "dist-packages" in path


MOST = 10**12
"""Maximum of a count, such as rounds or samples of a batch. Its product with a sample's bytes must fit in 64 bits."""


def check_number(key: str, value: float | None, within: str, fix: str = "") -> None:
    """Raise an error if a number is outside an interval. NaN is outside of every interval; None is not checked.

    Args:
        key: The key that the user types.
        value: The number.
        within: The interval, such as `[0, 1)`, or `(0, inf)` for any finite number above 0.
        fix: How to fix it.

    Raises:
        ConfigError: Names the key, the number and the interval.

    Example:
        >>> check_number("algorithm.mu", float("inf"), "[0, inf)")
        Traceback (most recent call last):
        fl_lightning.core.errors.ConfigError: algorithm.mu: inf is no finite number
    """
    if value is None:
        return
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigError(f"{key}: {one_line(repr(value))} is not a number")
    low, high = map(float, within[1:-1].split(","))
    above = value >= low if within[0] == "[" else value > low
    below = value <= high if within[-1] == "]" else value < high
    if above and below:
        return
    if value != value or value in (math.inf, -math.inf):
        wrong = "is no finite number"
    elif high < math.inf:
        wrong = f"is outside {within}"
    else:
        wrong = f"is {'below' if within[0] == '[' else 'not above'} {low:g}"
    raise ConfigError(f"{key}: {value} {wrong}" + (f"; {fix}" if fix else ""))


def check_positive(prefix: str = "", **numbers: int | None) -> None:
    """Raise an error if one of `numbers` is not whole, below 1 or above `MOST`, 10^12. None is not checked.

    Raises:
        ConfigError: Names the key, with the prefix.
    """
    for name, number in numbers.items():
        check_number(f"{prefix}{name}", number, "[1, inf)")
        if number is not None and not isinstance(number, Integral):
            raise ConfigError(f"{prefix}{name}: {number} is not a whole number")
        if number is not None and number > MOST:
            raise ConfigError(f"{prefix}{name}: {number} is above {MOST}")


def check_instance(key: str, value: object, kind: Any, fix: str) -> None:
    """Raise an error if a value from Python is not an object of a class, or of one of several (`A | B`).

    Raises:
        ConfigError: Names the key, what was given and the class.
    """
    if not isinstance(value, kind):
        given = (
            f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
        )
        raise ConfigError(f"{key}: got {given}, expected an object of type {getattr(kind, '__name__', kind)}. {fix}")


@contextmanager
def require_extra(extra: str, what: str) -> Iterator[None]:
    """Context in which a failed import becomes a `ConfigError` with the command that installs an optional dependency.

    Args:
        extra: The extra of this package that has the dependency, such as `ray`.
        what: The key, and what needs which package.
    """
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} ({one_line(error)}). Run: pip install 'fl-lightning[{extra}]'") from error


@contextmanager
def blame(key: str) -> Iterator[None]:
    """Context in which any exception becomes a `ConfigError` that names the config key."""
    try:
        yield
    except FLError:
        raise
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        if NO_ROOM.search(reason):
            reason = "too large for this machine's memory"
        raise ConfigError(f"{key}: {reason}".replace(f"{key}: {key}", key)) from error
