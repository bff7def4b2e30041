"""A run's folder while a run writes to it: one owner at a time, and nothing in it that is not a run's own."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.core.files import UNFINISHED, write_atomically

LOCK = ".lock"
OWNER = ".owner"
SIGNATURE = ".signature"

LEFT = (
    "config.yaml",
    "partition.csv",
    "schema.json",
    "metrics.csv",
    "clients.csv",
    "warnings.txt",
    "clients",
    "figures",
    "final",
)
"""What a run leaves in its folder, once it has begun."""

WRITTEN = (*LEFT, "checkpoints", "wandb", "csv_logs", "tensorboard", "mlflow", LOCK, OWNER, SIGNATURE)
"""All that a run writes to."""


def fresh(name: str) -> Path:
    """A folder for a new run, `runs/<name>/<time>-<id>`; it is not made."""
    return Path("runs") / name / f"{datetime.now():%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(3)}"


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold a folder, so that two processes cannot spoil what is in it; made where there is none.

    The system lets go of it when the process ends, however that is.

    Raises:
        ConfigError: Another process holds it; the message names its id and its machine. Or it cannot be written to.
    """
    lock = FileLock(folder / LOCK)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_strange(folder)
        lock.acquire(blocking=False)
    except Timeout:
        raise ConfigError(f"{folder}: {owner(folder)} is at it; wait for it, or end it") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error}") from error
    except NotImplementedError:
        warnings.warn(f"{folder}: its file system has no locks; start nothing else in it meanwhile", stacklevel=3)
    try:
        write_atomically(folder / OWNER, f"process {os.getpid()} on {socket.gethostname()}")
        sweep(folder)
        yield
    finally:
        lock.release()


def sweep(folder: Path) -> None:
    """Remove what killed writers left half written in a run's folder; only its owner may.

    Runs below a folder that holds several have owners of their own, and are left alone.
    """
    for place in (".", "clients", "final", "wandb", "figures/*", "checkpoints/*"):
        for file in folder.glob(f"{place}/{UNFINISHED}"):
            file.unlink()
    for leftover in folder.glob("checkpoints/.writing-*"):
        shutil.rmtree(leftover)


def owner(folder: Path) -> str:
    """Who holds a folder: `process <id> on <machine>`, or `another process` where that is not to be found out."""
    for _ in range(10):  # who has just taken it may not have said so yet
        with suppress(OSError, UnicodeDecodeError):
            if not _gone(noted := (folder / OWNER).read_text()):
                return noted
        time.sleep(0.1)
    return "another process"


def _gone(noted: str) -> bool:
    """Whether who is noted as an owner is no process of this machine any more."""
    found = re.fullmatch(r"process ([0-9]{1,9}) on (.*)", noted)
    if not found:
        return True
    try:
        if found[2] == socket.gethostname():
            os.kill(int(found[1]), 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it is there, and somebody else's
        return False
    return False


def refuse_strange(folder: Path) -> None:
    """Refuse a folder in which something that a run reads or writes leads elsewhere, or is no file: a pipe, a device.

    Raises:
        ConfigError: Names it.
    """
    places = [folder, *(folder / name for name in WRITTEN if name != "wandb")]  # W&B makes links of its own
    for place in filter(Path.is_dir, places):
        with os.scandir(place) as entries:
            for entry in entries:
                if place == folder and entry.name not in WRITTEN:
                    continue
                if entry.is_symlink():
                    mend = "a run's folder holds none; put the whole folder where there is room, and link to that"
                    raise ConfigError(f"{entry.path} is a link: {mend}")
                if not (entry.is_file() or entry.is_dir()):
                    raise ConfigError(f"{entry.path} is neither file nor folder; remove it")
                # All files have a suffix; below these two, folders may.
                if entry.is_dir() and Path(entry.name).suffix and place.name not in ("checkpoints", "figures"):
                    raise ConfigError(f"{entry.path} is a folder, where a run has a file; remove it")


def refuse_occupied(folder: Path) -> None:
    """Refuse a folder, for a new run, that holds what a run leaves; a start that failed leaves nothing of it.

    Raises:
        ConfigError: Names it.
    """
    begun = [*map(folder.joinpath, LEFT), *sorted((folder / "checkpoints").glob("round-*[1-9]*"))]
    if there := [path for path in begun if os.path.lexists(path)]:
        mend = "resume it, or choose another folder"
        raise ConfigError(f"run_dir: {folder} holds a run already, or part of one ({there[0].name}); {mend}")


def refuse_lost_checkpoints(folder: Path) -> None:
    """Refuse a folder without a checkpoint in which a run has begun: each run has one from its start on.

    Raises:
        CheckpointError: There is a run's file.
    """
    if there := [name for name in LEFT if os.path.lexists(folder / name)]:
        mend = "put checkpoints/ back, or start the run again in another folder"
        raise CheckpointError(f"{folder} holds a run ({there[0]}), but no checkpoint to go on from: {mend}")


def missing(folder: Path) -> list[Path]:
    """The folder and those above it, as far as they are not there yet."""
    return [path for path in (folder, *folder.parents) if not path.exists()]


@contextmanager
def undone_on_failure(made: Sequence[Path]) -> Iterator[None]:
    """Where what is inside fails, remove the folders that were made for it.

    Args:
        made: What `missing` gave: the run's folder and those above it, which go if nothing else is in them.
    """
    try:
        yield
    except BaseException:
        for folder in made[:1]:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # somebody else's run is in it by now
            for folder in made[1:]:
                folder.rmdir()
        raise
