"""Add the parts of the methods' pages that come from the code: facts, options, a figure, a command and BibTeX.

MkDocs calls the functions `on_...`. The pages in docs/methods are the parts that are written by hand.
"""

from __future__ import annotations

from typing import Any

import curve_figures
import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from fl_lightning.cli.catalogue import FAMILIES

FIRST = ("index.md", "combining.md")
"""Pages about several methods."""
ABOUT_CURVES = "One seed and no tuning, so it is no ranking: [what the curves show](index.md#the-curves)."


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the pages to the navigation, by the family of their first method."""
    families: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for kind in reference.methods():
        page = f"methods/{reference.page_of(kind)}"
        if not any(page in pages for pages in families.values()):
            families[kind.family()].append(page)
    sections = [{family.replace("_", " ").capitalize(): pages} for family, pages in families.items()]
    for entry in config.nav or []:
        if "Methods" in entry:
            entry["Methods"] = [*(f"methods/{page}" for page in FIRST), *sections]
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Add the generated parts to the page of a method."""
    folder, _, name = page.file.src_uri.rpartition("/")
    if folder == "methods" and name == "index.md":
        page.meta["hide"] = ["toc"]  # room for the table
    return with_generated_parts(markdown, name) if folder == "methods" and name not in FIRST else markdown


def with_generated_parts(markdown: str, page: str) -> str:
    """Return a method's page with its facts after the title, and figure, command, options and BibTeX at the end."""
    title, _, text = markdown.partition("\n")
    kinds, papers = reference.on_page(page), reference.papers(page)
    assert kinds, f"docs/methods/{page} has the name of no method's module"
    parts = [title, *map(reference.citation, papers), reference.facts(page), text.strip()]
    figures = curve_figures.figures(kinds)
    parts += ["## On the digits", *figures]
    if figures[0].startswith("<figure"):  # otherwise it says why there is none
        parts.append(ABOUT_CURVES)
    commands = [command for command in map(reference.command, kinds) if command and command not in text]
    if commands:
        parts += ["## Run it", fenced("bash", *commands)]
    for kind in kinds:
        parts += [f"## Options of {kind.__name__}", reference.options(kind)]
    if papers:
        parts += ["## Cite", fenced("bibtex", *(paper.bibtex() for paper in papers))]
    return "\n\n".join(parts)


def fenced(language: str, *lines: str) -> str:
    """Return a code block."""
    return "\n".join([f"```{language}", *lines, "```"])
