"""Prepare the process of a command: closed streams, limited encodings, a deleted working folder."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from io import TextIOWrapper


def prepare_terminal() -> str | None:
    """Prepare streams and environment variables for a command. Return the reason if the command cannot run."""
    os.environ["MPLBACKEND"] = "agg"  # figures are files; a notebook may name another backend
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # an unknown character must not end a run
    if sys.stdout is None:
        return "stdout is closed. Redirect it, for example to /dev/null"
    try:
        os.getcwd()
    except OSError:
        return "the working folder was deleted. Change to another one"
    return None


def open_streams() -> None:
    """Open /dev/null for closed standard streams. Otherwise the next file would get their number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number: this one
            if name != "stdout":
                setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def print_to_stderr(line: str) -> None:
    """Print a line to stderr, if possible."""
    with suppress(OSError, ValueError):
        print(f"fl-lightning: {line}", file=sys.stderr, flush=True)


def discard_stdout() -> None:
    """Redirect a stdout that accepts no more output to /dev/null. Otherwise Python complains at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
