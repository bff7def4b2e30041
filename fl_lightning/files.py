"""Files that a kill leaves whole, and that lead nowhere else."""

from __future__ import annotations

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


@contextmanager
def own_file(path: Path) -> Iterator[BinaryIO]:
    """A file, opened to be read.

    Raises:
        OSError: It cannot be read, or is no file of its own: a link, a pipe, a device.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe would wait for who writes into it
    with open(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is no file")
        yield file


def blocks(path: Path) -> Iterator[bytes]:
    """A file's content, a MiB at a time; of `own_file`s alone."""
    with own_file(path) as file:
        while block := file.read(1 << 20):
            yield block
