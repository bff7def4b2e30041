"""Generate pages of the site: README, CONTRIBUTING, CHANGELOG, the examples and the reference.

MkDocs calls the functions `on_...`, and mkdocstrings loads `Callbacks` and `Options`.
"""

from __future__ import annotations

import inspect
import posixpath
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import fl_lightning
from fl_lightning.core.arguments import FieldsMixin
from fl_lightning.core.public_names import public_classes

ROOT = Path(__file__).parent.parent
ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
EXAMPLES = {f"examples/{path.name}": f"examples/{path.name}.md" for path in sorted((ROOT / "examples").glob("*.*"))}
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
TUTORIALS = {f"docs/tutorials/{path.name}": f"tutorials/{path.stem}.md" for path in NOTEBOOKS}
PAGES = ROOT_PAGES | EXAMPLES | TUTORIALS  # the page of each file of the repository

FILTERED = tuple(
    f"fl_lightning{name}" for name in ("", ".core", ".client", ".evaluation", ".loggers", ".runs", ".analysis", ".cli")
)
"""Packages with a reference page that has only the modules with public names, and the modules in `EXTRA_MODULES`."""
EXTRA_MODULES = {
    *("fl_lightning.core.state_dicts", "fl_lightning.evaluation.summary"),
    *("fl_lightning.runs.search", "fl_lightning.runs.tables"),
}
PACKAGES = (
    *FILTERED,
    "fl_lightning.algorithms",
    "fl_lightning.algorithms.global_model",
    "fl_lightning.algorithms.personalized",
    "fl_lightning.algorithms.clustered",
    "fl_lightning.algorithms.decentralized",
    "fl_lightning.algorithms.adapters",
    "fl_lightning.data",
    "fl_lightning.models",
    "fl_lightning.engines",
    "fl_lightning.callbacks",
)
GROUPS = {  # of the packages in the navigation of the reference
    "Experiments": ("", ".core", ".data", ".models", ".client", ".engines"),
    "Methods": (".algorithms",),
    "Results": (".evaluation", ".loggers", ".callbacks", ".runs", ".analysis", ".cli"),
}
LOW_SEARCH_RANK = 0.001  # a word in a title counts a thousand times as much as one in the text
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


class Callbacks(griffe.Extension):
    """Load the folder `callbacks` as the package `fl_lightning.callbacks`."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Add the package to `fl_lightning`."""
        if pkg.path == "fl_lightning":
            pkg.set_member("callbacks", loader.load("callbacks"))


