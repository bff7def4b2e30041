"""Files of data, read so that what is wrong with one is told of that one, by name; none can hang us or run code."""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fl_lightning.core.errors import one_line

KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class BadFile(Exception):
    """A file that is there and cannot be used.

    Args:
        path: The file.
        why: What is wrong with it.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{one_line(str(path))}: {why}")


def is_there(path: Path, folder: bool = False) -> bool:
    """Whether a file, or a folder, is in its place; it is not opened: a pipe or a device may never come back from that.

    Raises:
        BadFile: Something else is in its place, or the system will not look there.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return False
    except OSError as error:  # links in a circle, a name too long, a file where a folder should be
        raise BadFile(path, error.strerror or one_line(error)) from error
    except ValueError as error:  # a zero byte in the name
        raise BadFile(path, one_line(error)) from error
    if kind != (stat.S_IFDIR if folder else stat.S_IFREG):
        raise BadFile(path, f"is {KINDS.get(kind, 'no file')}, it needs to be a {'folder' if folder else 'file'}")
    return True


@contextmanager
def told_of(path: Path, what: str) -> Iterator[None]:
    """Put whatever goes wrong inside down to a file.

    Args:
        path: The file.
        what: What it should be.

    Raises:
        BadFile: Something went wrong.
    """
    try:
        yield
    except BadFile:
        raise
    except OSError as error:
        place = Path(error.filename) if isinstance(error.filename, str) else path  # a file of a folder, say
        raise BadFile(place, f"cannot be read: {error.strerror or one_line(error)}") from error
    except Exception as error:  # a damaged file raises anything: BadZipFile, zlib.error, KeyError, MemoryError, ...
        raise BadFile(path, f"is no readable {what} ({one_line(error) or type(error).__name__})") from error


@contextmanager
def opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """A regular file, open; whatever goes wrong inside is put down to it.

    Args:
        path: The file.
        what: What it should be.

    Raises:
        BadFile: It is not there, is no regular file, or something went wrong.
    """
    if not is_there(path):
        raise BadFile(path, "no such file")
    with told_of(path, what), path.open("rb") as file:
        yield file


def read_published(path: Path, md5: str, what: str) -> bytes:
    """The bytes of a file whose checksum its authors, or torchvision, have made known.

    Raises:
        BadFile: It is not that file; nothing has looked into it then.
    """
    with opened(path, what) as file:
        content = file.read()
    if (found := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        raise BadFile(path, f"is damaged, or another file: its MD5 checksum is {found}, that of the {what} is {md5}")
    return content


def read_idx(path: Path, rank: int) -> np.ndarray:
    """The bytes of an idx file (MNIST's format), as an array of so many dimensions.

    Raises:
        BadFile: It is none, is cut short or too long, or has another number of dimensions.
    """
    with opened(path, "idx file") as file:
        start, found = struct.unpack(">3sB", file.read(4))
        if start != b"\0\0\x08":  # unsigned bytes
            raise ValueError("it does not begin as one of unsigned bytes does")
        if found != rank:
            raise ValueError(f"its dimensions are {found}, not {rank}")
        shape = struct.unpack(f">{rank}I", file.read(4 * rank))
        size, due = os.fstat(file.fileno()).st_size, file.tell() + math.prod(shape)
        if size != due:
            raise ValueError(f"its size is {size:,} bytes, by its header it is {due:,}")
        return np.fromfile(file, np.uint8).reshape(shape)


def read_npz(path: Path, names: Iterable[str] | None = None, optional: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """Arrays of an `.npz` file by name, none of which may hold pickled objects.

    Args:
        path: The file.
        names: Those that it needs to hold; all that it holds if None, in the file's order.
        optional: Those that are read where it holds them.

    Raises:
        BadFile: It is none, is damaged, or holds not all that it needs to.
    """
    with opened(path, ".npz file") as file, np.load(file, allow_pickle=False) as archive:
        names = tuple(archive.files if names is None else names)
        if missing := [name for name in names if name not in archive]:
            raise BadFile(path, f"holds no {', '.join(missing)}; it needs {', '.join(names)}")
        return {name: archive[name] for name in (*names, *(name for name in optional if name in archive))}


def read_mapped(path: Path) -> np.ndarray:
    """The array of an `.npy` file, read from it where and when it is needed.

    What somebody writes into it stays in memory.

    Raises:
        BadFile: It is not there, is none, or is damaged.
    """
    with opened(path, ".npy file"):
        return np.lib.format.open_memmap(path, mode="c")  # refuses pickled objects


CHECKSUM_BYTES = hashlib.sha256().digest_size


def is_intact(path: Path) -> bool:
    """Return whether a file ends with the SHA-256 checksum of its name and of all that comes before.

    Raises:
        BadFile: It is not there, or cannot be read.
    """
    digest, end = hashlib.sha256(path.name.encode()), b""
    with opened(path, "file") as file:
        while block := file.read(1 << 20):
            end += block
            digest.update(end[:-CHECKSUM_BYTES])
            end = end[-CHECKSUM_BYTES:]
    return end == digest.digest()


def whole_numbers(values: np.ndarray, name: str) -> Tensor:
    """Whole numbers of any type as `int64`, of any shape.

    Raises:
        ValueError: They are of another type (half a class is none), or one is too large.
    """
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} needs one whole number a sample, got {values.dtype} of shape {values.shape}")
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name} holds label {values.max()}, more than int64 can")
    return torch.from_numpy(values.astype(np.int64))


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        BadFile: It is not there, is none, or is empty.
    """
    with opened(path, "text") as file:
        if text := file.read().decode():
            return text
    raise BadFile(path, "is empty")


def read_json(path: Path, most: int) -> Any:
    """What a JSON file holds.

    Args:
        path: The file.
        most: The most bytes it may have.

    Raises:
        BadFile: It is not there, is none, is larger, or a mapping in it has one name twice.
    """
    with opened(path, "JSON file") as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise ValueError(f"its size is {size:,} bytes, more than {most:,}")
        return json.load(file, object_pairs_hook=_mapping)


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):  # the last of them would be taken, and the others lost
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is in it twice")
    return mapping


def files_in(folder: Path) -> list[Path]:
    """The files of a folder, by name, without hidden ones.

    Raises:
        BadFile: There is no such folder, no file in it, or something else than files.
    """
    if not is_there(folder, folder=True):
        raise BadFile(folder, "no such folder")
    with told_of(folder, "folder"), os.scandir(folder) as entries:
        shown = (entry for entry in entries if not entry.name.startswith("."))  # .DS_Store and the like
        plain = {Path(entry.path): entry.is_file(follow_symlinks=False) for entry in shown}
    for path in plain:
        if not plain[path] and not is_there(path):  # which is slower
            raise BadFile(path, "is a link to nothing")
    if not plain:
        raise BadFile(folder, "holds no files")
    return sorted(plain)
