"""Run a command and print every error as one line. The entry point of the command line."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import traceback
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from contextvars import copy_context
from types import FrameType
from typing import Any

from fl_lightning import __version__
from fl_lightning.cli.commands import COMMANDS, NEED_TORCH
from fl_lightning.cli.quick_exit import skip_final_collection
from fl_lightning.core.errors import ConfigError, FLError, Interrupted, locate_user_code, one_line
from fl_lightning.core.interrupt import Stopped, end_on_interrupt, raise_on_signal
from fl_lightning.core.lazy_import import load
from fl_lightning.core.terminal import discard_stdout, echo, prepare_terminal, print_to_stderr, show_status

FREE = "Free disk space or raise the limit, then run the same command again."
OS_ERRORS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), (1, FREE)),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), (2, "Check its permissions.")),
    errno.ENAMETOOLONG: (2, "Give a shorter name."),
    errno.ELOOP: (2, "Move it away."),
    errno.EINVAL: (2, "Move it away."),
}
"""Errors of the operating system that are not errors of this program: the exit code, and how to fix them."""

LONGEST_LINE = 360
"""Maximum number of characters of an error message."""


def run() -> None:
    """Run the command of `sys.argv` and exit with its exit code; the entry point of the console script."""
    if "_ARGCOMPLETE" in os.environ:  # the shell asks for completions
        load("fl_lightning.cli.commands.completion").answer()
    gc.disable()  # until the command starts: what is imported and parsed before is needed until the end
    skip_final_collection()
    end_on_interrupt()
    if complaint := prepare_terminal():
        print_to_stderr(f"error: {complaint}")
        sys.exit(2)
    sys.exit(main())


def main(args: Sequence[str] | None = None) -> int:
    """Run a command of `fl-lightning`, print any error as one line, and return the exit code.

    Args:
        args: The command line without the program's name. By default `sys.argv`, in a process of the command's own.

    Returns:
        The exit code: 0, 2 for bad input, 1 for a run that failed, 128 + n for signal n.

    Raises:
        SystemExit: `--help` or `--print_config` has printed its text.
    """
    words = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = copy_context().run(_dispatch, words, own_process=args is None)  # own context: trust ends here
        sys.stdout.flush()  # raises an error for a closed pipe or a full disk here, not when Python exits
        return code
    except BaseException as error:
        ended: BaseException = error
        try:
            sys.stdout.flush()
        except OSError as refused:
            discard_stdout()
            ended = refused if _has_shown(error) or isinstance(error, OSError) else error
            refused.filename = "stdout"
        else:
            if isinstance(error, BrokenPipeError):
                discard_stdout()
        if _has_shown(ended):
            raise
        code, message = describe_error(ended)
        if debug and message:
            if isinstance(error, Exception):
                raise
            traceback.print_exception(error)  # raising a SystemExit would exit with its own code
        if message:
            print_to_stderr(_brief(message) if _is_stop(ended) else f"error: {_brief(message)}")
        return code


def describe_error(error: BaseException) -> tuple[int, str]:
    """Return the exit code and message for an error that ended a command; no message for a closed pipe."""
    if isinstance(error, FLError):
        cause = error.__cause__ if isinstance(error, ConfigError) and not isinstance(error.__cause__, FLError) else None
        place = locate_user_code(cause) if cause else getattr(error, "place", "")
        return error.exit_code, f"{one_line(error)}{place}"
    if isinstance(error, OSError) and error.filename and error.errno in OS_ERRORS and not locate_user_code(error):
        code, fix = OS_ERRORS[error.errno]
        return code, one_line(f"{error.filename}: {error.strerror}. {fix}")
    chain = list(_chain(error))
    if stopped := [each for each in chain if isinstance(each, Stopped)]:
        return 128 + stopped[0].number, f"stopped by {signal.Signals(stopped[0].number).name}"
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):  # such as by `| head`
        return 128 + signal.SIGPIPE, ""
    if isinstance(error, Exception):
        return 1, f"{type(error).__name__}: {one_line(error)}{locate_user_code(error)}; --debug shows where"
    first = next(each for each in reversed(chain) if not isinstance(each, Exception))  # Lightning ends a fit in its own
    frame, line = _raised_in(first)
    where = f"{frame.f_code.co_filename}, line {line} ({frame.f_code.co_name})"
    return 1, f"{one_line(repr(first))} was raised in {where} before the command had finished"


def _is_stop(error: BaseException) -> bool:
    """Return whether a signal, such as that of Ctrl-C, ended a command. The user wanted that, so it is no error."""
    return isinstance(error, Interrupted) or any(isinstance(each, Stopped) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the errors that were being handled when it was raised (its `__context__` chain)."""
    while error:
        yield error
        error = error.__context__


