"""Files that a kill leaves whole, and that lead nowhere else."""

from __future__ import annotations

import errno
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

UNFINISHED = ".*.writing"
"""What the name of a file looks like that a kill left half written."""


@contextmanager
def replacing(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """A file to write that takes the place of another once it is whole and on disk.

    A reader, or a kill, sees the old content or the new, never half of it. Whatever goes wrong inside leaves the old.

    Args:
        path: The file to replace; a link is replaced itself, what it leads to is left alone.
        mode: `wb` or `w`.
        options: More arguments of `open`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with open(partial, mode.replace("w", "x"), **options) as file:  # x: never through a link that lies there
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file's content at once; see `replacing`."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Have a file's content, or a folder's entries, on disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MOST_BYTES = {"metrics.csv": 2**27, "clients.csv": 2**30, "warnings.txt": 2**27, "partition.csv": 2**28}
"""Bytes that a file of this name in a run folder has at most; more would fill the memory of whoever reads it."""
MOST_OF_OTHERS = 2**20


def most_bytes(path: Path) -> int:
    """Return how many bytes a text file of a run folder, or a config, has at most."""
    return MOST_BYTES.get(path.name, MOST_OF_OTHERS)


@contextmanager
def open_file(path: Path, most: float | None = None, links: bool = True) -> Iterator[BinaryIO]:
    """Open a file of a run folder to read it; reading it ends, whoever made it.

    Args:
        path: The file.
        most: The most bytes it may have; by default what its name says, see `most_bytes`.
        links: Follow links.

    Raises:
        OSError: It cannot be read, is no regular file (a pipe, a device, a refused link), or is too large.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)  # a pipe would wait for who writes into it
    with open(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        if about.st_size > (most_bytes(path) if most is None else most):
            raise OSError(errno.EFBIG, "it is larger than it can be", str(path))
        yield file


def read_file(path: Path, most: float | None = None) -> bytes:
    """Return the content of a file; see `open_file`."""
    with open_file(path, most) as file:
        return file.read()


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a checkpoint's file, a MiB at a time; links are refused."""
    with open_file(path, math.inf, links=False) as file:
        while block := file.read(1 << 20):
            yield block
