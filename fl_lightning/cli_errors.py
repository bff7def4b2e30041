"""Bad input in one line: the key, what was given, and what is expected instead."""

from __future__ import annotations

import inspect
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace

from fl_lightning.catalogue import kind_of
from fl_lightning.config import is_run, read_config, shipped
from fl_lightning.errors import ConfigError, FLError, one_line
from fl_lightning.other_tools import CLASSES, OPTIONS
from fl_lightning.spelling import as_backbone, builders_of_torchvision, class_names, fold, nearest
from fl_lightning.trainer_options import TRAINER_MENDS, refused

CLASS_WANTED = "it needs the name of a class, or a class_path with its init_args"
LONGEST_LIST = 200
"""How many letters of names a line lists; of more it says what names them."""


@contextmanager
def plainly(parser: ArgumentParser, words: Sequence[str] = ()) -> Iterator[None]:
    """Turn what jsonargparse, or a constructor that it calls, raises inside into a `ConfigError` of one plain line.

    Args:
        parser: What parses inside.
        words: The command line that it parses, so that a mend can be told as it is typed.
    """
    try:
        yield
    except (FLError, BrokenPipeError):
        raise
    except Exception as error:
        raise ConfigError(readable(one_line(error), parser, words)) from error


def readable(message: str, parser: ArgumentParser, words: Sequence[str] = ()) -> str:
    """A message of jsonargparse cut down to the key, what was given and what is expected."""
    if re.search(r"Problem with given class_path|value: Namespace\(class_path", message):  # a name would have done, too
        message = re.sub(r" - Expected a typing\.Literal\[.+", "", message)
    message = message.removeprefix('Parser key "config": ')  # given as text: where from is told by who read it
    where = ".".join(dict.fromkeys(re.findall(r'Parser key "([\w.]+)"', message)))
    if where == "logger":  # or a list of them, or false: what it would be as each is not told
        message = re.sub(r" - Expected an? (?:<class '(?:list|bool)'>|typing\.Literal\[False\])(?=[ .]|$)", "", message)
    options = {name for action in parser._actions for name in action.option_strings}
    if "--config" not in options and f"--{where}" in options:
        where = f"--{where}"  # no config file can hold it
    prefix = f"{where}: " if where else ""
    if abstract := re.search(r"class, but (\S+) is abstract", message):
        return f"{prefix}{abstract[1].strip(chr(39))} only says what such classes have in common; name one of them"
    if re.search(r"Option 'class_path' is not accepted", message):
        return f"{prefix}the arguments of a class_path stand under init_args, beside it"
    if grouped := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        return unknown_key(f"{grouped[1]}.{grouped[2]}", parser, words)
    if stray := re.search(r"unrecognized arguments: (?!-)(.+)", message):
        return stray_word(stray[1], parser, words)
    if unknown := re.search(r"(?:[Oo]ption '|unrecognized arguments: -{1,2})([\w.-]+)", message):
        paths = re.findall(r"class_path[ =]'([\w.]+)'", message)
        if where and paths:
            return f"{prefix}{unknown_argument(unknown[1], paths[-1], where, parser, words)}"
        return f"{prefix}{unknown_key(unknown[1], parser, words)}"
    if missing := re.search(r"arguments are required: (.+?)(?= - |\. Got value|$)", message):
        if "--config" not in options:
            return f"{missing[1]}: not given. Write it after the command; `{parser.prog} --help` shows how"
        return f"{prefix}{missing[1]} must be given, here or in a --config"
    if re.search(r"is not iterable|no attribute 'keys'|Cannot instantiate|import path string: *(\. Got|$)", message):
        return f"{prefix}{CLASS_WANTED}"
    if "Unable to load config" in message:
        return f"{prefix}it needs lines `key: value`"
    given = re.search(r"(?:Got|Given) value: ?(.*?)(?: - |- Expected|\. Got value|$)", message)
    types = re.findall(r"Expected an? (?:<class '(.+?)'>|typing\.Literal\[(.+?)\])", message)
    expected = dict.fromkeys(name for a, b in types for name in (a or b.replace("'", "")).split(", "))
    expected.pop("NoneType", None)
    if given and expected:
        got = given[1] if len(given[1]) <= 60 else f"{given[1][:57]}..."
        return f"{prefix}got {got!r}, expected {' | '.join(expected)}{_as_list(where, given[1], expected, words)}"
    if elsewhere := _misplaced(where, message):
        return f"{prefix}{elsewhere}"
    if named := re.search(r"dot import path string: (\S+)", message):
        return f"{prefix}there is no class {named[1]!r}; {_class_meant(where, named[1])}"
    if wrong := re.search(r"(?:path|Expected) (\S*) ?(?:does not|to be).+? subclass of (?:<class ')?([^'.]+)", message):
        name = wrong[1].strip(chr(39)) or (given and given[1]) or ""
        if told := _instead_of(where, name):
            return f"{prefix}{name} {told}"
        return f"{prefix}{name} is no {wrong[2]}; {_classes_there_are(where)}"
    if function := re.search(r"Expected '(\S+)' to be a function that returns", message):
        return f"{prefix}{function[1]} makes no Backbone; did you mean {as_backbone(function[1])}?"
    if re.search(r"Not a valid subclass|Expected an import path or a subclass spec", message):
        return f"{prefix}{CLASS_WANTED}"
    noise = (
        r'Parser key "[\w.]+": |Problem with given class_path |Type \S.*? expects a function or a callable class: '
        r"|Does not validate against any .+? Errors: - | - Expected a <class '(?:list|NoneType)'>.*"
        r"|\.? (?:Got|Given) value.*"
    )
    return prefix + " - ".join(dict.fromkeys(re.sub(noise, "", message).split(" - ")))


