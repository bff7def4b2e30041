"""What can go wrong in ways a user can mend: each error is one line that says what, where and the mend."""

import math
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

NO_ROOM = re.compile("can't allocate memory|out of memory|Storage size calculation overflowed|Overflow when unpacking")
"""How torch says that a tensor is larger than there is room for."""


class FLError(Exception):
    """An error whose message is the whole story; the command line prints it without a traceback.

    Attributes:
        exit_code: What the command line exits with.
    """

    exit_code = 2


class ConfigError(FLError, ValueError):
    """A key, a file or a combination of them that cannot work."""


class CheckpointError(FLError):
    """A checkpoint that is missing, damaged or of another experiment."""


class Damaged(CheckpointError):
    """A checkpoint that is not as it was written, or to which the rest of the folder does not fit any more."""


class ClientFailure(FLError):
    """A client that could not finish its round.

    Args:
        client: Id of the client.
        round: The round, from 1.
        reason: What happened, and the mend where there is one.

    Attributes:
        place: Where that was in the user's own code, see `users_place`.
    """

    exit_code = 1
    place = ""

    def __init__(self, client: int, round: int, reason: str) -> None:
        super().__init__(client, round, reason)
        self.client, self.round, self.reason = client, round, reason

    def __str__(self) -> str:
        return f"client {self.client}, round {self.round}: {self.reason}"


class TooFewClients(FLError):
    """So many clients of a round failed that what is left is no round."""

    exit_code = 1


class NonFiniteError(FLError):
    """A loss or an upload that holds NaN or Inf."""

    exit_code = 1


class Interrupted(FLError):
    """SIGINT or SIGTERM arrived; what was finished is on disk.

    Args:
        signum: The signal's number; the exit code is 128 more, as shells expect.
        message: Where the run stands and how to go on.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


def one_line(error: BaseException | str) -> str:
    """An error's message, or any text, on one line that a terminal shows and does not obey."""
    try:
        text = str(error)
    except Exception:  # whatever a stranger's __str__ raises
        text = "(its message cannot be had)"
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(text.split()))


def users_place(error: BaseException) -> str:
    """Return where an error was raised in the user's own code, as ` (mine.py, line 7)`; nothing if it was not.

    That is the innermost frame, of those that this package called, in neither a library nor this package.
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
"""What is counted, such as rounds and samples a batch; times the bytes of a sample, it still has to fit 64 bits."""


def check_number(key: str, value: float | None, within: str, mend: str = "") -> None:
    """Refuse a number that is not in its interval, as NaN never is; None is not given.

    Args:
        key: Names the number as the user types it.
        value: The number.
        within: Where it may be: `[0, 1)`, say, or `(0, inf)` for any finite number above 0.
        mend: What to give instead.

    Raises:
        ConfigError: Names the key, the number and the interval.

    Example:
        >>> check_number("algorithm.mu", float("inf"), "[0, inf)")
        Traceback (most recent call last):
        fl_lightning.core.errors.ConfigError: algorithm.mu: inf is no finite number
    """
    if value is None:
        return
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
    raise ConfigError(f"{key}: {value} {wrong}" + (f"; {mend}" if mend else ""))


def check_positive(prefix: str = "", **numbers: int | None) -> None:
    """Refuse arguments below 1 or above `MOST`; those that are None are not given.

    Raises:
        ConfigError: Names the key, after the prefix.
    """
    for name, number in numbers.items():
        check_number(f"{prefix}{name}", number, "[1, inf)")
        if number is not None and number > MOST:
            raise ConfigError(f"{prefix}{name}: {number} is above {MOST}")


@contextmanager
def blame(key: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into a `ConfigError` that names the config key."""
    try:
        yield
    except FLError:
        raise
    except Exception as error:
        reason = one_line(error) or type(error).__name__
        if NO_ROOM.search(reason):
            reason = "too large for this machine's memory"
        raise ConfigError(f"{key}: {reason}".replace(f"{key}: {key}", key)) from error
