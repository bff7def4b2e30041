"""`fl-lightning completion`: shell completion of commands, options and names."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.baselines import class_name, option_values
from fl_lightning.cli.catalogue import KINDS, class_options, classes_of, descriptions, kind_of, names
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.help import add_option, shorten
from fl_lightning.cli.options import options_of
from fl_lightning.core.config import flatten, read_config
from fl_lightning.core.config_files import config_path
from fl_lightning.core.errors import FLError, require_extra
from fl_lightning.core.references import read_references
from fl_lightning.core.terminal import echo

KEYS = ("algorithm", "model", "engine", "scenario.dataset", "scenario.partition")
"""Keys that take a class of this package. The options of the chosen class are completed, too."""


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Print the script that enables completion in a shell."""
    echo(argcomplete().shellcode(["fl-lightning"], shell=given.shell))
    return 0


def argcomplete() -> ModuleType:
    """Import and return the package argcomplete, which shell completion needs.

    Raises:
        ConfigError: The package is not installed.
    """
    with require_extra("completion", "completion: it needs argcomplete"):
        import argcomplete
    return argcomplete


def answer() -> None:
    """Print the completions for the command line that the shell asks about, and end the process."""
    argcomplete().autocomplete(completion_parser(words_so_far()), always_complete_options="long")


def words_so_far() -> list[str]:
    """Return the user's unfinished command line without the program's name and without the word to complete."""
    from argcomplete.lexers import split_line

    *_, words, _ = split_line(os.environ.get("COMP_LINE", ""), int(os.environ.get("COMP_POINT", 0)))
    return words[1:]


def completion_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser that argcomplete reads: all commands, and the options of classes already on the command line."""
    parser = argparse.ArgumentParser(prog="fl-lightning")
    parser.add_argument("-V", "--version", action="store_true", help="Print the version.")
    commands = parser.add_subparsers(dest="command")
    for name, summary in COMMANDS.items():
        # "resolve": a command has its own -h
        subparser = commands.add_parser(name, conflict_handler="resolve", help=summary)
        for key, option in options_of(name).items():
            action = add_option(subparser, key, shorten(option))
            action.completer = completer(name, action.dest)  # type: ignore[attr-defined]
        if words and words[0] == name:
            for key, option in options_of_classes(name, words):
                text = option["help"].replace("%", "%%")  # argparse formats it
                subparser.add_argument(f"--{key}", choices=option.get("choices"), help=text)
    return parser


def options_of_classes(command: str, words: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the options, such as `algorithm.tau`, of each class that a command line or its config files name."""
    names = chosen_classes(words)
    for key in set(KEYS) & options_of(command).keys():
        kind, name = kind_of(key), names.get(key)
        if kind and name in classes_of(kind):
            yield from ((f"{key}.{argument}", option) for argument, option in class_options(kind, name).items())


def chosen_classes(words: Sequence[str]) -> dict[str, str]:
    """Return the name of the class that a command line or its config files give for each key, such as `algorithm`."""
    found: dict[str, Any] = {}
    for config in option_values(words, "config"):
        try:
            found |= flatten(read_config(Path(config_path(config))))
        except FLError:  # the name of the config may be incomplete
            continue
    found |= {key: value for key in KEYS for value in option_values(words, key)}
    return {key: class_name(value) for key, value in found.items()}


def completer(command: str, key: str) -> Callable[..., list[str]]:
    """Return the function that argcomplete calls to list the possible values of a key."""
    from argcomplete.completers import FilesCompleter

    def complete(prefix: str, **about: Any) -> list[str]:
        choices = values_of(command, key)
        return choices if choices and key != "config" else [*choices, *FilesCompleter()(prefix)]

    return complete


def values_of(command: str, key: str) -> list[str]:
    """Return the values to suggest for a command's option, such as class names; empty if it takes any text or file."""
    if key == "config" or (command, key) == ("reproduce", "table"):
        return list(descriptions("configs" if key == "config" else "papers"))
    if (command, key) == ("fit", "multirun"):
        return [f"{name}=" for name in options_of(command)]
    if (command, key) == ("list", "kind"):
        return list(KINDS)
    if (command, key) == ("cite", "names"):
        return list(read_references())
    return [*options_of(command).get(key, {}).get("choices", []), *names(key)]
