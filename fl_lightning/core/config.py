"""Find config files by path or name, read them strictly, and flatten them to dotted keys."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import read_file
from fl_lightning.core.public_names import public_classes
from fl_lightning.core.spelling import nearest

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

DIGITS = "digits_fedavg.yaml"
"""The config of FedAvg on the digits dataset. The configs of other algorithms replace the name FedAvg in it."""

FREE_KEYS = {
    "engine",
    "client_store",
    "logger",
    "log_clients",
    "callbacks",
    "run_dir",
    "scenario.dataset.data_dir",
    "scenario.dataset.download",
    "trainer.accelerator",
    "trainer.devices",
}
"""Keys, with all keys below them, that do not change results: where to compute, how fast, and what to log."""


def with_config_paths(words: Sequence[str]) -> list[str]:
    """Return the words of a command line with each `--config` value, a name or a path, replaced by the file's path."""
    found = list(words)
    for i, word in enumerate(words):
        if word in ("-c", "--config") and i + 1 < len(words):
            found[i + 1] = config_path(words[i + 1])
        elif word.startswith("--config="):
            found[i] = f"--config={config_path(word.removeprefix('--config='))}"
    return found


def config_path(name: str) -> str:
    """Return the path of a config file, given its path or the name of a config in this package, `.yaml` optional.

    Raises:
        ConfigError: The file does not exist, or is no YAML mapping.
    """
    path = named_file(name, "configs")
    if path is None:
        if is_run(name):
            raise ConfigError(f"--config: {name} is the folder of a run. Did you mean --resume {name}?")
        near = nearest_file(name, "configs")
        fix = f"Did you mean {near}?" if near else "See `fl-lightning list configs`."
        raise ConfigError(f"--config: {name} is neither a file here nor a shipped config. {fix}")
    read_config(path, f"--config: {name}")
    return str(path)


def named_file(name: str, kind: str) -> Path | None:
    """Return the path of a YAML file, given its path or the name of a file in this package; None if not found.

    Args:
        name: The path or the name; `.yaml` may be left out.
        kind: The folder of this package's files: `configs`, `sweeps` or `papers`.
    """
    folder = Path(str(files(f"fl_lightning.{kind}")))
    names = [name, f"{name}.yaml"] if name and not name.endswith(os.sep) else []
    paths = [Path(one) for one in names] + [folder / one for one in names if os.sep not in one]
    found = next((path for path in paths if os.path.isfile(path)), None)  # Path.is_file raises errors for long names
    derived = [one for one in names if kind == "configs" and one in derived_configs()]
    return found or (_derived_file(derived[0]) if derived else None)


def nearest_file(name: str, kind: str) -> str | None:
    """Return the YAML file in a path's folder or in this package whose name is most similar to the path's, or None."""
    folder, _, last = name.rpartition(os.sep)
    with suppress(OSError):
        near = nearest(last, (one for one in os.listdir(folder or ".") if one.endswith((".yaml", ".yml"))))
        if near:
            return os.path.join(folder, near)
    return nearest(last, shipped(kind))


def shipped(kind: str) -> list[str]:
    """Return the names of all YAML files that this package contains of a kind: `configs`, `sweeps` or `papers`."""
    return sorted([*_files(kind), *(derived_configs() if kind == "configs" else ())])


def shipped_text(name: str, kind: str) -> str:
    """Return the content of a YAML file of this package, or of a config that is derived from `digits_fedavg.yaml`."""
    algorithm = derived_configs().get(name) if kind == "configs" else None
    text = files(f"fl_lightning.{kind}").joinpath(DIGITS if algorithm else name).read_text(encoding="utf-8")
    return text.replace("FedAvg", algorithm) if algorithm else text


@cache
def derived_configs() -> dict[str, str]:
    """Return the algorithm of each config that is derived from `digits_fedavg.yaml`, by the config's file name."""
    in_files = {name.removeprefix("digits_").removesuffix(".yaml").replace("_", "") for name in _files("configs")}
    algorithms = public_classes("Algorithm").keys() - {"Algorithm"}
    return {f"digits_{name.lower()}.yaml": name for name in algorithms if name.lower() not in in_files}


def _files(kind: str) -> list[str]:
    return [path.name for path in files(f"fl_lightning.{kind}").iterdir() if path.name.endswith(".yaml")]


@cache
def _derived_file(name: str) -> Path:
    path = Path(_derived_folder().name, name)
    path.write_text(shipped_text(name, "configs"), encoding="utf-8")
    return path


@cache
def _derived_folder() -> tempfile.TemporaryDirectory[str]:
    from fl_lightning.core.temporary_folders import temporary_files  # imports multiprocessing

    with temporary_files():
        return tempfile.TemporaryDirectory(prefix="configs-")


def is_run(path: str) -> bool:
    """Return whether a path is a run's folder: one with a `config.yaml`."""
    return os.path.isfile(os.path.join(path, "config.yaml"))


