"""Refuse keys and classes that do not exist, and suggest similar names. Does not import torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from fl_lightning.cli.catalogue import BASES, CLASS_KEYS, arguments, is_in_source, kind_of, names
from fl_lightning.cli.class_names import as_backbone, builders_of_torchvision
from fl_lightning.cli.options import EXPERIMENTS, MULTIRUN, key_of, options_of, split_options
from fl_lightning.cli.other_frameworks import CLASSES, OPTIONS
from fl_lightning.core.config_files import CommandLine, is_run, shipped
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.lazy_import import load
from fl_lightning.core.spelling import fold, nearest, suggest
from fl_lightning.core.strict_yaml import load_yaml
from fl_lightning.core.trainer_options import TRAINER_FIXES, unsupported_option
from fl_lightning.core.trusted_imports import find_object

LONGEST_LIST = 200
"""Maximum length of a list of names in a message. In place of a longer list, the message names a command."""
LIST_KEYS = ("algorithm.loss_terms", "callbacks", "client_callbacks", "model.models")
"""Keys that take a list of classes."""
COMMAND_LINE_OPTIONS = ("config", "print_config", "resume", "trust", "fast")
"""Options of `fit` that are not config keys. `partition` accepts them too, so that command lines of `fit` work."""
NOT_IN_CONFIGS = {"config", "print_config", *map(key_of, MULTIRUN)}
"""Options that a config cannot contain."""
CLASS_EXPECTED = "expected the name of a class, or a class_path with its init_args"


def check_names(command: str, line: CommandLine) -> None:
    """Raise an error if a command line or its config files contain an unknown option, key, class or class argument.

    The arguments of a user's own class are checked later by the command's parser, which imports the class.

    Args:
        command: The command.
        line: The command line.

    Raises:
        ConfigError: Names the unknown key or class, and the most similar valid name.
    """
    if command in EXPERIMENTS:
        load("fl_lightning.runs.trust").allow_local_modules(line.words)  # imports numpy
    known = KeyChecker(command, line)
    for _, content in line.configs:
        known.check_keys(content)
    for place, (option, value) in enumerate(known.typed):
        known.check_option(option, value, [later for later, _ in known.typed[place + 1 :]])


class KeyChecker:
    """Checker of the keys, classes and class arguments in a command line and its config files.

    Args:
        command: The command.
        line: The command line.

    Attributes:
        typed: The options of the command line with their values. A positional argument has "" as its option.
        classes: The chosen classes by key: names or import paths.
    """

    def __init__(self, command: str, line: CommandLine) -> None:
        self.command = command
        self.options: dict[str, dict[str, Any]] = options_of(command)
        self.is_experiment = command in EXPERIMENTS
        self.typed = list(self._typed(line.words))
        found: dict[str, Any] = {key: one.get("default") for key, one in self.options.items()}
        for _, content in line.configs:
            found |= _chosen_classes(content)
        for option, value in self.typed:
            found |= _chosen_classes(_parsed(value), option.removesuffix(".class_path"))
        named = {key: name for key, name in found.items() if key in CLASS_KEYS and isinstance(name, str)}
        self.classes = {key: name for key, name in named.items() if name not in ("null", "false")}

    def _typed(self, words: Sequence[str]) -> Iterator[tuple[str, str]]:
        for key, values, _ in split_options(words, self.options):
            yield from ((key, value) for value in values or [""])

    # --- Refusals ---

    def check_keys(self, content: dict[str, Any], group: str = "") -> None:
        """Raise an error if a config, or one nested group of it, contains an unknown key or class."""
        for name, value in content.items():
            key = f"{group}{name}"
            if isinstance(value, dict) and self._is_group(key):
                self.check_keys(value, f"{key}.")
            elif key in NOT_IN_CONFIGS:
                raise ConfigError(f"the config has no key {key!r}. It is an option of the command line, --{key}.")
            elif self._has(key):
                self._check_classes(key, value)
            else:
                self._refuse(key)

    def check_option(self, option: str, value: str, later: Sequence[str]) -> None:
        """Raise an error if a command-line option does not exist, or names an unknown class or class argument.

        Args:
            option: The option, without its dashes; "" for a positional argument.
            value: The option's value.
            later: The options after it, which may replace the class that this option is an argument of.
        """
        key = option.removesuffix("+").removesuffix(".class_path").replace(".init_args.", ".")
        owner = max((one for one in CLASS_KEYS if key.startswith(f"{one}.")), key=len, default="")
        if not option:
            if self.is_experiment:
                raise ConfigError(self.stray_word(value))
        elif not self._has(key):
            self._refuse(key)
        elif key in CLASS_KEYS:
            parsed = _parsed(value)
            self._check_classes(key, [parsed] if option.endswith("+") and isinstance(parsed, str | dict) else parsed)
        elif (about := key.removesuffix(".help")) in CLASS_KEYS and value:
            self._check_class(about, value, None)
        elif owner in self.classes and owner not in later:
            self._check_argument(owner, self.classes[owner], key.removeprefix(f"{owner}."))

    def _has(self, key: str) -> bool:
        known = {
            *(name for name, one in self.options.items() if "flags" in one),
            *("help", "h"),
            *(COMMAND_LINE_OPTIONS if self.is_experiment else ()),
        }
        above = any(key == one or key.startswith(f"{one}.") for one in known)
        return above or self._is_group(key.removesuffix(".help"))

    def _is_group(self, key: str) -> bool:
        return any(one.startswith(f"{key}.") for one in self.options)

    def _refuse(self, key: str) -> None:
        raise ConfigError(self.unknown_key(key))

    def _check_classes(self, key: str, value: Any) -> None:
        """Raise an error if the value of a key that takes a class or a list of classes is not valid."""
        is_list = isinstance(value, list)
        if key not in CLASS_KEYS or value in (None, "null") or (key == "logger" and str(value) in ("False", "false")):
            return
        if key in LIST_KEYS and not is_list:
            raise ConfigError(f"{key}: got {quote(str(value))}, expected list{self._list_fix(key, value)}")
        if is_list and key not in (*LIST_KEYS, "logger"):
            raise ConfigError(f"{key}: {CLASS_EXPECTED}")
        for one in value if is_list else [value]:
            self._check_class(key, one, None if is_list else self.classes.get(key))

    def _check_class(self, key: str, value: Any, chosen: str | None) -> None:
        """Raise an error if a value names an unknown class, a class that does not fit the key, or unknown arguments.

        Args:
            key: The key.
            value: A class's name, or its `class_path` and `init_args`.
            chosen: The class whose arguments a value without `class_path` gives. jsonargparse checks them.
        """
        name: Any = value
        options: dict[str, Any] = {}
        if isinstance(value, dict):
            name = value.get("class_path", chosen)
            options = value.get("init_args") or {} if "class_path" in value else {}
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{key}: {CLASS_EXPECTED}")
        if not self._may_be_class(key, name):
            choices = " | ".join(self.options["engine"]["choices"])
            reason = f"got {name!r}, expected {choices}" if key == "engine" else unknown_class(key, name)
            raise ConfigError(f"{key}: {reason}")
        if misplaced := _misplaced_callback(key, name):
            raise ConfigError(f"{key}: {misplaced}")
        for argument, given in options.items():
            self._check_argument(key, name, argument)
            self._check_classes(f"{key}.{argument}", given)

    def _list_fix(self, key: str, value: Any) -> str:
        """Return the hint `. Did you mean [NAME]?` for a single class where a list is expected, or empty text."""
        near = nearest(value, names(key)) if isinstance(value, str) else None
        if not near:
            return ""
        return f". Did you mean --{key}+={near}?" if self.is_typed(key) else f". Did you mean [{near}]?"

    def _may_be_class(self, key: str, name: str) -> bool:
        choices = self.options.get(key, {}).get("choices", ())
        base = BASES[kind][0].rpartition(".")[2] if (kind := kind_of(key)) else ""
        if "." in name:  # an import path, looked up later
            return all(part.isidentifier() for part in name.split("."))
        return name in (*names(key), *choices, base) or (key != "model" and is_in_source(key, name))

    def _check_argument(self, key: str, name: str, argument: str) -> None:
        known = arguments(key, name)
        if known is None or argument.partition(".")[0] in ("dict_kwargs", "help"):
            return
        if not any(one.startswith(f"{argument}.") or f"{argument}.".startswith(f"{one}.") for one in known):
            raise ConfigError(f"{key}: {self.unknown_argument(argument, name, key)}")

    # --- What was probably meant ---

    def settings(self) -> list[str]:
        """Return all valid keys: the command's options, and the arguments of the classes that the user chose."""
        found: list[str] = []

        def add(key: str) -> None:
            found.append(key)
            for argument in arguments_of(key, self.classes[key]) if key in self.classes else []:
                add(f"{key}.{argument}")

        for key in self.options:
            add(key)
        return found

    def unknown_key(self, name: str) -> str:
        """Return the error message about a key that does not exist, with the keys that were probably meant.

        Args:
            name: The key, without dashes.
        """
        owner = "the config" if self.is_experiment else f"fl-lightning {self.command}"
        keys = [key for key, one in self.options.items() if "flags" in one]
        plain = name.replace("-", "_")
        meant = [plain] if plain in keys else []
        if self.is_experiment:
            group, _, option = plain.rpartition(".")
            if group == "trainer" and option in TRAINER_FIXES:
                return unsupported_option(option)
            settings = self.settings()
            meant = meant or _same_last_part(plain, settings) or _from_other_tools(name)
            keys += settings
        if not meant:
            last = {key.rpartition(".")[2]: key for key in reversed(keys)}
            near = nearest(plain, keys) or last.get(nearest(plain, last) or "")
            meant = [near] if near else [key for key in keys if key.startswith(f"{plain}.")][:1]
        if meant:
            fixes = " or ".join(self._as_typed(one, name) for one in meant[:3])
            return f"{owner} has no key {name!r}. Did you mean {fixes}?"
        top = ", ".join(dict.fromkeys(key.partition(".")[0] for key in keys))
        is_short = len(top) <= LONGEST_LIST
        fix = f"Available: {top or 'none'}." if is_short else f"See `fl-lightning {self.command} --help`."
        return f"{owner} has no key {name!r}. {fix}"

    def unknown_argument(self, name: str, path: str, key: str) -> str:
        """Return the error message about an unknown argument of a class, with the most similar valid argument.

        Args:
            name: The argument.
            path: The class's name or import path.
            key: The key that names the class.
        """
        known = list(dict.fromkeys(one.partition(".")[0] for one in arguments_of(key, path)))
        meant = [*filter(None, [nearest(name, known)])]
        if not meant and arguments(key, path) is not None:  # an argument of the user's class may have any name
            outside = [one for one in self.settings() if not f"{key}.".startswith(f"{one}.")]
            found = _same_last_part(name.replace("-", "_"), outside) or _from_other_tools(name)
            meant = [self._as_typed(one, f"{key}.{name}") for one in found]
        return f"{path.rpartition('.')[2]} has no key {name!r}. {suggest(' or '.join(meant[:3]), known)}"

    def stray_word(self, word: str) -> str:
        """Return the error message about a command-line word that is neither an option nor an option's value."""
        config = nearest(word, shipped("configs")) or (word if word.endswith((".yaml", ".yml")) else None)
        meant = f"--config {config}" if config else ""
        for key in ("algorithm", "model", "scenario.dataset", "scenario.partition"):
            meant = f"--{key} {word}" if word in names(key) else meant
        if is_run(word):
            meant = f"--resume {word}"
        elif "=" in word:
            meant = f"--{word}"
        return f"{word} belongs to no option. {f'Did you mean {meant}?' if meant else 'Leave it out.'}"

    def _as_typed(self, fix: str, name: str) -> str:
        """Format a suggestion as the user typed the wrong key: as a command-line option, or as a line of a config.

        Args:
            fix: The suggested setting, such as `algorithm.tau=1`.
            name: The wrong key.
        """
        options, separator, remark = fix.partition(" (")
        shown = options.replace("=", ": ")
        if self.is_typed(name):
            shown = " ".join(f"--{option}" for option in options.split())
        return shown + separator + remark

    def is_typed(self, key: str) -> bool:
        """Return whether a key is set explicitly on the command line."""
        return any(option.removesuffix("+") == key for option, _ in self.typed)


