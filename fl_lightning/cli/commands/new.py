"""`fl-lightning new`: write a small project with a method, a config, a sweep, a test and a README."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path, PurePath

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.cli.new_folder import write_new_folder
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.terminal import echo

TEMPLATES = Path(__file__).parents[1] / "templates"
"""Template folder of a project named `my_method`. Each kind of data has a subfolder with additional files."""


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Write the folder of a new project, and print the command that runs it."""
    check_name(given.name)
    folder = Path(given.name)
    write_new_folder("new", folder, project_files(given.name, given.data))
    echo(f"next: cd {folder} && fl-lightning fit --config {folder}.yaml")
    return 0


def check_name(name: str) -> None:
    """Raise an error if a project's name is no valid module name, or is taken by another class or module.

    Raises:
        ConfigError: Names the reason, and a valid name if there is a similar one.
    """
    if not is_module_name(name):
        cleaned = re.sub(r"\W+", "_", PurePath(name).name).strip("_")
        fix = cleaned if is_module_name(cleaned) else f"my_{cleaned or 'method'}"
        raise ConfigError(f"new: {name!r} cannot be the name of a Python module. Did you mean {fix}?")
    if class_name(name) in template_names():
        raise ConfigError(f"new: the project has another class {class_name(name)}. Choose another name.")
    if not Path(name).exists() and (name in sys.modules or find_spec(name)):
        raise ConfigError(f"new: a Python module {name!r} is installed. Choose another name.")


def is_module_name(name: str) -> bool:
    """Return whether a name is a valid module name, and its camel-case form (`MyMethod`) a valid class name."""
    return all(one.isidentifier() and not iskeyword(one) for one in (name, class_name(name)))


def class_name(name: str) -> str:
    """Convert a project's name to the class name of its federated method: `my_method` to `MyMethod`."""
    return "".join(part[:1].upper() + part[1:] for part in name.split("_"))


def template_names() -> set[str]:
    """Return the names of all classes and imports in the templates, except `MyMethod`."""

    def names() -> Iterator[str]:
        for path in TEMPLATES.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef | ast.alias):
                    yield node.name

    return {*names()} - {"MyMethod"}


def project_files(name: str, data: str) -> dict[str, str]:
    """Return the content of each file of a new project, by file name.

    Args:
        name: The project's name.
        data: The kind of data, a folder of the templates.
    """

    def rename(text: str) -> str:
        return text.replace("MyMethod", class_name(name)).replace("my_method", name)

    paths = (path for folder in (TEMPLATES, TEMPLATES / data) for path in folder.iterdir() if path.is_file())
    return {rename(path.name): rename(path.read_text(encoding="utf-8")) for path in paths}