def _has_shown(error: BaseException) -> bool:
    """Return whether an error is argparse's normal exit (code 0), such as after printing for `--print_config`."""
    if not isinstance(error, SystemExit) or error.code != 0:
        return False
    return any(frame.f_code is ArgumentParser.exit.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def _raised_in(error: BaseException) -> tuple[FrameType, int]:
    """Return the frame and the line number where an error was raised, without W&B's frames, which wrap `sys.exit`."""
    frames = traceback.walk_tb(error.__traceback__)
    *_, place = (
        (frame, line) for frame, line in frames if not frame.f_globals.get("__name__", "").startswith("wandb.")
    )
    return place


def _brief(line: str) -> str:
    """Cut the middle out of a long error message. The end is kept, because it says how to fix the error."""
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"


def _dispatch(words: list[str], own_process: bool) -> int:
    name, *words = words or ["--help"]
    if name in ("-h", "--help", "-V", "--version"):
        echo(f"fl-lightning {__version__}" if name in ("-V", "--version") else usage())
        return 0
    if name not in COMMANDS:
        raise ConfigError(f"command {name!r} not found. {_suggest_command(name, words)}")
    if text := load("fl_lightning.cli.help").requested_help(name, words):
        echo(text.rstrip("\n"))
        return 0
    if name == "fit" and load("fl_lightning.cli.options").is_multirun(words):
        name = "multirun"
    line = load("fl_lightning.cli.command_line").read_command_line(name, words)
    if name != "multirun":  # it checks the names of each of its runs
        load("fl_lightning.cli.unknown_names").check_names(name, line)
    with show_status("loading PyTorch ...") if own_process and name in NEED_TORCH else nullcontext():
        command = load(f"fl_lightning.cli.commands.{name}")
        parser = load("fl_lightning.cli.options").command_parser(name)
    parser.prog = f"fl-lightning {name}"
    readable_errors = load("fl_lightning.cli.errors").readable_errors
    with readable_errors(parser, line):
        line = command.expand(line) if hasattr(command, "expand") else line
        given = parser.parse_args(line.words)
    if line.configs:
        given.config = line.configs  # jsonargparse has only their paths
    if own_process:
        gc.freeze()  # scanning all imported objects takes a second
        gc.enable()
    with raise_on_signal(signal.SIGINT):
        return command.main(given, parser)


def _suggest_command(name: str, words: Sequence[str]) -> str:
    from fl_lightning.cli.other_frameworks import COMMANDS as OTHERS
    from fl_lightning.core.spelling import fold, nearest, suggest

    if name.startswith("-"):
        return f"Did you mean: fl-lightning fit {name} {' '.join(words)}".rstrip() + "?"
    return suggest(OTHERS.get(fold(name)) or nearest(name, COMMANDS), COMMANDS)


def usage() -> str:
    """Return the text of `fl-lightning --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: fl-lightning COMMAND [options]\n\n"
        "Federated learning with non-IID clients on PyTorch Lightning.\n\n"
        f"commands:\n{commands}\n\n"
        "fl-lightning COMMAND --help shows the options of a command. --debug shows tracebacks of errors.\n"
        "--version prints the version."
    )


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print_to_stderr(f"warning: {one_line(message)}")
