"""`fl-lightning cite`: print BibTeX of methods, datasets and other parts, or of all that a run used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fl_lightning import __version__
from fl_lightning.cli.catalogue import BASES, classes_of
from fl_lightning.cli.other_frameworks import CLASSES
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.references import PACKAGE, Reference, all_references, read_references, sources
from fl_lightning.core.spelling import fold, match_case, nearest
from fl_lightning.core.terminal import echo
from fl_lightning.runs.reader import class_name, read_config
from fl_lightning.runs.search import find

OWN_NAME = "fl-lightning"


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Print the sources of all names and runs, each once, and this package's entry at the end."""
    names = dict.fromkeys(name for word in given.names for name in names_of(word))
    cited: dict[str, list[str]] = {}
    for name in names:
        for one in sources(name):
            cited.setdefault(one.key, []).append(name)
    entries = [f"% {', '.join(cited[one.key])}\n{one.bibtex()}" for one in all_references() if one.key in cited]
    without = [name for name in names if not sources(name)]
    remark = [f"% From no paper: {', '.join(without)}"] if without else []
    echo("\n\n".join([*entries, *remark, f"% {OWN_NAME}\n{package_reference().bibtex()}"]))
    return 0


def names_of(word: str) -> list[str]:
    """Return the names to cite for a word of the command line: a name, or a folder of runs.

    Raises:
        ConfigError: The word is neither, or no run in the folder has a config.
    """
    if fold(word) == fold(OWN_NAME):
        return []
    known = {*read_references(), *(name for kind in BASES for name in classes_of(kind))} - {PACKAGE}
    name = match_case(word, known)
    if name in known:
        return [name]
    if Path(word).is_dir():
        configs = [read_config(folder) for folder in find(word)]
        if not any(configs):
            raise ConfigError(f"cite: {word}: no run with a config found. Name its classes, such as FedAvg.")
        return [name for config in configs for name in used_names(config) if sources(name)]
    near = CLASSES.get(fold(word)) or nearest(word, known)
    fix = f"Did you mean {near}?" if near else "See `fl-lightning list`. For a run, give its folder."
    raise ConfigError(f"cite: name {word!r} not found. {fix}")


def used_names(config: Any) -> Iterator[str]:
    """Yield the class names in a config, and its keys that have a value."""
    if isinstance(config, list):
        for one in config:
            yield from used_names(one)
    if isinstance(config, dict):
        for key, value in config.items():
            if key == "class_path":
                yield class_name(value)
            elif value not in (None, False):
                yield key
                yield from used_names(value)


def package_reference() -> Reference:
    """Return this package's entry, with its version."""
    one = read_references()[PACKAGE]
    return replace(one, fields=one.fields | {"note": f"Version {__version__}"})
