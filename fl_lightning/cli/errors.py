"""One-line versions of jsonargparse's errors: the key, the value, and what is expected instead.

Unknown keys and names of classes are refused before, by `unknown_names`. What is left are values of a wrong type,
missing arguments, and classes of the user's own.
"""

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
from fl_lightning.cli.unknown_names import Names, class_choices, unknown_class
from fl_lightning.core.errors import ConfigError, FLError, one_line
from fl_lightning.core.spelling import nearest
from fl_lightning.core.trusted_imports import find_object, refusal

CLASS_EXPECTED = "expected the name of a class, or a class_path with its init_args"
LONGEST_VALUE = 60
"""Characters of a value that a message shows."""


@contextmanager
def readable_errors(parser: ArgumentParser, words: Sequence[str] = ()) -> Iterator[None]:
    """Context in which errors of jsonargparse, or of a constructor that it calls, become a `ConfigError` of one line.

    Args:
        parser: The parser that is used inside.
        words: The command line that it parses. With it, a message shows a fix as it is typed.
    """
    try:
        yield
    except (FLError, BrokenPipeError):
        raise
    except Exception as error:
        raise refusal() or ConfigError(simplify_message(one_line(error), parser, words)) from error


def simplify_message(message: str, parser: ArgumentParser, words: Sequence[str] = ()) -> str:
    """Reduce a message of jsonargparse to the key, the value and what is expected."""
    if re.search(r"Problem with given class_path|value: Namespace\(class_path", message):  # a name is accepted, too
        message = re.sub(r" - Expected a typing\.Literal\[.+", "", message)
    message = message.removeprefix('Parser key "config": ')
    key = ".".join(dict.fromkeys(re.findall(r'Parser key "([\w.]+)"', message)))
    if key == "logger":  # leave out that a list, or false, is accepted too
        message = re.sub(r" - Expected an? (?:<class '(?:list|bool)'>|typing\.Literal\[False\])(?=[ .]|$)", "", message)
    is_experiment = any("--config" in action.option_strings for action in parser._actions)
    if key and not is_experiment:
        key = f"--{key}"
    reason = _missing(message, parser.prog, is_experiment) or _wrong_value(key, message, words)
    reason = reason or _wrong_class(key, message, words) or _without_noise(message)
    return f"{key}: {reason}" if key else reason


def _missing(message: str, program: str, is_experiment: bool) -> str | None:
    """Return the message about missing required arguments."""
    found = re.search(r"arguments are required: (.+?)(?= - |\. Got value|$)", message)
    if not found:
        return None
    if is_experiment:
        return f"{found[1]} must be given, here or in a --config"
    return f"{found[1]}: not given. Write it after the command; `{program} --help` shows how"


def _wrong_value(key: str, message: str, words: Sequence[str]) -> str | None:
    """Return the message about a value of the wrong type."""
    if "Unable to load config" in message:
        return "expected lines `key: value`"
    given = re.search(r"(?:Got|Given) value: ?(.*?)(?: - |- Expected|\. Got value|$)", message)
    types = re.findall(r"Expected an? (?:<class '(.+?)'>|typing\.Literal\[(.+?)\])", message)
    expected = dict.fromkeys(name for a, b in types for name in (a or b.replace("'", "")).split(", "))
    expected.pop("NoneType", None)
    if not given or not expected or re.search("Option '|Cannot instantiate|import path string: *(\\. Got|$)", message):
        return None
    value = given[1] if len(given[1]) <= LONGEST_VALUE else f"{given[1][: LONGEST_VALUE - 3]}..."
    return f"got {value!r}, expected {' | '.join(expected)}{_list_fix(key, given[1], expected, words)}"


def _list_fix(key: str, value: str, expected: Iterable[str], words: Sequence[str]) -> str:
    """Return how to give a single value to a key that takes a list."""
    if list(expected) != ["list"] or not re.fullmatch(r"[\w.+-]{1,60}", value):
        return ""
    if value == "None":
        return ". Leave it out for the default, or give [] for none"
    if not names(key):
        return f". Did you mean [{value}]?"
    name = nearest(value, names(key)) or value
    return f". Did you mean --{key}+={name}?" if Names("fit", words).is_typed(key) else f". Did you mean [{name}]?"