def _instead_of(key: str, path: str) -> str | None:
    """What to say of a class of torch's or torchvision's in the place of one of ours that takes it in."""
    if key == "model" and "." in path:
        return f"is no Backbone; did you mean {as_backbone(path)}?"
    if key == "scenario.dataset":
        from fl_lightning.data.torch_dataset import way_for

        return f"is a Dataset of torch's; {way}" if (way := way_for(path)) else None
    return None


def _as_list(key: str, value: str, expected: Iterable[str], words: Sequence[str]) -> str:
    """What to say where one thing was given for a list of such."""
    if list(expected) != ["list"] or not re.fullmatch(r"[\w.+-]{1,60}", value):
        return ""
    if not (names := class_names(key)):
        return f"; did you mean [{value}]?"
    name = nearest(value, names) or value
    return f"; did you mean --{key}+={name}?" if _typed(key, words) else f"; did you mean [{name}]?"


def _class_meant(key: str, name: str) -> str:
    """What to say of a name that is no class's: the nearest one, or which there are."""
    if key == "model" and name in builders_of_torchvision():
        ours = nearest(name, class_names(key))
        return f"did you mean {ours}, or torchvision's, {as_backbone(name)}?"
    names = class_names(key)
    alias = CLASSES.get(fold(name))
    if near := alias if alias in names else nearest(name, names):
        return f"did you mean {near}?"
    return f"{_classes_there_are(key)}; others need an import path (package.module.Class)"


def _classes_there_are(key: str) -> str:
    kind, names = kind_of(key), ", ".join(class_names(key))
    if kind and len(names) > LONGEST_LIST:
        return f"`fl-lightning list {kind}` names them"
    return f"there are {names}" if names else "`fl-lightning fit --help` names some"


