"""Modules imported when they are needed: torch and lightning take seconds, and not every command wants them."""

import gc
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
