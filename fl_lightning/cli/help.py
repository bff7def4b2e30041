"""What `--help` shows: of a command, of one of its keys, of a class that a key can name; all without torch."""

from __future__ import annotations

import json
import re
import shutil
from argparse import ArgumentParser, HelpFormatter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fl_lightning.cli.catalogue import BASES, OTHERS, class_options, classes_of, descriptions, kind_of
from fl_lightning.cli.commands import COMMANDS
from fl_lightning.cli.options import options_of
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.spelling import nearest, same

Option = dict[str, Any]

# An experiment's keys as one thinks of them; a key that ends with a dot stands for all below it.
HEADINGS = {
    "what is learnt, from what, by which method": ("config", "scenario.", "model", "algorithm", "baselines"),
    "how long": ("rounds", "clients_per_round", "seed", "fast"),
    "each client's training": ("batch_size", "optimizer", "optimizer_state", "lr_scheduler", "round_lr_scheduler"),
    "each client's Lightning Trainer": ("trainer.", "client_callbacks"),
    "how it is carried out": ("engine", "compile", "channels_last", "on_client_failure", "min_clients"),
    "measuring": ("evaluation.", "evaluate_every"),
    "keeping": ("run_dir", "resume", "trust", "checkpoint_every", "keep_checkpoints", "client_store"),
    "watching": ("logger", "log_clients", "callbacks", "print_config"),
}

REST = """NAME stands for a class, by its name or its import path. `--algorithm.help` lists names (so do --model.help,
--scenario.dataset.help, --optimizer.help, ...); `--algorithm.help FedSKC` tells its options, which are given as
--algorithm.tau 0.1. `--help KEY` tells all of a key, `fl-lightning list` what a config can name."""


def asked_for(command: str, words: Sequence[str]) -> str | None:
    """What a command line asks to be told instead of being carried out.

    Args:
        command: The command's name.
        words: What follows it.

    Returns:
        The help for `--help`, for `--help KEY`, for `--KEY.help`, which lists names, or for `--KEY.help NAME`; None if
        nothing of that is asked for, or only the class itself, which is none of this package's, can tell.

    Raises:
        ConfigError: The command has no such key.
    """
    for word, after in pairwise([*words, "--"]):
        about = None if after.startswith("-") else after
        if word in ("-h", "--help"):
            return of_key(command, about) if about else of_command(command)
        option, _, given = word.partition("=")
        key = option.removeprefix("--").removesuffix(".help")
        if option == f"--{key}.help" and key.partition(".")[0] in top_keys(command):
            name = given or about
            return of_class(key, name) if name else of_names(key)
    return None


def top_keys(command: str) -> set[str]:
    """The keys of a command, less what lies below them."""
    return {name.partition(".")[0] for name in options_of(command)}


def of_command(command: str) -> str:
    """The help of a command, with a line for each option and its default."""
    return parser(command).format_help()


def of_key(command: str, key: str) -> str:
    """All that there is to say of a key, and of those below it.

    Raises:
        ConfigError: The command has none of that name.
    """
    key, options = key.lstrip("-"), options_of(command)
    found = {name: one for name, one in options.items() if f"{name}.".startswith(f"{key}.")}
    if not found:
        near = nearest(key, options)
        mend = f"did you mean {near}?" if near else f"`fl-lightning {command} --help` names them"
        raise ConfigError(f"--help: {command} has no key {key!r}; {mend}")
    return told({"": found}).format_help()


def of_names(key: str) -> str | None:
    """The names that a key takes, each with its line; None where only torch knows them."""
    kind = kind_of(key)
    lines = descriptions(kind) if kind else dict.fromkeys(OTHERS.get(key, ()), "")
    if not lines:
        return None
    width = max(map(len, lines))
    rest = f"others: by import path, package.module.Class; --{key}.help NAME tells a class's options"
    return "\n".join([f"--{key} NAME:", *(f"  {name:<{width}}  {line}".rstrip() for name, line in lines.items()), rest])