def unknown_key(name: str, parser: ArgumentParser, words: Sequence[str] = ()) -> str:
    """What to say about a key that there is not at the top: the setting that was meant, as it is typed.

    Args:
        name: The key, less its dashes.
        parser: What knows the keys.
        words: The command line; where the key is in none of its options, a config file has it.
    """
    options = {action.dest for action in parser._actions if action.option_strings and action.dest != "help"}
    owner = "the config" if "config" in options else parser.prog
    keys = [key for key, _ in parser.get_defaults().items() if key in options]
    plain = name.replace("-", "_")
    meant = [plain] if plain in keys else []
    if "config" in options:
        settings = settings_of(parser, words, name)
        group, _, option = plain.rpartition(".")
        if group == "trainer" and option in TRAINER_MENDS:
            return refused(option)
        meant = meant or _named_alike(plain, settings) or _from_other_tools(name)
        keys += settings
    if not meant:
        last = {key.rpartition(".")[2]: key for key in reversed(keys)}
        near = nearest(plain, keys) or last.get(nearest(plain, last) or "")
        meant = [near] if near else [key for key in keys if key.startswith(f"{plain}.")][:1]
    if meant:
        return f"{owner} has no key {name!r}; did you mean {' or '.join(_as_typed(m, name, words) for m in meant[:3])}?"
    top = ", ".join(dict.fromkeys(key.partition(".")[0] for key in keys))
    known = f"there are {top or 'none'}" if len(top) <= LONGEST_LIST else f"`{parser.prog} --help` names them"
    return f"{owner} has no key {name!r}; {known}"


def unknown_argument(name: str, class_path: str, key: str, parser: ArgumentParser, words: Sequence[str] = ()) -> str:
    """What to say about an argument that a class does not take: its own that was meant, or a setting of that name."""
    module, _, owner = class_path.rpartition(".")
    keys = list(inspect.signature(getattr(import_module(module), owner)).parameters)
    if not (meant := [*filter(None, [nearest(name, keys)])]):
        found = _named_alike(name.replace("-", "_"), settings_of(parser, words, f"{key}.{name}"))
        found = found or _from_other_tools(name)
        meant = [_as_typed(one, f"{key}.{name}", words) for one in found]
    told = f"did you mean {' or '.join(meant[:3])}?" if meant else f"there are {', '.join(keys) or 'none'}"
    return f"{owner} has no key {name!r}; {told}"


def _named_alike(name: str, settings: Iterable[str]) -> list[str]:
    """The settings whose last part is that of a name: `algorithm.tau` for `tau`."""
    last = name.rpartition(".")[2]
    return [key for key in settings if key.rpartition(".")[2] == last and key != name]


def _from_other_tools(name: str) -> list[str]:
    """What another tool's name, or the last part of it, is called here."""
    names = (name, name.replace("-", "_"), name.rpartition(".")[2].replace("-", "_"))
    return [OPTIONS[one] for one in names if one in OPTIONS][:1]


def _as_typed(mend: str, name: str, words: Sequence[str]) -> str:
    """A mend as options, where the key that it is for stands on the command line, else as keys of a config."""
    options, apart, remark = mend.partition(" (")
    shown = options.replace("=", ": ")
    if _typed(name, words):
        shown = " ".join(f"--{option}" for option in options.split())
    return shown + apart + remark


def _typed(key: str, words: Sequence[str]) -> bool:
    return any(re.fullmatch(rf"-{{1,2}}{re.escape(key)}", word.partition("=")[0].removesuffix("+")) for word in words)


def settings_of(parser: ArgumentParser, words: Sequence[str], without: str) -> list[str]:
    """The settings, dotted, of an experiment as it would be without a key that it does not have.

    They are those of the classes that the command line and its configs choose; none where it is wrong in more ways.
    """
    if "config" not in {action.dest for action in parser._actions}:
        return []
    rest: list[str] = []
    dropping = False
    for word in words:
        if re.match("-{1,2}[A-Za-z]", word):
            option = word.lstrip("-").partition("=")[0].removesuffix("+")
            dropping = option == without or not _is_known(word.partition("=")[0], parser)
        if not dropping:
            rest.append(word)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = parser.parse_args(_less_key(rest, without))
    except (Exception, SystemExit):
        return []
    return list(dict.fromkeys(re.sub(r"\.(init_args|class_path)\b", "", key) for key, _ in given.items()))


