"""Bad input in one line: the key, what was given, and what is expected instead."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.catalogue import names
from fl_lightning.cli.class_names import as_backbone
from fl_lightning.cli.unknown_names import Names, class_meant, classes_there_are
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.gate import find_object, refusal
from fl_lightning.core.spelling import nearest

CLASS_WANTED = "it needs the name of a class, or a class_path with its init_args"


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
        raise refusal() or ConfigError(readable(one_line(error), parser, words)) from error


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
        return Names.of(parser, words).unknown_key(f"{grouped[1]}.{grouped[2]}")
    if stray := re.search(r"unrecognized arguments: (?!-)(.+)", message):
        return Names.of(parser, words).stray_word(stray[1])
    if unknown := re.search(r"(?:[Oo]ption '|unrecognized arguments: -{1,2})([\w.-]+)", message):
        paths = re.findall(r"class_path[ =]'([\w.]+)'", message)
        if where and paths:
            return f"{prefix}{Names.of(parser, words).unknown_argument(unknown[1], paths[-1], where)}"
        return f"{prefix}{Names.of(parser, words).unknown_key(unknown[1])}"
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
        return f"{prefix}{class_meant(where, named[1])}"
    if wrong := re.search(r"(?:path|Expected) (\S*) ?(?:does not|to be).+? subclass of (?:<class ')?([^'.]+)", message):
        name = wrong[1].strip(chr(39)) or (given and given[1]) or ""
        if told := _instead_of(where, name):
            return f"{prefix}{name} {told}"
        return f"{prefix}{name} is no {wrong[2]}; {classes_there_are(where)}"
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
    if value == "None":
        return ". Leave it out for the default, or give [] for none"
    if not names(key):
        return f"; did you mean [{value}]?"
    name = nearest(value, names(key)) or value
    return f"; did you mean --{key}+={name}?" if Names("fit", words).is_typed(key) else f"; did you mean [{name}]?"


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
        if given.class_path.startswith("typing."):  # what jsonargparse makes of {}
            raise ConfigError(f"{key}: {CLASS_WANTED}")
        owner, given = find_object(given.class_path), given.get("init_args") or Namespace()
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
