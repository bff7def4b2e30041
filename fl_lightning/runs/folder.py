"""Lock and check the folder that a run writes to."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import socket
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.core.files import UNFINISHED, open_file, path_below, read_file, write_atomically

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
OWNER = ".owner"
LOCK_SECONDS = 0.2
"""Seconds in which a lock must become free: `is_locked` holds it for an instant."""
SIGNATURE = ".signature"

RUN_FILES = (
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
"""Files and folders of a run. Any of them shows that a run has begun in a folder."""

WRITTEN_NAMES = (*RUN_FILES, "checkpoints", "wandb", "csv_logs", "tensorboard", "mlflow", LOCK, OWNER, SIGNATURE)
"""Names of all files and folders that a run writes in its folder."""


def new_run_dir(name: str) -> Path:
    """Return the path `runs/<name>/<time>-<id>` for the folder of a new run. The folder is not created."""
    return Path("runs") / name / f"{datetime.now():%Y-%m-%dT%H-%M-%S}-{secrets.token_hex(3)}"


@contextmanager
def lock_run_dir(folder: Path, others: Collection[str] = ()) -> Iterator[list[Path]]:
    """Context that locks a run folder, so that only one process writes to it. The folder is created if necessary.

    The operating system releases the lock when the process ends, also if it is killed.

    Args:
        folder: The folder of a run, or of many runs.
        others: Names of files that the caller writes in the folder, in addition to those of a run.

    Yields:
        The folders that were created: the folder and its parents, or none.

    Raises:
        ConfigError: Another process holds the lock (the message names its process id and machine), or the folder cannot
            be written to, or its path begins with `~` or a variable such as `$HOME`.
    """
    lock = FileLock(folder / LOCK)
    first = "".join(folder.parts[:1])
    if re.fullmatch(r"~|\$\{?\w+\}?", first) and not Path(first).exists():  # the shell replaces it, but not in a config
        raise ConfigError(f"{folder}: {first} is not replaced. Write the whole path")
    try:
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        refuse_special_files(folder, others)
        lock.acquire(timeout=LOCK_SECONDS, poll_interval=LOCK_SECONDS / 10)
    except Timeout:
        raise ConfigError(f"{folder}: {lock_owner(folder)} uses this folder. Wait for it, or stop it.") from None
    except FileExistsError as error:
        what = "it is a file or a broken link. Name a folder"
        raise ConfigError(f"{folder} cannot be written to: {what}") from error
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to: {error}") from error
    except NotImplementedError:
        warnings.warn(
            f"{folder}: its file system has no locks. Start nothing else in it until this process has ended.",
            stacklevel=3,
        )
    try:
        try:
            write_atomically(folder / OWNER, f"process {os.getpid()} on {socket.gethostname()}")
            remove_partial_files(folder)
        except OSError as error:
            raise ConfigError(f"{folder} cannot be written to: {error}") from error
        yield created
    finally:
        lock.release()


def remove_partial_files(folder: Path) -> None:
    """Remove the partial files that killed processes left in a run folder. The caller holds the folder's lock.

    Runs in subfolders have their own locks and are not touched.
    """
    for place in (".", "clients", "final", "wandb", "figures/*", "checkpoints/*"):
        for file in folder.glob(f"{place}/{UNFINISHED}"):
            file.unlink()
    for leftover in folder.glob("checkpoints/.writing-*"):
        shutil.rmtree(leftover)


def lock_owner(folder: Path) -> str:
    """Return the process that locked a folder last: `process <id> on <machine>`, or `another process` if unknown."""
    with suppress(OSError, UnicodeDecodeError):
        owner = read_file(folder / OWNER).decode()
        if re.fullmatch(r"process [0-9]{1,9} on .*", owner):
            return owner
    return "another process"


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a run folder; None if this cannot be known.

    It cannot be known if the folder has no lock file, or if its file system has no locks. Nothing is written, and the
    lock of a process that is about to take it is delayed by microseconds at most.
    """
    if fcntl is None:
        return None
    try:
        with open_file(folder / LOCK) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