def _is_known(option: str, parser: ArgumentParser) -> bool:
    """Whether an option is a parser's, or lies below one."""
    parts = option.removesuffix("+").split(".")
    return any(".".join(parts[: n + 1]) in parser._option_string_actions for n in range(len(parts)))


def _less_key(words: Sequence[str], key: str) -> list[str]:
    """The words with the content of each config in its place, less a key at its top."""
    found = list(words)
    for place, word in enumerate(found[1:], start=1):
        if found[place - 1] in ("--config", "-c") and os.path.isfile(word):
            content = read_config(Path(word))
            if content.pop(key, None) is not None:
                found[place] = f"#{' ' * 256}\n{yaml.safe_dump(content)}"
    return found


def stray_word(text: str, parser: ArgumentParser, words: Sequence[str]) -> str:
    """What to say about words that belong to no option."""
    word = text.split(" ")[0]
    if "config" not in {action.dest for action in parser._actions}:
        return f"unrecognized arguments: {text}"
    if is_run(word):
        return f"{word} belongs to no option; did you mean --resume {word}?"
    if "=" in word:
        return f"{word} belongs to no option; did you mean --{word}?"
    for key in ("algorithm", "model", "scenario.dataset", "scenario.partition"):
        if word in class_names(key):
            return f"{word} belongs to no option; did you mean --{key} {word}?"
    return f"{word} belongs to no option; did you mean --config {nearest(word, shipped('configs')) or word}?"


def _misplaced(where: str, message: str) -> str | None:
    """What to say where the class that jsonargparse refuses is a callback under the wrong one of two keys."""
    homes = {"callbacks": "lightning.pytorch.callbacks", "client_callbacks": "fl_lightning.callbacks"}
    if where not in homes:
        return None
    from fl_lightning.callbacks.defaults import misplaced

    for path in re.findall(r"(?:import path string:|Import path|Given value:) \[?'?([\w.]+)", message):
        module, _, name = path.rpartition(".")
        kind = getattr(sys.modules.get(module) or import_module(homes[where]), name, None)
        if inspect.isclass(kind) and (told := misplaced(kind)):
            return told
    return None


def refuse_nulls(given: Namespace, owner: Any, key: str = "") -> None:
    """Refuse null for what cannot be null: jsonargparse takes it for any key of a config.

    Args:
        given: The keys and their values, classes as `class_path` and `init_args`.
        owner: The class that takes them.
        key: The key that they stand under.

    Raises:
        ConfigError: Names the key, and what leaving it out gives.
    """
    if "class_path" in given:
        module, _, name = given.class_path.rpartition(".")
        if module == "typing":  # what jsonargparse makes of {}
            raise ConfigError(f"{key}: {CLASS_WANTED}")
        owner, given = getattr(import_module(module), name), given.get("init_args") or Namespace()
    try:
        parameters, hints = inspect.signature(owner).parameters, get_type_hints(owner.__init__)
    except Exception:  # a class of the user's own may be annotated with what cannot be resolved
        return
    for name, value in vars(given).items():
        hint, place = hints.get(name), f"{key}.{name}".lstrip(".")
        if isinstance(value, Namespace):
            refuse_nulls(value, hint, place)
        for part in value if isinstance(value, list) else []:
            if isinstance(part, Namespace):
                refuse_nulls(part, None, place)
        nullable = hint in (None, Any) or type(None) in get_args(hint)
        if value is None and name in parameters and not nullable and parameters[name].default is not None:
            raise ConfigError(f"{place}: null is no value for it; {_instead(parameters[name].default)}")


def _instead(default: Any) -> str:
    if default is inspect.Parameter.empty:
        return "it must be given"
    return f"leave it out to get {default}" if isinstance(default, int | float | str) else "leave it out"