def quote(value: str) -> str:
    """Return a value in quotes, shortened to 60 characters."""
    return repr(value if len(value) <= 60 else f"{value[:57]}...")


def unknown_class(key: str, name: str) -> str:
    """Return the error message about a class that does not exist, with the most similar name or all names."""
    reason = f"class {name!r} not found."
    if key == "model" and is_in_source(key, name) and name in builders_of_torchvision():
        ours = nearest(name, names(key))
        return f"{reason} Did you mean {ours}, or torchvision's, {as_backbone(name)}?"
    alias = CLASSES.get(fold(name))
    if near := alias if alias in names(key) else nearest(name, names(key)):
        return f"{reason} Did you mean {near}?"
    return f"{reason} {class_choices(key)} Other classes need an import path (package.module.Class)."


def _misplaced_callback(key: str, name: str) -> str | None:
    """Return the error message if a callback belongs under `client_callbacks`, not `callbacks`, or vice versa."""
    home = {"callbacks": "lightning.pytorch.callbacks", "client_callbacks": "fl_lightning.callbacks"}.get(key)
    kind = getattr(load(home), name, None) if home and "." not in name and name not in names(key) else None
    return load("fl_lightning.callbacks.defaults").describe_misplaced(kind) if inspect.isclass(kind) else None