def refuse_special_files(folder: Path, others: Collection[str] = ()) -> None:
    """Raise an error if what a run reads or writes in its folder are links, pipes or devices.

    A folder in the place of a file is refused, too, and a file in the place of a folder.

    Args:
        folder: The folder of a run, or of many runs.
        others: Names of further files that are read or written in the folder.

    Raises:
        ConfigError: The folder contains such a file or folder; the message names it.
    """
    subfolders = [folder / name for name in WRITTEN_NAMES if name != "wandb"]  # W&B makes links of its own
    for parent in filter(Path.is_dir, [folder, *subfolders]):
        with os.scandir(parent) as entries:
            for entry in entries:
                at_top = parent == folder
                if not at_top or entry.name in WRITTEN_NAMES or entry.name in others:
                    _refuse_special_file(entry)
                    _refuse_swapped_kind(entry, parent, at_top)


def _refuse_special_file(entry: os.DirEntry[str]) -> None:
    if entry.is_symlink():
        fix = "a run's folder holds none. Move the whole folder and link to that instead."
        raise ConfigError(f"{entry.path} is a link: {fix}")
    if not (entry.is_file() or entry.is_dir()):
        raise ConfigError(f"{entry.path} is neither file nor folder. Remove it.")


def _refuse_swapped_kind(entry: os.DirEntry[str], parent: Path, at_top: bool) -> None:
    """Raise an error for a folder with a file's name, or for a file with the name of a run's subfolder."""
    # All files have a suffix or begin with a dot. In these two folders, folders may have one too.
    named_as_file = bool(Path(entry.name).suffix) or entry.name.startswith(".")
    if entry.is_dir() and named_as_file and parent.name not in ("checkpoints", "figures"):
        raise ConfigError(f"{entry.path} is a folder, but a run has a file of this name. Remove it.")
    if entry.is_file() and not named_as_file and at_top:
        raise ConfigError(f"{entry.path} is a file, but a run has a folder of this name. Remove it.")


def subfolder(folder: Path, name: str | Path) -> Path:
    """Return the path of the folder of a run, or of several runs, that is below a folder of many runs.

    Raises:
        ConfigError: The name leads out of the folder, or there is a link on the way.
    """
    try:
        return path_below(folder, name)
    except OSError as error:
        fix = f". Move the whole folder {folder} and link to that instead" if error.errno == errno.ELOOP else ""
        raise ConfigError(f"{error.filename}: {error.strerror}{fix}") from error


def refuse_existing_run(folder: Path) -> None:
    """Raise an error if the folder for a new run already contains a run or part of one.

    Raises:
        ConfigError: The folder contains files of a run; the message names the first one.
    """
    paths = [*map(folder.joinpath, RUN_FILES), *sorted((folder / "checkpoints").glob("round-*[1-9]*"))]
    if existing := [path for path in paths if os.path.lexists(path)]:
        fix = "Resume it, or choose another folder."
        raise ConfigError(f"run_dir: {folder} holds a run already, or part of one ({existing[0].name}). {fix}")


def refuse_lost_checkpoints(folder: Path) -> None:
    """Raise an error if a folder without checkpoints contains other files of a run.

    Every run starts by writing a checkpoint, so these checkpoints were lost.

    Raises:
        CheckpointError: The folder holds files of a run.
    """
    if existing := [name for name in RUN_FILES if os.path.lexists(folder / name)]:
        fix = "Put checkpoints/ back, or start the run again in another folder."
        raise CheckpointError(f"{folder} holds a run ({existing[0]}), but no checkpoint to resume from. {fix}")


@contextmanager
def remove_on_failure(created: Sequence[Path]) -> Iterator[None]:
    """Context that removes a new run folder after an exception, and the empty parents that were created for it.

    Args:
        created: The folders that `lock_run_dir` created: the run folder and its parents.
    """
    try:
        yield
    except BaseException:
        for folder in created[:1]:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another run uses the folder by now
            for folder in created[1:]:
                folder.rmdir()
        raise