def read_config(path: Path, what: str | None = None) -> dict[str, Any]:
    """Return the content of a config file as nested dicts. Refuse invalid YAML and duplicate keys.

    Args:
        path: The file.
        what: Name of the file in messages; its path by default.

    Raises:
        ConfigError: The file is no valid YAML, or no mapping.
    """
    return _checked(read_yaml(path, what), what or str(path))


def parse_config(text: bytes, what: str) -> dict[str, Any]:
    """Parse the text of a config file to nested dicts. Refuse invalid YAML and duplicate keys.

    Args:
        text: The bytes of the file.
        what: Name of the file in messages.

    Raises:
        ConfigError: The text is no valid YAML, or no mapping.
    """
    return _checked(_parse_yaml(text, what), what)


def _checked(content: Any, what: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigError(f"{what} needs lines `key: value`, it holds {type(content).__name__}")
    check_class_paths(content)
    return content


def check_class_paths(content: Any, key: str = "") -> None:
    """Refuse a config with a `class_path` that is not text, or `init_args` that are not a mapping.

    Raises:
        ConfigError: Names the key.
    """
    if isinstance(content, list):
        for part in content:
            check_class_paths(part, key)
    if not isinstance(content, dict):
        return
    path, options = content.get("class_path", "-"), content.get("init_args", {})
    if not isinstance(path, str) or not path.strip():
        raise ConfigError(f"{key}: class_path needs the name of a class or the path of one, it holds {path!r}")
    if "class_path" in content and (beside := content.keys() - {"class_path", "init_args", "dict_kwargs"}):
        wrong = ", ".join(sorted(map(str, beside)))
        raise ConfigError(f"{key}: the arguments of a class_path belong under init_args, not beside it: {wrong}")
    if not isinstance(options, dict):
        raise ConfigError(f"{key}: init_args needs lines `key: value`, it holds {options!r}")
    for part, value in content.items():
        check_class_paths(value, key if part == "init_args" else f"{key}.{part}".lstrip("."))


def config_file(run_dir: Path) -> str:
    """Return the path of a run's `config.yaml`.

    Raises:
        ConfigError: The folder does not exist, or is no run.
    """
    path = run_dir / "config.yaml"
    if not os.path.lexists(run_dir):
        raise ConfigError(f"{run_dir}: folder not found")
    if not os.path.isfile(path):
        raise ConfigError(f"{run_dir} is no run: config.yaml not found")
    return config_path(str(path))


def flatten(config: Any, prefix: str = "", name: Callable[[Any], Any] = lambda path: path) -> dict[str, Any]:
    """Flatten a nested config to dotted keys, such as `algorithm` for a class and `algorithm.tau` for its argument.

    Args:
        config: The nested dict.
        prefix: Prefix of all keys.
        name: Function that is applied to each class path.
    """
    if not isinstance(config, dict):
        return {prefix: config}
    flat: dict[str, Any] = {}
    for part, value in config.items():
        if part == "class_path":
            flat[prefix] = name(value)
        else:
            flat |= flatten(value, prefix if part == "init_args" else f"{prefix}.{part}".lstrip("."), name)
    return flat


def is_below(key: str, others: Iterable[str]) -> bool:
    """Return whether a dotted key is below one of `others`, as `algorithm.tau` is below `algorithm`."""
    return any(key.startswith(f"{other}.") for other in others)


# --- YAML from an untrusted source ---

MOST_SETTINGS = 200_000
"""Maximum number of keys and values in a config, with its aliases resolved. More would fill the memory."""
DEEPEST = 50
"""Maximum depth of nesting in a config. Much deeper YAML crashes PyYAML's C loader."""
LONGEST_NUMBER = 300
"""Maximum number of digits of a number in a config."""
PLAIN = re.compile(r"[\w./ +-]*")
"""Matches texts of words and numbers, which are valid YAML without a check."""
NUMBER = re.compile(r"[-+.]?[0-9][0-9a-fA-Fox_:.+-]*")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # C: ten times as fast, if built
    """PyYAML's safe loader, except that it reads dates as text, as jsonargparse does."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class StrictYAMLError(yaml.YAMLError):
    """Error for YAML that a config may not contain, such as duplicate keys. The message names the line and the key."""


def read_yaml(path: Path, what: str | None = None) -> Any:
    """Return the content of a YAML file. Refuse invalid YAML and duplicate keys, see `load_yaml`.

    Args:
        path: The file.
        what: Name of the file in messages; its path by default.

    Raises:
        ConfigError: The file cannot be read. The message names the file, the line and the reason.
    """
    try:
        return _parse_yaml(read_file(path), what or str(path))
    except OSError as error:
        raise ConfigError(f"{what or path} is no readable YAML: {error.strerror}") from error


def _parse_yaml(text: bytes, what: str) -> Any:
    try:
        return load_yaml(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{what} is no readable YAML: {one_line(error)}") from error


def load_yaml(text: str | bytes) -> Any:
    """Parse a YAML text. Refuse duplicate keys, tags and deep nesting, see `check_yaml`.

    Args:
        text: The YAML; bytes are UTF-8, with or without a byte order mark.

    Raises:
        ValueError, yaml.YAMLError: The text cannot be parsed. The message names the line and the reason.
    """
    text = _decode(text) if isinstance(text, bytes) else text
    check_yaml(text)
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise _with_line(error, text) from error


def use_strict_yaml(parser: ArgumentParser) -> ArgumentParser:
    """Make a jsonargparse parser apply `check_yaml` to config files and to values on the command line."""
    from jsonargparse import get_loader, set_loader  # half a second

    usual = get_loader("yaml")

    def load(text: str) -> Any:
        check_yaml(text)
        return usual(text)

    set_loader("strict", load, (yaml.YAMLError,))
    parser.parser_mode = "strict"
    return parser


def check_yaml(text: str) -> None:
    """Refuse YAML with duplicate keys, tags, very long numbers, deep nesting, or aliases that expand to too much.

    The check reads the parser's events, before any object is built.

    Raises:
        StrictYAMLError: Names the line, the key and the reason.
        yaml.YAMLError: The text is not YAML.
    """
    if len(text) < LONGEST_NUMBER and PLAIN.fullmatch(text):
        return
    checker = _Checker()
    try:
        for event in yaml.parse(text, _Loader):
            if reason := checker.check(event):
                key = ".".join(one.key for one in checker.open if one.key is not None)
                assert event.start_mark
                raise StrictYAMLError(f"line {event.start_mark.line + 1}: {key and f'{key}: '}{reason}")
    except yaml.MarkedYAMLError as error:
        raise _with_line(error, text) from error


class _Checker:
    """Checks the event stream of a YAML parser for content that a config may not have.

    Attributes:
        open: The mappings and lists that contain the next event, outermost first.
        count: Keys and values so far, with aliases resolved.
        sizes: Number of keys and values that an alias of each anchor expands to.
    """

    def __init__(self) -> None:
        self.open: list[_Collection] = []
        self.count = 0
        self.sizes: dict[str | None, int] = {}

    def check(self, event: Any) -> str | None:
        """Process the next YAML event, and return the reason if it is not allowed, else None."""
        if isinstance(event, yaml.CollectionEndEvent):
            ended = self.open.pop()
            self.sizes[ended.anchor] = self.count - ended.before
            return None
        if not isinstance(event, yaml.NodeEvent):
            return None
        reason = self.open[-1].add(event) if self.open else None
        return reason or self._check_node(event)

    def _check_node(self, event: Any) -> str | None:
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self.sizes:
                return f"*{event.anchor} refers to no anchor, or to itself"
            self.count += self.sizes[event.anchor]
        elif event.tag is not None:
            return f"{event.tag.replace('tag:yaml.org,2002:', '!!')}: a config has no tags"
        elif isinstance(event, yaml.ScalarEvent):
            if "\0" in event.value:
                return "a NUL byte"
            if len(event.value) > LONGEST_NUMBER and NUMBER.fullmatch(event.value):
                return f"a number of {len(event.value):,} digits"
            self.sizes[event.anchor] = 1
            self.count += 1
        else:
            self.open.append(_Collection(event.anchor, self.count, isinstance(event, yaml.MappingStartEvent)))
            self.count += 1
        if self.count > MOST_SETTINGS or len(self.open) > DEEPEST:
            return "it expands to more than a config may contain"
        return None


@dataclass
class _Collection:
    """A YAML mapping or list that `_Checker` has read in part, with the keys so far."""

    anchor: str | None
    before: int
    is_mapping: bool
    key: str | None = None
    lines: dict[str, int] = field(default_factory=dict)
    expects_key: bool = True

    def add(self, event: Any) -> str | None:
        """Process the next key or value of the collection. Return the reason if a key is not allowed, else None."""
        is_key, self.expects_key = self.is_mapping and self.expects_key, not self.expects_key
        if not is_key:
            return None
        self.key = event.value if isinstance(event, yaml.ScalarEvent) else None
        if self.key is None:
            return "a key must be a word"
        if self.key in self.lines and self.key != "<<":
            return f"given on line {self.lines[self.key]} already"
        self.lines[self.key] = event.start_mark.line + 1
        return None


def _with_line(error: yaml.MarkedYAMLError, text: str) -> yaml.YAMLError:
    """Return a PyYAML error with the line number, and the invalid character if any, added to its message."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return error
    lines = text.splitlines() or [""]
    number = min(mark.line, len(lines) - 1)  # the end of a text may count as another line
    reason = ", ".join(filter(None, [error.context, error.problem]))
    character = f": {lines[number][mark.column]!r}" if reason.endswith("any token") else ""
    return StrictYAMLError(f"line {number + 1}: {reason}{character}")


def _decode(content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line}: byte {content[error.start]:#04x} is no UTF-8") from None
