"""Read data files. Pipes and devices are not opened, and pickled objects are refused."""

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

from fl_lightning.core.errors import FLError, one_line

KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

LEFT_BEHIND = {
    *("__macosx", "icon\r", "thumbs.db", "ehthumbs.db", "desktop.ini", "$recycle.bin", "system volume information"),
    *("lost+found", "@eadir", "__pycache__"),
}
"""Names, in lower case, of files and folders that operating systems and archive programs create."""


class BadFile(Exception):
    """Error: a data file is missing, damaged or of another type. The message names the file and the reason.

    Attributes:
        path: The file.
    """

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{one_line(str(path))}: {why}")
        self.path = path


def check_exists(path: Path, folder: bool = False) -> bool:
    """Return whether a file (or a folder) exists; raise a `BadFile` if the path is of another type, such as a pipe."""
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
    except FileNotFoundError:
        return False
    except OSError as error:  # links in a circle, a name too long, a file where a folder should be
        raise BadFile(path, error.strerror or one_line(error)) from error
    except ValueError as error:  # a null byte in the name
        raise BadFile(path, one_line(error)) from error
    if kind != (stat.S_IFDIR if folder else stat.S_IFREG):
        raise BadFile(path, f"is {KINDS.get(kind, 'no file')}, it needs to be a {'folder' if folder else 'file'}")
    return True


def is_left_behind(name: str) -> bool:
    """Return whether a path has a hidden file or folder, or one that archive programs leave behind."""
    parts = [part.casefold() for part in name.split("/") if part not in ("", ".")]
    return any(part.startswith((".", "~$")) or part in LEFT_BEHIND for part in parts)


@contextmanager
def naming_file(path: Path, what: str) -> Iterator[None]:
    """Context manager: convert exceptions to `BadFile` errors that name the file and its expected type, `what`."""
    try:
        yield
    except (BadFile, FLError):
        raise
    except OSError as error:
        culprit = Path(error.filename) if isinstance(error.filename, str) else path  # for example a file of a folder
        raise BadFile(culprit, f"cannot be read: {error.strerror or one_line(error)}") from error
    except Exception as error:  # a damaged file raises anything: BadZipFile, zlib.error, KeyError, MemoryError, ...
        raise BadFile(path, f"not a readable {what} ({one_line(error) or type(error).__name__})") from error


@contextmanager
def open_file(path: Path, what: str) -> Iterator[BinaryIO]:
    """Context manager: open a regular file for reading. Exceptions inside the context are raised as `BadFile`.

    The error names the file and its expected type, `what`.
    """
    if not check_exists(path):
        raise BadFile(path, "no such file")
    with naming_file(path, what), path.open("rb") as file:
        yield file


def read_published(path: Path, md5: str, what: str) -> bytes:
    """Return the content of a file as bytes, after checking that its MD5 checksum is the published one, `md5`."""
    with open_file(path, what) as file:
        content = file.read()
    if (actual := hashlib.md5(content, usedforsecurity=False).hexdigest()) != md5:
        why = f"is damaged, or another file: its MD5 checksum is {actual}, not {md5} of the {what}"
        raise BadFile(path, f"{why} (to read arrays of your own, use the dataset Arrays)")
    return content


def read_idx(path: Path, rank: int) -> np.ndarray:
    """Return the `uint8` array in an idx file (MNIST's format), after checking that it has `rank` dimensions."""
    with open_file(path, "idx file") as file:
        start, dimensions = struct.unpack(">3sB", file.read(4))
        if start != b"\0\0\x08":  # unsigned bytes
            raise ValueError("it does not hold unsigned bytes")
        if dimensions != rank:
            raise ValueError(f"its number of dimensions is {dimensions}, not {rank}")
        shape = struct.unpack(f">{rank}I", file.read(4 * rank))
        size, expected = os.fstat(file.fileno()).st_size, file.tell() + math.prod(shape)
        if size != expected:
            raise ValueError(f"its size is {size:,} bytes, but its header says {expected:,}")
        return np.fromfile(file, np.uint8).reshape(shape)


def read_npz(path: Path, names: Iterable[str] | None = None, optional: Iterable[str] = ()) -> dict[str, np.ndarray]:
    """Return arrays of an `.npz` file by name. Pickled objects are refused.

    Args:
        path: The file.
        names: Arrays that it must have; None for all that it has, in the file's order.
        optional: Arrays that are read if it has them.
    """
    with open_file(path, ".npz file") as file, np.load(file, allow_pickle=False) as archive:
        names = tuple(archive.files if names is None else names)
        if missing := [name for name in names if name not in archive]:
            raise BadFile(path, f"has no {', '.join(missing)}. It needs {', '.join(names)}")
        return {name: archive[name] for name in (*names, *(name for name in optional if name in archive))}


def npz_names(path: Path) -> list[str]:
    """Return the names of the arrays in an `.npz` file."""
    with open_file(path, ".npz file") as file, np.load(file, allow_pickle=False) as archive:
        return list(archive.files)


def read_mapped(path: Path) -> np.ndarray:
    """Return the array of an `.npy` file, memory-mapped. Writes to the array do not change the file."""
    with open_file(path, ".npy file"):
        return np.lib.format.open_memmap(path, mode="c")  # refuses pickled objects


CHECKSUM_BYTES = hashlib.sha256().digest_size


def has_valid_checksum(path: Path) -> bool:
    """Return whether the checksum at the end of a file is the SHA-256 of the file's name and the content before it."""
    digest, end = hashlib.sha256(path.name.encode()), b""
    with open_file(path, "file") as file:
        while block := file.read(1 << 20):
            end += block
            digest.update(end[:-CHECKSUM_BYTES])
            end = end[-CHECKSUM_BYTES:]
    return end == digest.digest()


def whole_numbers(values: np.ndarray, name: str) -> Tensor:
    """Convert an array of integers, of any dtype and shape, to an `int64` tensor."""
    if not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{name} needs one whole number per sample, got {values.dtype} of shape {values.shape}")
    return torch.from_numpy(values.astype(np.int64))


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 text file, without the byte order mark that editors of Windows write."""
    with open_file(path, "text") as file:
        if text := file.read().decode("utf-8-sig"):
            return text
    raise BadFile(path, "is empty")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file. A mapping in which a key occurs twice is refused."""
    with open_file(path, "JSON file") as file:
        return json.load(file, object_pairs_hook=_without_duplicates)


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):  # json would keep only the last of them
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice")
    return mapping


def files_in(folder: Path) -> list[Path]:
    """Return the paths of the files in a folder, sorted by name, without hidden ones and what archives leave behind."""
    if not check_exists(folder, folder=True):
        raise BadFile(folder, "no such folder")
    with naming_file(folder, "folder"), os.scandir(folder) as entries:
        visible = (entry for entry in entries if not is_left_behind(entry.name))
        is_file = {Path(entry.path): entry.is_file(follow_symlinks=False) for entry in visible}
    for path in is_file:
        if not is_file[path] and not check_exists(path):  # slower: follows links
            raise BadFile(path, "is a broken link")
    if not is_file:
        raise BadFile(folder, "contains no files")
    return sorted(is_file)
