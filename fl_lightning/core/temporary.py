"""The temporary files of libraries, in a folder that is removed however the process ends."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import util
from subprocess import DEVNULL, PIPE, Popen

LONGEST = 60
"""Letters of the system's temporary folder: with W&B's and multiprocessing's names below, a socket may have 107."""


@contextmanager
def temporary_files(of_programs: bool = False) -> Iterator[None]:
    """Put what is made with `tempfile` inside into a folder of this process, which goes with it even if it is killed.

    W&B and `multiprocessing` make folders that they remove only when Python ends as usual.

    Args:
        of_programs: Do so for the programs that are started inside, too, by `TMPDIR`.
    """
    usual, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with suppress(OSError):  # no place to write, or no shell: then the files lie where they usually do
        tempfile.tempdir = _folder()
    if of_programs and tempfile.tempdir:
        os.environ["TMPDIR"] = tempfile.tempdir
    try:
        yield
    finally:
        tempfile.tempdir = usual
        if of_programs:
            os.environ.pop("TMPDIR", None)
            os.environ |= {"TMPDIR": variable} if variable else {}


@cache
def _folder() -> str:
    """Make the folder; a shell waits for the process to end, by a pipe that closes then, and removes the folder."""
    if len(tempfile.gettempdir()) > LONGEST:
        raise OSError(errno.ENAMETOOLONG, "sockets in a folder there would have too long a path")
    folder = tempfile.mkdtemp(prefix="fl-")
    remove = ["sh", "-c", 'cat > /dev/null; rm -rf "$0"', folder]
    shell = Popen(remove, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, cwd="/", start_new_session=True)
    util.Finalize(None, shell.communicate, exitpriority=-1000)  # after multiprocessing has removed its own
    return folder
