"""Bad input in one line: the key, what was given, and what is expected instead."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.errors import ConfigError, FLError, one_line
from fl_lightning.trainer_options import TRAINER_MENDS, refused

CLASS_WANTED = "it needs the name of a class, or a class_path with its init_args"


@contextmanager
def plainly(parser: ArgumentParser) -> Iterator[None]:
    """Turn what jsonargparse, or a constructor that it calls, raises inside into a `ConfigError` of one plain line."""
    try:
        yield
    except (FLError, BrokenPipeError):
        raise
    except Exception as error:
        raise ConfigError(readable(one_line(error), parser)) from error


def readable(message: str, parser: ArgumentParser) -> str:
    """A message of jsonargparse cut down to the key, what was given and what is expected."""
    if re.search(r"Problem with given class_path|value: Namespace\(class_path", message):  # a name would have done, too
        message = re.sub(r" - Expected a typing\.Literal\[.+", "", message)
    message = message.removeprefix('Parser key "config": ')  # given as text: where from is told by who read it
    where = ".".join(dict.fromkeys(re.findall(r'Parser key "([\w.]+)"', message)))
    if where == "logger":  # or a list of them, or false: what it would be as each is not told
        message = re.sub(r" - Expected an? (?:<class '(?:list|bool)'>|typing\.Literal\[False\])(?=[ .]|$)", "", message)
    prefix = f"{where}: " if where else ""
    if abstract := re.search(r"class, but (\S+) is abstract", message):
        return f"{prefix}{abstract[1].strip(chr(39))} only says what such classes have in common; name one of them"
    if re.search(r"Option 'class_path' is not accepted", message):
        return f"{prefix}the arguments of a class_path stand under init_args, beside it"
    if grouped := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        return unknown_key(f"{grouped[1]}.{grouped[2]}", None, parser)
    if unknown := re.search(r"(?:[Oo]ption '|unrecognized arguments: --)([\w.]+)", message):
        paths = re.findall(r"class_path[ =]'([\w.]+)'", message)
        return f"{prefix}{unknown_key(unknown[1], paths[-1] if where and paths else None, parser)}"
    if missing := re.search(r"arguments are required: (.+?)(?= - |\. Got value|$)", message):
        return (
            f"{prefix}{missing[1]} must be given, here or in a --config" if missing[1] != "run" else "run: which one?"
        )
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
        return f"{prefix}got {got!r}, expected {' | '.join(expected)}"
    from fl_lightning.catalogue import BASES, things  # these know every class, so they need torch
    from fl_lightning.data.torch_dataset import way_for
    from fl_lightning.engines.client_callbacks import known_callbacks
    from fl_lightning.loggers import known_loggers

    kind = next((kind for kind, (_, _, key) in BASES.items() if key == where), None)
    others = {"client_callbacks": known_callbacks, "logger": known_loggers}
    names = things(kind) if kind else others[where]() if where in others else []
    known = f"there are {', '.join(names)}" if names else "`fl-lightning fit --help` names some"
    if elsewhere := _misplaced(where, message):
        return f"{prefix}{elsewhere}"
    if named := re.search(r"dot import path string: (\S+)", message):
        return f"{prefix}there is no class {named[1]!r}; {known}; others need an import path (package.module.Class)"
    if wrong := re.search(r"(?:path|Expected) (\S*) ?(?:does not|to be).+? subclass of (?:<class ')?([^'.]+)", message):
        name = wrong[1].strip(chr(39)) or (given and given[1])
        if kind == "datasets" and (way := way_for(str(name))):
            return f"{prefix}{name} is a Dataset of torch's; {way}"
        return f"{prefix}{name} is no {wrong[2]}; {known}"
    if re.search(r"Not a valid subclass|Expected an import path or a subclass spec", message):
        return f"{prefix}{CLASS_WANTED}"
    noise = (
        r'Parser key "[\w.]+": |Problem with given class_path |Type \S.*? expects a function or a callable class: '
        r"|Does not validate against any .+? Errors: - | - Expected a <class '(?:list|NoneType)'>.*"
        r"|\.? (?:Got|Given) value.*"
    )
    return prefix + " - ".join(dict.fromkeys(re.sub(noise, "", message).split(" - ")))


def unknown_key(name: str, class_path: str | None, parser: ArgumentParser) -> str:
    """What to say about a key that does not exist: at the top, or among a class's arguments."""
    options = {action.dest for action in parser._actions if action.option_strings and action.dest != "help"}
    owner = "the config" if "config" in options else parser.prog
    keys = [key for key, _ in parser.get_defaults().items() if key in options]
    if class_path:
        module, _, owner = class_path.rpartition(".")
        keys = list(inspect.signature(getattr(import_module(module), owner)).parameters)
    group, _, option = name.rpartition(".")
    if group == "trainer" and option in TRAINER_MENDS:
        return refused(option)
    near = get_close_matches(name, keys, 1) or [key for key in keys if key.startswith(f"{name}.")]
    top = {key.partition(".")[0]: None for key in keys}
    mend = f"did you mean {near[0]}?" if near else f"there are {', '.join(top) or 'none'}"
    return f"{owner} has no key {name!r}; {mend}"


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