class Options(griffe.Extension):
    """Add the constructor of each class whose options are fields, which does not exist in the sources."""

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add `__init__` with the parameters that the imported class has."""
        if not cls.module.path.startswith("fl_lightning."):  # `callbacks` would be imported under a second name
            return
        found = getattr(import_module(cls.module.path), cls.name, None)
        has_options = isinstance(found, type) and issubclass(found, FieldsMixin) and is_dataclass(found)
        if not has_options or "__init__" in cls.members:
            return
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        written = {option.name: option.type for option in fields(found)}  # the types as in the source
        for option in list(inspect.signature(found.__init__).parameters.values())[1:]:
            kind, default = getattr(griffe.ParameterKind, option.kind.name.lower()), repr(option.default)
            annotation = written.get(option.name, option.annotation)
            parameters.append(griffe.Parameter(option.name, annotation=annotation, kind=kind, default=default))
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages of the examples and of the reference to the navigation."""
    groups: dict[str, list[dict[str, str]]] = {title: [] for title in GROUPS}
    for name in PACKAGES:
        top = f"{name}.".partition(".")[2].partition(".")[0]
        title = next(title for title, tops in GROUPS.items() if f".{top}".rstrip(".") in tops)
        groups[title].append({name.removeprefix("fl_lightning."): f"api/{name}.md"})
    pages = {
        "Examples": [{title_of(ROOT / source): target} for source, target in EXAMPLES.items()],
        "Reference": ["api/index.md", *({title: packages} for title, packages in groups.items())],
    }
    for entry in config.nav or []:
        entry.update({title: pages[title] for title in entry if title in pages})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    contents = {target: (ROOT / source).read_text() for source, target in ROOT_PAGES.items()}
    contents |= {target: file_page(ROOT / source) for source, target in EXAMPLES.items()} | reference()
    for target, content in contents.items():
        files.append(File.generated(config, target, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]  # the home page would be its only entry
    elif here in EXAMPLES.values():
        page.meta["hide"] = ["toc"]  # the file has no headings
    home = next((source for source, target in PAGES.items() if target == here), f"docs/{here}")

    def rewrite_link(link: re.Match[str]) -> str:
        source = posixpath.normpath(posixpath.join(posixpath.dirname(home), link[1]))
        target = PAGES.get(source) or posixpath.relpath(source, "docs")
        return posixpath.relpath(target, posixpath.dirname(here) or ".")

    return "".join(part if FENCE.match(part) else LINK.sub(rewrite_link, part) for part in FENCE.split(markdown))


def on_page_content(html: str, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Give a page the words by which a search finds it, and a low rank if a search lists it last."""
    terms, here = config.extra["search"], page.file.src_uri
    if here in terms["words"]:
        page.meta["tags"] = terms["words"][here]
    if here.partition("/")[0].removesuffix(".md") in terms["last"]:
        page.meta["search"] = {"boost": LOW_SEARCH_RANK}
    return html


def file_page(path: Path) -> str:
    """Return a page that shows a file."""
    language, name = (
        {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}[path.suffix],
        f"{path.parent.name}/{path.name}",
    )
    return f'# {title_of(path)}\n\n```{language} title="{name}"\n{path.read_text()}```\n'


def title_of(path: Path) -> str:
    """Return the title of a file's page: the first words of its docstring or first comment."""
    first = next(line for line in path.read_text().split("\n") if not line.startswith("#!")).lstrip('"# ')
    return re.split(r"[:,] |\. [A-Z]|\.\W*$", first)[0]


def reference() -> dict[str, str]:
    """Return the pages of the reference: an overview, and one page per package."""
    loader = griffe.GriffeLoader(search_paths=[ROOT], extensions=griffe.load_extensions(Callbacks, Options))
    loader.load("fl_lightning")
    loader.resolve_aliases()
    packages = {name: loader.modules_collection[name] for name in PACKAGES}
    # These exports are found by scanning files, so griffe does not see them.
    loader.modules_collection["fl_lightning.algorithms"].exports = list(public_classes())
    exported = {name: find_object(loader, name) for name in sorted(fl_lightning.__all__, key=str.lower)}
    homes = EXTRA_MODULES | {thing.canonical_path.rpartition(".")[0] for thing in exported.values()}
    shown = {
        name: sorted(one for one in modules_below(package) if name not in FILTERED or one in homes)
        for name, package in packages.items()
    }
    rows = [f"| [`{name}`]({name}.md) | {first_line(package)} |" for name, package in packages.items()]
    names = [f"| {linked(name, thing)} | {first_line(thing)} |" for name, thing in exported.items()]
    overview = [
        "# Reference",
        "Each package has a page, generated from the docstrings:",
        "\n".join(["| package | content |", "|---|---|", *rows]),
        "You can import these names with `from fl_lightning import ...`:",
        "\n".join(["| name | description |", "|---|---|", *names]),
    ]
    pages = {f"api/{name}.md": package_page(loader, name, package, shown[name]) for name, package in packages.items()}
    return pages | {"api/index.md": "\n\n".join(overview)}


def modules_below(package: griffe.Module) -> Iterator[str]:
    """Yield the import paths of a package's modules, and of those in its folders without a reference page."""
    for module in package.modules.values():
        if not module.is_init_module:
            yield module.path
        elif module.path not in PACKAGES:
            yield from modules_below(module)


def find_object(loader: griffe.GriffeLoader, name: str, package: str = "fl_lightning") -> griffe.Object | griffe.Alias:
    """Return an exported object, from the module that defines it if the package does not import it statically."""
    home = package
    if name in public_classes():
        home = f"fl_lightning.algorithms.{public_classes()[name]}"
    elif package == "fl_lightning" and name in fl_lightning.HOMES:
        home = f"fl_lightning.{fl_lightning.HOMES[name]}"
    return loader.modules_collection[f"{home}.{name}"]


def package_page(loader: griffe.GriffeLoader, name: str, package: griffe.Module, modules: list[str]) -> str:
    """Return the page of a package: its public names and its modules."""
    exports = sorted(map(str, package.exports or ()), key=str.lower)
    if name == "fl_lightning":
        imports = "The [overview](index.md) lists the names that can be imported from here."
    elif exports:
        names = ", ".join(linked(one, find_object(loader, one, name)) for one in exports)
        imports = f"You can import these names with `from {name} import ...`: {names}."
    else:
        parent = name.rpartition(".")[0]
        imports = f"Import these names from [`{parent}`]({parent}.md)."
    return "\n\n".join([f"# {name}", first_line(package), imports, *(f"::: {module}" for module in modules)])


def linked(name: str, thing: griffe.Object | griffe.Alias) -> str:
    """Return a name as a link to its documentation."""
    return f"[`{name}`]({thing.canonical_path}.md)" if thing.is_module else f"[`{name}`][{thing.canonical_path}]"


def first_line(thing: griffe.Object | griffe.Alias) -> str:
    """Return the first line of a docstring."""
    return thing.docstring.value.partition("\n")[0] if thing.docstring else ""
