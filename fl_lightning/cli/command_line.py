"""Normalize the command line of an experiment before its names are checked. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence

from fl_lightning.analysis.baselines import expand_baseline
from fl_lightning.cli.class_names import correct_case
from fl_lightning.cli.options import EXPERIMENTS, OPTION_WORD, options_of, split_options
from fl_lightning.core.config_files import CommandLine, read_configs
from fl_lightning.core.errors import ConfigError


def read_command_line(command: str, words: Sequence[str]) -> CommandLine:
    """Read the config files of an experiment's command line, and normalize its words. Others stay as they are.

    Options become `--key=value`, and configs paths. The names of classes get their correct case. The name of a baseline
    is replaced by its options.

    Args:
        command: The command.
        words: The words after the command.

    Raises:
        ConfigError: A config or its baselines cannot be read.
    """
    if command not in EXPERIMENTS:
        refuse_repeated_lists(command, words)
        return CommandLine(words)
    return expand_baseline(read_configs(correct_case(join_values(command, words))))


def refuse_repeated_lists(command: str, words: Sequence[str]) -> None:
    """Raise an error if an option with several values is given twice, because only its last values would count."""
    options = options_of(command)
    given = [key for key, _, _ in split_options(words, options) if options.get(key, {}).get("nargs") in ("*", "+")]
    for key in given:
        if key and given.count(key) > 1:
            raise ConfigError(f"--{key}: given twice. Write all its values after one --{key}")


def join_values(command: str, words: Sequence[str]) -> list[str]:
    """Return a command line in which options with one value have the form `--key=value`: `--config=a` for `-c a`.

    An option without its value stays as it is, for the parser to refuse. So does one that takes several values.
    """
    options, joined = options_of(command), list[str]()
    for key, values, part in split_options(words, options):
        option, flag = options.get(key, {}), part[0].partition("=")[0]
        name = option["flags"][-1] if flag in option.get("flags", ()) else flag
        has_one_value = len(values) == 1 and option.get("nargs") not in ("*", "+") and not OPTION_WORD.match(values[0])
        joined += [f"{name}={values[0]}"] if key and name.startswith("--") and has_one_value else part
    return joined
