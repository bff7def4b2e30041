"""Write files atomically, and read untrusted files with limits on their type and size."""

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
"""Matches files that a killed process left unfinished."""


@contextmanager
def replace_atomically(path: Path, mode: str = "wb", **options: Any) -> Iterator[IO[Any]]:
    """Context that opens a temporary file for writing. When the context ends, the file is renamed to `path`.

    The file is flushed to disk before it is renamed. Readers see either the old or the new content, also if this
    process is killed. After an error the old content stays.

    Args:
        path: The file to replace. Of a link, the link itself is replaced.
        mode: `wb` or `w`.
        options: More arguments of `open`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.writing")
    try:
        with open(partial, mode.replace("w", "x"), **options) as file:  # x: does not follow a link
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file atomically: readers see either the old or the new content, never a part of it."""
    with replace_atomically(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def flush(path: Path) -> None:
    """Force a file's content, or a folder's entries, to disk (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


MOST_BYTES = {"metrics.csv": 2**27, "clients.csv": 2**30, "warnings.txt": 2**27, "partition.csv": 2**28}
"""Maximum size in bytes of files in a run folder, by name. Larger ones could fill the memory of a reader."""
MOST_OF_OTHERS = 2**20
"""Maximum size in bytes of files that `MOST_BYTES` does not list."""


def most_bytes(path: Path) -> int:
    """Return the maximum accepted size, in bytes, of a config file or of a text file in a run folder."""
    return MOST_BYTES.get(path.name, MOST_OF_OTHERS)


@contextmanager
def open_file(path: Path, most: float | None = None, links: bool = True) -> Iterator[BinaryIO]:
    """Context that opens a file of unknown origin for reading. Refuses pipes, devices and very large files.

    Args:
        path: The file.
        most: The maximum size in bytes; by default `most_bytes`.
        links: Follow links.

    Raises:
        OSError: The file cannot be read, is not regular (a pipe, a device, a refused link), or is too large.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)  # else a pipe blocks
    with open(os.open(path, flags), "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise OSError(errno.EINVAL, "it is no file", str(path))
        if about.st_size > (most_bytes(path) if most is None else most):
            raise OSError(errno.EFBIG, "it is larger than it can be", str(path))
        yield file


def read_file(path: Path, most: float | None = None) -> bytes:
    """Return the content of a file of unknown origin, with the checks of `open_file`."""
    with open_file(path, most) as file:
        return file.read()


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a checkpoint's file in blocks of 1 MiB. Links are refused."""
    with open_file(path, math.inf, links=False) as file:
        while block := file.read(1 << 20):
            yield block
