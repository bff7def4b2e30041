"""The command line: which command is meant, and one line for whatever goes wrong in it."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from fl_lightning.cli_errors import plainly
from fl_lightning.errors import ConfigError, FLError, one_line
from fl_lightning.lazy import load

# A module of fl_lightning.commands each, imported when it is asked for: some need torch, which takes seconds.
COMMANDS = {
    "fit": "Run an experiment, or go on with one.",
    "test": "Evaluate a run's checkpoint again.",
    "watch": "Follow a running experiment in the terminal.",
    "partition": "Show and draw which client holds what.",
    "compare": "Set groups of runs side by side.",
    "report": "Draw runs as one HTML page.",
    "sweep": "Carry a W&B sweep file out here, without a server.",
    "reproduce": "Run a paper's table, and show it beside the paper's.",
    "list": "List what can be named in a config.",
}


def run() -> None:
    """Entry point of the console script."""
    gc.freeze()  # what was imported is no garbage, and need not be looked at
    try:
        sys.exit(main())
    finally:
        gc.unfreeze()


def main(args: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        args: The command line less the program's name; `sys.argv` by default.

    Returns:
        The exit code: 0, 2 for bad input, 1 for a run that failed, 128 + n for signal n.
    """
    words = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = _dispatch(words)
        sys.stdout.flush()  # a closed pipe shows here, not when Python exits
        return code
    except SystemExit as end:
        if end.code == 0:  # --help and --print_config
            raise
        return 1  # rich found the pipe closed, or a signal made Lightning exit
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        if debug:
            raise
        unforeseen = f"{type(error).__name__}: {one_line(error)}; --debug shows where"
        code, message = (error.exit_code, one_line(error)) if isinstance(error, FLError) else (1, unforeseen)
        print(f"fl-lightning: error: {message}", file=sys.stderr)
        return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0
    name, *words = words
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1)
        mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {name!r}; {mend}")
    command = load(f"fl_lightning.commands.{name}")
    parser = command.parser()
    parser.prog, parser.description = f"fl-lightning {name}", COMMANDS[name]
    with plainly(parser):
        given = parser.parse_args(getattr(command, "expand", list)(words))
    return command.main(given, parser)


def usage() -> str:
    """What `fl-lightning --help` prints."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: fl-lightning COMMAND [options]\n\n"
        "Federated learning with non-IID clients on PyTorch Lightning.\n\n"
        f"commands:\n{commands}\n\n"
        "fl-lightning COMMAND --help tells of a command's options; --debug, with any of them, shows tracebacks."
    )


def _show_warning(message: Warning | str, *args: Any, **kwargs: Any) -> None:
    print(f"fl-lightning: warning: {one_line(message)}", file=sys.stderr)
