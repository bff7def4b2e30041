"""What a process finds around it: streams that are closed or know few letters, a folder that is gone."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper


def prepare() -> str | None:
    """Make of the process's surroundings what a command may rely on; what stands in its way, if anything does."""
    os.environ["MPLBACKEND"] = "agg"  # figures are files; a notebook's shell, say, names a backend that is not there
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # better a question mark than a run that ends at its table
    if sys.stdout is None:
        return "stdout is closed; send it somewhere, to /dev/null say"
    try:
        os.getcwd()
    except OSError:
        return "the working folder is gone; go to one that is there"
    return None


def open_streams() -> None:
    """Take the places of standard streams that are closed: a file of ours that took one would be printed into."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free: this one
            if name != "stdout":
                setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def tell(line: str) -> None:
    """Say something on stderr, if anybody is there to be told."""
    with suppress(OSError, ValueError):
        print(f"fl-lightning: {line}", file=sys.stderr, flush=True)


def forget_stdout() -> None:
    """Let what is still to be written to stdout, which takes no more, go nowhere: Python would complain at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
