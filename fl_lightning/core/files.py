"""Write files atomically, and read untrusted files with limits on their type and size."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
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
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.filename in (None, str(partial)):  # None: the disk is full
            raise OSError(error.errno, error.strerror, str(path)) from error
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


MOST_BYTES = {
    "metrics.csv": 2**27,
    "clients.csv": 2**30,
    "warnings.txt": 2**27,
    "partition.csv": 2**28,
    "manifest.json": 2**28,
}
"""Maximum size in bytes of files in a run folder, by name. Larger ones could fill the memory of a reader."""
MOST_OF_OTHERS = 2**20
"""Maximum size in bytes of files that `MOST_BYTES` does not list."""


def most_bytes(path: Path) -> int:
    """Return the maximum accepted size, in bytes, of a config file or of a text file in a run folder."""
    return MOST_BYTES.get(path.name, MOST_OF_OTHERS)


def path_below(folder: Path, name: str | Path) -> Path:
    """Return the path of a file or folder below a folder of unknown origin, such as that of a run or of a sweep.

    Args:
        folder: The folder. It may be a link.
        name: The path relative to the folder. Neither the file nor the folders on the way to it may be links.

    Raises:
        OSError: The name leads out of the folder or has control characters, or there is a link on the way.
    """
    path, place = folder, PurePath(name)
    if place.is_absolute() or not place.parts or ".." in place.parts or not str(name).isprintable():
        raise OSError(errno.EINVAL, "it is not the name of a file in this folder", str(name))
    for part in place.parts:
        path = path / part
        if path.is_symlink():
            raise OSError(errno.ELOOP, "it is a link", str(path))
    return path


@contextmanager
def open_file(path: Path, most: float | None = None, links: bool = False) -> Iterator[BinaryIO]:
    """Context that opens a file of unknown origin for reading. Refuses links, pipes, devices and very large files.

    Args:
        path: The file. `path_below` returns the path of a file in a subfolder.
        most: The maximum size in bytes; by default `most_bytes`.
        links: Follow links. For files that the user names.

    Raises:
        OSError: The file cannot be read, is not regular (a pipe, a device, a refused link), or is too large.
    """
    with open(_open(path, os.O_RDONLY, links), "rb") as file:
        if os.fstat(file.fileno()).st_size > (most_bytes(path) if most is None else most):
            raise OSError(errno.EFBIG, "it is larger than it can be", str(path))
        yield file


def open_to_append(path: Path, mode: str = "ab", create: bool = True, **options: Any) -> IO[Any]:
    """Open a file in a folder of unknown origin for appending.

    Args:
        path: The file.
        mode: `ab` or `a`.
        create: Whether the file is created if it does not exist.
        options: More arguments of `open`.

    Raises:
        OSError: The file cannot be written, or is not regular: a link, a pipe, a device.
    """
    return open(_open(path, os.O_WRONLY | os.O_APPEND | (os.O_CREAT if create else 0)), mode, **options)


def _open(path: Path, flags: int, links: bool = False) -> int:
    """Open a regular file, and return its descriptor."""
    flags |= os.O_NONBLOCK | (0 if links else os.O_NOFOLLOW)  # without O_NONBLOCK, opening a pipe blocks
    no_file = OSError(errno.EINVAL, "it is no file", str(path))
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ENXIO):  # a folder, or a pipe without a reader
            raise no_file from error
        if error.errno == errno.ELOOP and not links:
            raise OSError(errno.ELOOP, "it is a link", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise no_file
    return descriptor


def read_file(path: Path, most: float | None = None, links: bool = False) -> bytes:
    """Return the content of a file of unknown origin, with the checks of `open_file`."""
    with open_file(path, most, links) as file:
        return file.read()


def read_last_bytes(path: Path, most: int = 2**16) -> bytes:
    """Return the end of a file of unknown origin and of any size, from the first line that begins in its last bytes."""
    with open_file(path, math.inf) as file:
        return lines_from(file, os.fstat(file.fileno()).st_size - most)


def lines_from(file: BinaryIO, start: int) -> bytes:
    """Return the bytes of a file from the first line that begins at or after the position `start`."""
    file.seek(max(start - 1, 0))
    text = file.read()
    return text[text.find(b"\n") + 1 :] if start > 0 else text


def blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a checkpoint's file in blocks of 1 MiB. It may not be larger than the memory."""
    with open_file(path, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) as file:
        while block := file.read(1 << 20):
            yield block


def file_checksum(path: Path) -> str:
    """Return the SHA-256 digest of a checkpoint's file, as manifests have it: `sha256:...`."""
    digest = hashlib.sha256()
    for block in blocks(path):
        digest.update(block)
    return f"sha256:{digest.hexdigest()}"
