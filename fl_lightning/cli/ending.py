"""How a command's process ends: as any other, but without taking apart one by one what it has imported."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from contextlib import suppress
from io import BufferedRandom, BufferedWriter, TextIOWrapper

WRITERS = {BufferedRandom, BufferedWriter, TextIOWrapper}


def end_quickly() -> None:
    """Have Python's end skip the search for garbage among torch and all else, which takes it 2 seconds.

    To be called before anything registers with `atexit`: what is registered later is still called, and before this.
    Objects that only garbage collection would end are not ended, but what was written to their files is there.
    """
    atexit.register(_end)


def _end() -> None:
    gc.unfreeze()
    for held in gc.get_objects():
        if type(held) in WRITERS:
            with suppress(OSError, ValueError):  # closed, or only to be read
                held.flush()
    gc.freeze()
    if sys.__stderr__:
        with suppress(OSError, ValueError):  # triton tells there of its objects that are left to the system
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno())
