"""End the process faster by skipping Python's final garbage collection."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress
from io import BufferedRandom, BufferedWriter, TextIOWrapper

WRITERS = {BufferedRandom, BufferedWriter, TextIOWrapper}


def skip_final_collection() -> None:
    """Make Python skip its final garbage collection, which takes 2 seconds once torch is imported.

    Call it before anything registers with `atexit`: functions that are registered later run before it, as usual.
    Objects that only a garbage collection would close are not closed, but their files are flushed.
    """
    atexit.register(_end)


def _end() -> None:
    gc.unfreeze()
    for file in gc.get_objects():
        if type(file) in WRITERS:
            with suppress(OSError, ValueError):  # closed, or opened for reading
                file.flush()
    gc.freeze()
    if sys.__stderr__:
        with suppress(OSError, ValueError):  # triton complains there about objects that it did not free
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
