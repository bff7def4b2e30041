"""What can go wrong in ways a user can mend: each error is one line that says what, where and the mend."""

from collections.abc import Iterator
from contextlib import contextmanager


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


class ClientFailure(FLError):
    """A client that could not finish its round.

    Args:
        client: Id of the client.
        round: The round, from 1.
        reason: What happened, and the mend where there is one.
    """

    exit_code = 1

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
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in " ".join(str(error).split())
    )


def check_positive(prefix: str = "", **numbers: int | None) -> None:
    """Refuse arguments below 1; those that are None are not given.

    Raises:
        ConfigError: Names the key, after the prefix.
    """
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ConfigError(f"{prefix}{name}: {number} is below 1")


@contextmanager
def blame(key: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into a `ConfigError` that names the config key."""
    try:
        yield
    except FLError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}: {one_line(error) or type(error).__name__}".replace(f"{key}: {key}", key)) from error
