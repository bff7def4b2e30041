"""Format the help texts of commands, keys and classes. Does not import torch."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Action, ArgumentParser, HelpFormatter
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from itertools import pairwise
from typing import Any

from fl_lightning.cli.catalogue import BASES, OTHERS, class_options, classes_of, descriptions, kind_of
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.options import options_of
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.spelling import match_case, nearest

Option = dict[str, Any]

HEADINGS = {
    "task and method": ("config", "scenario.", "model", "algorithm", "baselines"),
    "length": ("rounds", "clients_per_round", "client_sampler", "seed", "fast"),
    "simulations": ("adversary", "clock", "round_policy"),
    "messages": ("compression", "download_compression"),
    "training of each client": (
        *("batch_size", "batch_sampler", "class_weights", "mixup", "cutmix"),
        *("optimizer", "optimizer_state", "lr_factors", "dp_sgd"),
        *("lr_scheduler", "lr_scheduler_interval", "lr_scheduler_rounds", "round_lr_scheduler"),
    ),
    "Lightning Trainer of each client": ("trainer.", "client_callbacks"),
    "execution": ("engine", "compile", "channels_last", "on_client_failure", "min_clients"),
    "evaluation": ("evaluation.",),
    "run folder and checkpoints": ("run_dir", "resume", "trust", "client_store"),
    "loggers and callbacks": ("logger", "log_clients", "max_logged_clients", "callbacks", "print_config"),
    "several runs": ("seeds", "multirun", "workers", "threads", "out", "reference", "percent", "format"),
}
"""The keys of an experiment by topic. A key that ends with a dot stands for all keys below it."""

EPILOG = """NAME is a class: its name or import path. `--algorithm.help` lists the names, and so do --model.help,
--scenario.dataset.help, --optimizer.help, ... `--algorithm.help FedSKC` shows the options of FedSKC, given as
--algorithm.tau 0.1. `--help KEY` explains a key in full. `fl-lightning list` lists all that a config can name."""


def requested_help(command: str, words: Sequence[str]) -> str | None:
    """Return the help text that a command line asks for by `--help`, `--help KEY`, `--KEY.help` or `--KEY.help NAME`.

    Args:
        command: The command's name.
        words: The command line after the command.

    Returns:
        The text. None if no help is asked for, or if the class is not one of this package and has to be imported.

    Raises:
        ConfigError: The command has no such key.
    """
    top_level_keys = {name.partition(".")[0] for name in options_of(command)}
    for word, after in pairwise([*words, "--"]):
        about = None if after.startswith("-") else after
        if word in ("-h", "--help"):
            return key_help(command, about) if about else help_parser_of(command).format_help()
        option, _, given = word.partition("=")
        key = option.removeprefix("--").removesuffix(".help")
        if option == f"--{key}.help" and key.partition(".")[0] in top_level_keys:
            name = given or about
            return class_help(key, name) if name else names_help(key)
    return None


def key_help(command: str, key: str) -> str:
    """Return the full help text of a config key and of all keys below it.

    Raises:
        ConfigError: The command has no such key.
    """
    key, options = key.lstrip("-"), options_of(command)
    found = {name: one for name, one in options.items() if f"{name}.".startswith(f"{key}.")}
    if not found:
        near = nearest(key, options)
        fix = f"Did you mean {near}?" if near else f"See `fl-lightning {command} --help`."
        raise ConfigError(f"--help: {command} has no key {key!r}. {fix}")
    return help_parser({"": found}).format_help()


def names_help(key: str) -> str | None:
    """Return a help text that lists the classes that can be the value of a config key; None if there are none."""
    kind = kind_of(key)
    lines = descriptions(kind) if kind else dict.fromkeys(OTHERS.get(key, ()), "")
    if not lines:
        return None
    width = max(map(len, lines))
    rest = f"Other classes: by import path, package.module.Class. --{key}.help NAME shows a class's options."
    return "\n".join([f"--{key} NAME:", *(f"  {name:<{width}}  {line}".rstrip() for name, line in lines.items()), rest])


def class_help(key: str, path: str) -> str | None:
    """Return a help text with the options of a class; None if the class is not of this package."""
    module, _, name = path.rpartition(".")
    kind = kind_of(key) or ""
    known = classes_of(kind) if kind else {}
    name = name if module else full_name(key, name, known)
    if name not in known:
        return None
    _, exporting_module, _ = BASES[kind]
    if module not in ("", known[name].module.name, f"fl_lightning.{exporting_module}"):
        return None
    arguments = class_options(kind, name).items()
    options = {f"{key}.{argument}": option | {"flags": [f"--{key}.{argument}"]} for argument, option in arguments}
    parser = help_parser({"options": options})
    parser.description, parser.epilog = f"{name}: {known[name].summary}", None if options else "It has no options."
    return parser.format_help()


def full_name(key: str, name: str, known: Collection[str]) -> str:
    """Return the name of a known class that a user gives in any case or, for an engine, without `Engine`."""
    engine = f"{name.capitalize()}Engine"
    return engine if key == "engine" and engine in known else match_case(name, known)


# --- Formatting with argparse ---

UNBROKEN_HYPHEN = "\N{NON-BREAKING HYPHEN}"
"""Stands for a hyphen while argparse breaks lines, which it would do after a hyphen, such as in `fl-lightning`."""


class Formatter(HelpFormatter):
    """An argparse help formatter as wide as the terminal, with a wide column for long keys. It breaks no words."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        width = max(shutil.get_terminal_size((120, 24)).columns - 2, 38)
        super().__init__(prog, max_help_position=min(42, 2 * width // 5), width=width)

    def add_usage(self, usage: str | None, *rest: Any, **kwargs: Any) -> None:
        """Add the usage line to a help text, unless `usage` is empty."""
        if usage != "":
            super().add_usage(usage, *rest, **kwargs)

    def add_text(self, text: str | None) -> None:
        """Add a paragraph to a help text."""
        super().add_text(text and text.replace("-", UNBROKEN_HYPHEN))

    def add_argument(self, action: Action) -> None:
        """Add an option to a help text."""
        shown = copy(action)
        shown.help = action.help and action.help.replace("-", UNBROKEN_HYPHEN)
        super().add_argument(shown)

    def format_help(self) -> str:
        """Return the help text."""
        return super().format_help().replace(UNBROKEN_HYPHEN, "-")


def help_parser_of(command: str) -> ArgumentParser:
    """Build a plain argparse parser of a command's options, without types, for help and completion."""
    options = options_of(command)
    experiment = "config" in options
    parser = help_parser(group_by_heading(options) if experiment else {"options": options})
    parser.prog, parser.description = f"fl-lightning {command}", COMMANDS[command]
    parser.usage = f"{parser.prog} [--config FILE] [--KEY VALUE ...]" if experiment else None
    if experiment:
        parser.description += " Keys are shown with their defaults."
        parser.epilog = EPILOG
    return parser


def group_by_heading(options: Mapping[str, Option]) -> dict[str, dict[str, Option]]:
    """Group options by help heading. Return `{heading: {key: option}}`, with shortened descriptions."""
    found: dict[str, dict[str, Option]] = {heading: {} for heading in [*HEADINGS, "more"]}
    for name, option in options.items():
        found[find_heading(name)][name] = shorten(option)
    return {heading: group for heading, group in found.items() if group}


def find_heading(key: str) -> str:
    """Return the heading under which the help lists a config key; `more` if no heading is defined for the key."""
    for heading, keys in HEADINGS.items():
        if key in keys or f"{key.partition('.')[0]}." in keys:
            return heading
    return "more"


def help_parser(groups: Mapping[str, Mapping[str, Option]]) -> ArgumentParser:
    """Build an argparse parser that only formats help texts, from options by heading and name."""
    parser = ArgumentParser(usage="", add_help=False, formatter_class=Formatter, allow_abbrev=False)
    for heading, options in groups.items():
        group = parser.add_argument_group(heading or None)
        for name, option in options.items():
            add_option(group, name, option)
    return parser


def add_option(group: Any, name: str, option: Option) -> Action:
    """Add an option, without its type, to an argparse parser or a group of one. Return argparse's action."""
    keywords: dict[str, Any] = {key: option[key] for key in ("nargs", "metavar") if key in option}
    if keywords.get("nargs") == 0:
        keywords = {"action": "store_true"}
    default = option.get("default")
    text = " ".join([option["help"], *([] if default is None else [f"({shown_default(default)})"])])
    added: Action = group.add_argument(*option.get("flags", [name]), **keywords, help=text.replace("%", "%%"))
    return added


def shorten(option: Option) -> Option:
    """Return an option with a shortened help text, to show in a list. A default is shown in place of the type."""
    text = option["help"].replace("`", "")
    clause = re.split(r"[;:] (?![^{]*\})|\.(?: [A-Z]|$)", text, maxsplit=1)[0]
    choices = [choice for choice in option.get("choices", []) if choice not in ("true", "false")]
    if 1 < len(choices) < 6 and not all(choice in clause for choice in choices):
        clause += f": {', '.join(choices[:-1])} or {choices[-1]}"
    if "default" in option:
        return option | {"help": clause, "metavar": shown_default(option["default"]), "default": None}
    worded = ["needed"] if option.get("needed") else re.findall(r"[;,:] ([^;,:.(]+) by default", text)
    return option | {"help": " ".join([clause, *(f"({one})" for one in worded[:1])])}


def shown_default(default: Any) -> str:
    """Return a default value as the text that a user would type."""
    return default if isinstance(default, str) else json.dumps(default)