def of_class(key: str, path: str) -> str | None:
    """The options of a class of this package's; None if it is none."""
    module, _, name = path.rpartition(".")
    kind = kind_of(key) or ""
    known = classes_of(kind) if kind else {}
    name = name if module else same(name, known)
    if name not in known or module not in ("", known[name].module.name, f"fl_lightning.{BASES[kind][1]}"):
        return None
    found = class_options(kind, name)
    options = {f"{key}.{argument}": one | {"flags": [f"--{key}.{argument}"]} for argument, one in found.items()}
    shown = told({"options": options})
    shown.description, shown.epilog = f"{name}: {known[name].summary}", None if options else "It has no options."
    return shown.format_help()


# --- As argparse shows it --------------------------------------------------------------------------------------------


class Formatter(HelpFormatter):
    """Argparse's, as wide as the terminal, with room for long keys."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        width = max(shutil.get_terminal_size((120, 24)).columns - 2, 38)
        super().__init__(prog, max_help_position=min(42, 2 * width // 5), width=width)

    def add_usage(self, usage: str | None, *rest: Any, **kwargs: Any) -> None:
        """No usage where there is none to tell."""
        if usage != "":
            super().add_usage(usage, *rest, **kwargs)


def parser(command: str) -> ArgumentParser:
    """A parser that takes what the command's own does, for its help and for completion; it knows no types."""
    options = options_of(command)
    experiment = "config" in options
    made = told(by_heading(options) if experiment else {"options": options})
    made.prog, made.description = f"fl-lightning {command}", COMMANDS[command]
    made.usage = f"{made.prog} [--config FILE] [--KEY VALUE ...]" if experiment else None
    if experiment:
        made.description += " Keys are shown with their defaults, where they have any."
        made.epilog = REST
    return made


def by_heading(options: Mapping[str, Option]) -> dict[str, dict[str, Option]]:
    """An experiment's keys, told briefly, by heading; one that is under none comes last."""
    found: dict[str, dict[str, Option]] = {heading: {} for heading in [*HEADINGS, "more"]}
    for name, option in options.items():
        found[heading_of(name)][name] = briefly(option)
    return {heading: group for heading, group in found.items() if group}


def heading_of(key: str) -> str:
    """The heading that a key stands under."""
    for heading, keys in HEADINGS.items():
        if key in keys or f"{key.partition('.')[0]}." in keys:
            return heading
    return "more"


def told(groups: Mapping[str, Mapping[str, Option]]) -> ArgumentParser:
    """An argparse parser of options in groups."""
    made = ArgumentParser(usage="", add_help=False, formatter_class=Formatter, allow_abbrev=False)
    for heading, options in groups.items():
        group = made.add_argument_group(heading or None)
        for name, option in options.items():
            keywords: dict[str, Any] = {key: option[key] for key in ("nargs", "metavar") if key in option}
            if keywords.get("nargs") == 0:
                keywords = {"action": "store_true"}
            default = option.get("default")
            text = " ".join([option["help"], *([] if default is None else [f"({shown(default)})"])])
            group.add_argument(*option.get("flags", [name]), **keywords, help=text.replace("%", "%%"))
    return made


def briefly(option: Option) -> Option:
    """An option with one clause of what is said of it, and its default, if it has one, for a value."""
    text = option["help"].replace("`", "")
    clause = re.split(r"[;:] |\.(?: [A-Z]|$)", text, maxsplit=1)[0]
    choices = [choice for choice in option.get("choices", []) if choice not in ("true", "false")]
    if 1 < len(choices) < 6 and not all(choice in clause for choice in choices):
        clause += f": {', '.join(choices[:-1])} or {choices[-1]}"
    if "default" in option:
        return option | {"help": clause, "metavar": shown(option["default"]), "default": None}
    worded = ["needed"] if option.get("needed") else re.findall(r"[;,:] ([^;,:.(]+) by default", text)
    return option | {"help": " ".join([clause, *(f"({one})" for one in worded[:1])])}


def shown(default: Any) -> str:
    """A default as one would type it."""
    return default if isinstance(default, str) else json.dumps(default)
