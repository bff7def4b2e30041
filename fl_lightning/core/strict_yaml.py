"""Read YAML strictly: refuse duplicate keys, tags, and what would crash the parser or fill the memory.

A config from a run folder can come from anyone, so it is checked event by event before any object is built.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import read_file

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

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
    """Return the content of a YAML file of the user. Refuse invalid YAML and duplicate keys, see `load_yaml`.

    Args:
        path: The file.
        what: Name of the file in messages; its path by default.

    Raises:
        ConfigError: The file cannot be read. The message names the file, the line and the reason.
    """
    try:
        return parse_yaml(read_file(path, links=True), what or str(path))
    except OSError as error:
        raise ConfigError(f"{what or path} is no readable YAML: {error.strerror}") from error


def parse_yaml(text: bytes, what: str) -> Any:
    """Parse YAML from bytes. Raise a `ConfigError` that names the file (`what`) if the YAML is not valid."""
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
    """Make a jsonargparse parser refuse YAML with duplicate keys, tags or deep nesting, and return the parser.

    This applies `check_yaml` to config files and to values on the command line.
    """
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
        """Count a node with all that its aliases stand for; return what is refused about it."""
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
    """A YAML mapping or list that is currently being read, with its keys so far."""

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
