"""Check and configure the standard streams, text encoding and working folder of a command-line process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import TextIOWrapper
from shutil import get_terminal_size
from textwrap import fill
from typing import TextIO


def prepare_terminal() -> str | None:
    """Prepare standard streams and environment variables. Return the reason if no command can run, else None."""
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
    """Open /dev/null in place of closed standard streams, so that no other file gets their file descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free file descriptor, which is `number`
            if name != "stdout":
                setattr(sys, name, open(number, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115


def printable(text: str) -> str:
    """Return a text without control characters, except line breaks and tabs.

    Names and messages from files of unknown origin could otherwise change what the terminal shows, or its settings.
    """
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" or char.isprintable() else _replacement(char) for char in text)


def _replacement(char: str) -> str:
    return " " if char.isspace() else "\N{REPLACEMENT CHARACTER}"


def wrap_words(text: str, width: int) -> str:
    """Return a text with its lines broken between words. A longer word, such as a path, stays whole, to be copied."""
    wrap = partial(fill, width=width, break_long_words=False, break_on_hyphens=False, drop_whitespace=True)
    return "\n".join(map(wrap, text.split("\n")))


def fit_to_terminal(text: str, stream: TextIO) -> str:
    """Return a text with its lines broken between words if a stream is a terminal, else the text as it is."""
    try:
        return wrap_words(text, get_terminal_size().columns) if stream.isatty() else text
    except (AttributeError, ValueError):  # no stream, or a closed one
        return text


@contextmanager
def show_status(text: str) -> Iterator[None]:
    """Context in which a terminal shows a status on stderr, which disappears at the end. Files and pipes have none.

    The cursor stays at the start of the line, so anything else that is printed replaces the status. A terminal with
    `TERM=dumb`, which cannot erase it, keeps the status as a line.
    """
    shown = sys.stderr is not None and sys.stderr.isatty()
    erases = os.environ.get("TERM") not in (None, "", "dumb")
    if shown:
        echo(text, end="\r" if erases else "\n", to_stderr=True)
    try:
        yield
    finally:
        if shown and erases:
            with suppress(OSError, ValueError):
                print("\x1b[K", end="", file=sys.stderr, flush=True)  # erases to the end of the line


def echo(text: str, end: str = "\n", to_stderr: bool = False) -> None:
    """Print a text without control characters. Commands print only with this function and with a `SafeConsole`.

    Args:
        text: The text, of one or several lines.
        end: Printed after the text.
        to_stderr: Print to stderr. Errors are ignored, for example if stderr is closed or full.
    """
    if to_stderr:
        with suppress(OSError, ValueError):
            print(printable(text), end=end, file=sys.stderr, flush=True)
        return
    try:
        print(printable(text), end=end, flush=True)
    except OSError as error:
        error.filename = "stdout"
        raise


def print_to_stderr(line: str) -> None:
    """Print a line of the command itself, such as an error, to stderr."""
    echo(fit_to_terminal(f"fl-lightning: {line}", sys.stderr), to_stderr=True)


def discard_stdout() -> None:
    """Redirect stdout to /dev/null after its reader closed it, to prevent an error message of Python at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