def class_choices(key: str) -> str:
    """Return a hint for error messages: the available classes for a key, or the command that lists them."""
    kind, known = kind_of(key), ", ".join(names(key))
    if kind and len(known) > LONGEST_LIST:
        return f"See `fl-lightning list {kind}`."
    return f"Available: {known}." if known else "See `fl-lightning fit --help`."


def arguments_of(key: str, path: str) -> list[str]:
    """Return the argument names of the class that is given for a key. Imports the class if it is the user's own."""
    known = arguments(key, path)
    if known is None:
        with suppress(Exception):  # a wrong path is reported elsewhere
            known = ArgumentParser().add_class_arguments(find_object(path), fail_untyped=False)
    return known or []


def _chosen_classes(content: Any, key: str = "") -> dict[str, Any]:
    """Return a config's values by dotted key. Where a class is chosen, as in `algorithm`, the value is its path."""
    if not isinstance(content, dict):
        return {key: content}
    if "class_path" in content:
        return {key: content["class_path"]} | _chosen_classes(content.get("init_args") or {}, key)
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= _chosen_classes(value, f"{key}.{name}".lstrip("."))
    return found


def _parsed(value: str) -> Any:
    """Return a command-line value as text, or parsed if it is a YAML list or mapping; None for invalid YAML."""
    if value[:1] not in ("[", "{"):
        return value
    try:
        return load_yaml(value)
    except (ValueError, yaml.YAMLError):  # jsonargparse reports it
        return None


def _same_last_part(name: str, settings: Iterable[str]) -> list[str]:
    """Return the keys of `settings` with the same last part as a name, such as `algorithm.tau` for `tau`."""
    last = name.rpartition(".")[2]
    return [key for key in settings if key.rpartition(".")[2] == last and key != name]


def _from_other_tools(name: str) -> list[str]:
    """Look up another tool's option, such as Flower's. Return a list with our option, or an empty list if unknown."""
    plain = name.replace("-", "_")
    return [OPTIONS[one] for one in (name, plain, plain.rpartition(".")[2]) if one in OPTIONS][:1]
