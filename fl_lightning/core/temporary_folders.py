"""A folder for libraries' temporary files that is removed even if the process is killed."""

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
"""Maximum length of the path of the system's temporary folder. Paths of sockets in it may have only 107 characters."""


@contextmanager
def temporary_files(of_programs: bool = False) -> Iterator[None]:
    """Context in which `tempfile` uses a folder that is removed when this process ends, even if it is killed.

    W&B and `multiprocessing` make folders that they remove only when Python exits normally.

    Args:
        of_programs: Do the same for programs that are started within the context, by setting `TMPDIR`.
    """
    usual, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    with suppress(OSError):  # if no folder or no shell is available, use the usual folder
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
    """Create a temporary folder, and start a shell that removes it when this process ends. Return the folder's path."""
    if len(tempfile.gettempdir()) > LONGEST:
        raise OSError(errno.ENAMETOOLONG, "paths of sockets there would be too long")
    folder = tempfile.mkdtemp(prefix="fl-")
    remove = ["sh", "-c", 'cat > /dev/null; rm -rf "$0"', folder]
    shell = Popen(remove, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, cwd="/", start_new_session=True)
    util.Finalize(None, shell.communicate, exitpriority=-1000)  # after multiprocessing has removed its own
    return folder
