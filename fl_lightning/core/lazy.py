"""Modules imported when they are needed: torch and lightning take seconds, and not every command wants them."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType


def load(name: str) -> ModuleType:
    """A module by its full name; garbage is not looked for meanwhile, which would take a quarter of the time."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(name)
    finally:
        if collecting:
            gc.enable()


@contextmanager
def away_from_here() -> Iterator[None]:
    """Have interpreters that are started inside not look for modules in the working folder first.

    They do so from Python 3.11 on; those of `multiprocessing` are then told where their parent looks.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ.pop("PYTHONSAFEPATH") if before is None else os.environ.update(PYTHONSAFEPATH=before)
