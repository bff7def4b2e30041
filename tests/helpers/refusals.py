"""Check that wrong data are refused with one line, and damage files for such tests."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import contents, run

from fl_lightning.core.errors import ConfigError
from fl_lightning.data import Dataset

SECONDS = 120
"""Time limit of a test: a pipe that is opened would block forever."""

ONE_ROUND = """
rounds: 1
scenario: {dataset: Digits, partition: IID, clients: 2}
model: {class_path: MLP, init_args: {hidden: [4]}}
algorithm: FedAvg
trainer: {accelerator: cpu}
logger: null
"""


@pytest.fixture(autouse=True)
def time_limit() -> Iterator[None]:
    """Fail a test of the module that imports this fixture after some seconds."""

    def fail(*_: Any) -> None:
        raise TimeoutError(f"not finished after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refusal(given: Dataset | Callable[[], object]) -> str:
    """Return the message with which a dataset, or a call, is refused."""
    with pytest.raises(ConfigError) as caught:
        _check(given)
    message = str(caught.value)
    assert "\n" not in message
    assert "KeyError" not in message or "--debug" in message
    return message


def _check(given: Dataset | Callable[[], object]) -> None:
    dataset = given if isinstance(given, Dataset) else given()
    if isinstance(dataset, Dataset):
        dataset.checked()


def check_refused(given: Dataset | Callable[[], object], key: str, *facts: str) -> None:
    """Check that a dataset, or a call, is refused by a key of the scenario, with values that the message names."""
    message = refusal(given)
    assert message.startswith(f"scenario.{key}: ")
    assert "--debug" not in message
    for fact in facts:
        assert fact in message


def check_refused_command(words: list[str], messages: list[str]) -> str:
    """Run a command that must fail with one line and leave the current folder as it was. Return what it printed."""
    before = contents(Path())
    code, out, err = run(*words)
    assert code == 2, out + err
    assert err.count("\n") == 1, err
    assert err.startswith("fl-lightning: error: ")
    for message in messages:
        assert message in err
    assert contents(Path()) == before
    return out


def empty(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a function that replaces a file by something else, such as a pipe."""

    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


class Trap:
    """An object whose pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


NO_FILES = {
    "a folder": (replace_by(Path.mkdir), "is a folder"),
    "a pipe": (replace_by(os.mkfifo), "is a pipe"),
    "a device": (replace_by(lambda path: path.symlink_to("/dev/zero")), "is a device"),
}
"""What may be in the place of a file, and the message."""
