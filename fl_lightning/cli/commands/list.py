"""`fl-lightning list`: list the names of algorithms, datasets, models and more that a config can use."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.catalogue import KINDS, groups
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.spelling import suggest
from fl_lightning.core.terminal import echo


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Print the names that a config can use, with descriptions: all of them, or one kind such as `datasets`."""
    if given.kind not in (None, *KINDS):
        raise ConfigError(f"list: kind {given.kind!r} not found. {suggest(None, KINDS)}")
    for kind in [given.kind] if given.kind else KINDS:
        by_heading = groups(kind)
        width = max(len(name) for lines in by_heading.values() for name in lines)
        for heading, lines in by_heading.items():
            echo("\n".join([heading, *(f"  {name:<{width}}  {line}" for name, line in lines.items())]))
    return 0
