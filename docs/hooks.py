"""What the site has beside the pages of this folder: README, CONTRIBUTING, CHANGELOG, the examples and the reference.

MkDocs calls the functions by their names, mkdocstrings loads `Callbacks`.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fl_lightning

ROOT = Path(__file__).parent.parent
WHOLE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
EXAMPLES = {f"examples/{path.name}": f"examples/{path.name}.md" for path in sorted((ROOT / "examples").glob("*.*"))}
PLACES = WHOLE | EXAMPLES  # a file of the repository, and its page

ROOMS = tuple(f"fl_lightning{room}" for room in ("", ".core", ".client", ".evaluation", ".loggers", ".runs", ".cli"))
"""Packages of which only the modules are shown that have what `fl_lightning` exports, and `ALSO`."""
ALSO = {"fl_lightning.core.state", "fl_lightning.evaluation.metrics"}
PACKAGES = (
    *ROOMS,
    "fl_lightning.algorithms",
    "fl_lightning.algorithms.global_model",
    "fl_lightning.algorithms.personalized",
    "fl_lightning.algorithms.clustered",
    "fl_lightning.algorithms.decentralized",
    "fl_lightning.data",
    "fl_lightning.models",
    "fl_lightning.engines",
    "fl_lightning.callbacks",
)
AFTER_THE_GUIDE = "---\nsearch:\n  boost: 0.3\n---\n\n"  # where a search finds both
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


class Callbacks(griffe.Extension):
    """The package `fl_lightning.callbacks`, whose folder lies beside that of `fl_lightning`."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Put it where it is imported from."""
        if pkg.path == "fl_lightning":
            pkg.set_member("callbacks", loader.load("callbacks"))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List the pages of the examples and of the reference in the navigation."""
    pages = {
        "Examples": [{Path(source).name: target} for source, target in EXAMPLES.items()],
        "Reference": ["api/index.md", *({name.removeprefix("fl_lightning."): f"api/{name}.md"} for name in PACKAGES)],
    }
    for entry in config.nav or []:
        entry.update({title: pages[title] for title in entry if title in pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are made."""
    made = {target: (ROOT / source).read_text() for source, target in WHOLE.items()}
    quiet = {target: listing(ROOT / source) for source, target in EXAMPLES.items()} | reference()
    made |= {target: AFTER_THE_GUIDE + content for target, content in quiet.items()}
    for target, content in made.items():
        files.append(File.generated(config, target, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Make of links between files of the repository links between pages of the site."""
    here = page.file.src_uri
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # it would be the one entry
    home = next((source for source, target in PLACES.items() if target == here), f"docs/{here}")

    def moved(link: re.Match[str]) -> str:
        source = posixpath.normpath(posixpath.join(posixpath.dirname(home), link[1]))
        target = PLACES.get(source) or posixpath.relpath(source, "docs")
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return "".join(part if FENCE.match(part) else LINK.sub(moved, part) for part in FENCE.split(markdown))


def listing(path: Path) -> str:
    """A page that shows a file."""
    language = {".py": "python", ".yaml": "yaml"}[path.suffix]
    return f"# {path.parent.name}/{path.name}\n\n```{language}\n{path.read_text()}```\n"


def reference() -> dict[str, str]:
    """The pages of the reference, one a package, and the one before them."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions(Callbacks))
    whole = loader.load("fl_lightning")
    loader.resolve_aliases()
    packages = {name: loader.modules_collection[name] for name in PACKAGES}
    exported = {name: whole[name] for name in sorted(fl_lightning.__all__, key=str.lower)}
    homes = ALSO | {thing.canonical_path.rpartition(".")[0] for thing in exported.values()}
    shown = {
        name: sorted(
            one
            for one, module in package.modules.items()
            if not module.is_init_module and (name not in ROOMS or f"{name}.{one}" in homes)
        )
        for name, package in packages.items()
    }
    rows = [f"| [`{name}`]({name}.md) | {told(package)} |" for name, package in packages.items()]
    names = [f"| {linked(name, thing)} | {told(thing)} |" for name, thing in exported.items()]
    overview = [
        "# Reference",
        "Made from the docstrings, a page a package:",
        "\n".join(["| package | what |", "|---|---|", *rows]),
        "What `from fl_lightning import ...` takes:",
        "\n".join(["| name | what |", "|---|---|", *names]),
    ]
    pages = {f"api/{name}.md": package_page(name, package, shown[name]) for name, package in packages.items()}
    return pages | {"api/index.md": "\n\n".join(overview)}


def package_page(name: str, package: griffe.Module, modules: list[str]) -> str:
    """What can be imported from a package, and its modules."""
    exports = sorted(map(str, package.exports or ()), key=str.lower)
    if name == "fl_lightning":
        taken = "What can be imported from here is listed in the [overview](index.md)."
    elif exports:
        taken = f"`from {name} import ...` takes {', '.join(linked(one, package[one]) for one in exports)}."
    else:
        parent = name.rpartition(".")[0]
        taken = f"Import these from [`{parent}`]({parent}.md)."
    return "\n\n".join([f"# {name}", told(package), taken, *(f"::: {name}.{module}" for module in modules)])


def linked(name: str, thing: griffe.Object | griffe.Alias) -> str:
    """A name that leads to where it is told about."""
    return f"[`{name}`]({thing.canonical_path}.md)" if thing.is_module else f"[`{name}`][{thing.canonical_path}]"


def told(thing: griffe.Object | griffe.Alias) -> str:
    """What it is, in one sentence."""
    return thing.docstring.value.partition("\n")[0] if thing.docstring else ""