def _wrong_class(key: str, message: str, words: Sequence[str]) -> str | None:
    """Return the message about a class that does not exist, does not fit the key, or lacks an argument."""
    if abstract := re.search(r"class, but (\S+) is abstract", message):
        return f"{abstract[1].strip(chr(39))} is abstract; name one of its subclasses"
    paths = re.findall(r"class_path[ =]'([\w.]+)'", message)
    if paths and (unknown := re.search(r"[Oo]ption '([\w.-]+)", message)):
        return Names("fit", words).unknown_argument(unknown[1], paths[-1], key)
    if re.search(r"is not iterable|no attribute 'keys'|Cannot instantiate|import path string: *(\. Got|$)", message):
        return CLASS_EXPECTED
    if misplaced := _misplaced_callback(key, message):
        return misplaced
    if named := re.search(r"dot import path string: (\S+)", message):
        return unknown_class(key, named[1])
    if wrong := re.search(r"(?:path|Expected) (\S*) ?(?:does not|to be).+? subclass of (?:<class ')?([^'.]+)", message):
        given = re.search(r"(?:Got|Given) value: ?(.*?)(?: - |- Expected|\. Got value|$)", message)
        name = wrong[1].strip(chr(39)) or (given and given[1]) or ""
        return f"{name} {_other_class(key, name) or f'is no {wrong[2]}. {class_choices(key)}'}"
    if function := re.search(r"Expected '(\S+)' to be a function that returns", message):
        return f"{function[1]} returns no Backbone. Did you mean {as_backbone(function[1])}?"
    if re.search(r"Not a valid subclass|Expected an import path or a subclass spec", message):
        return CLASS_EXPECTED
    return None


def _other_class(key: str, path: str) -> str | None:
    """Return the message about a model or dataset of torch or torchvision that one of our classes can wrap."""
    if key == "model" and "." in path:
        return f"is no Backbone. Did you mean {as_backbone(path)}?"
    if key == "scenario.dataset":
        from fl_lightning.data.torch_dataset import suggest_torch_dataset

        return f"is a Dataset of torch's; {way}" if (way := suggest_torch_dataset(path)) else None
    return None


def _misplaced_callback(key: str, message: str) -> str | None:
    """Return the message about a callback under the wrong key."""
    homes = {"callbacks": "lightning.pytorch.callbacks", "client_callbacks": "fl_lightning.callbacks"}
    if key not in homes:
        return None
    from fl_lightning.callbacks.defaults import describe_misplaced

    for path in re.findall(r"(?:import path string:|Import path|Given value:) \[?'?([\w.]+)", message):
        module, _, name = path.rpartition(".")
        kind = getattr(sys.modules.get(module) or import_module(homes[key]), name, None)
        if inspect.isclass(kind) and (text := describe_misplaced(kind)):
            return text
    return None


def _without_noise(message: str) -> str:
    """Return the reason in a message of jsonargparse."""
    noise = (
        r'Parser key "[\w.]+": |Problem with given class_path |Type \S.*? expects a function or a callable class: '
        r"|Does not validate against any .+? Errors: - | - Expected a <class '(?:list|NoneType)'>.*"
        r"|\.? (?:Got|Given) value.*"
    )
    return " - ".join(dict.fromkeys(re.sub(noise, "", message).split(" - ")))


def refuse_nulls(given: Namespace, owner: Any, key: str = "") -> None:
    """Refuse null for arguments that do not take it. jsonargparse accepts it for any key of a config.

    Args:
        given: The keys and their values, classes as `class_path` and `init_args`.
        owner: The class that takes them.
        key: The key that they stand under.

    Raises:
        ConfigError: Names the key, and what leaving it out gives.
    """
    if "class_path" in given:
        if given.class_path.startswith("typing."):  # what jsonargparse makes of {}
            raise ConfigError(f"{key}: {CLASS_EXPECTED}")
        owner, given = find_object(given.class_path), given.get("init_args") or Namespace()
    try:
        parameters, hints = inspect.signature(owner).parameters, get_type_hints(owner.__init__)
    except Exception:  # a user's own class may have annotations that cannot be resolved
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
            default = parameters[name].default
            is_plain = isinstance(default, int | float | str)
            fix = f"leave it out to get {default}" if is_plain else "leave it out"
            raise ConfigError(f"{place}: null is no value for it; {fix}")
