"""Describe the methods for their pages, from the code: `python docs/reference.py` writes the tables in docs/methods.

A page in docs/methods describes the methods of the modules that have its name. docs/method_pages.py adds the generated
parts to these pages of the site. The tables of the overview and of the parts are stored in their pages.
"""

from __future__ import annotations

import inspect
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.algorithms import Algorithm
from fl_lightning.cli.catalogue import FAMILIES, classes
from fl_lightning.cli.signatures import find_class
from fl_lightning.core.config_files import shipped, shipped_text
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.references import Reference, read_references, sources
from fl_lightning.models import ResNet8

PAGES = Path(__file__).with_name("methods")
COMMON = ("loss_terms", "aggregator", "buffers")
BYTES = re.compile(r"Bytes a round, each participant(?P<bound>, at most)?: down (?P<down>`[^`]+`), up (?P<up>`[^`]+`)")
KEPT = re.compile(r"Kept by (a client|the server): (.+?)\.(?: |$)")
NOT_STACKED = {
    *("APFL", "APPLE", "CriticalFL", "DisPFL", "Ditto", "FML", "FedKD", "FedROD", "FedSAM", "FedSiamDA", "MoFedSAM"),
    *("PFedMe", "PeerCriticalFL", "PerFedAvg"),
}
"""Methods whose clients the stacked engine cannot train together. tests/algorithms/test_methods.py tries all."""


def methods() -> list[type[Algorithm]]:
    """Return all methods, by family and then in alphabetical order."""
    return sorted(classes("algorithms"), key=lambda kind: FAMILIES.index(kind.family()))


def page_of(kind: type[Algorithm]) -> str:
    """Return the file name of a method's page: the name of its module."""
    return f"{kind.__module__.rpartition('.')[2]}.md"


def on_page(page: str) -> list[type[Algorithm]]:
    """Return the methods that a page describes."""
    return [kind for kind in methods() if page_of(kind) == page]


# --- Facts about a method ---


def docstring(kind: type[Algorithm]) -> str:
    """Return a method's docstring as one line."""
    return " ".join((inspect.getdoc(kind) or "").split())


def bytes_of(kind: type[Algorithm]) -> tuple[str, str]:
    """Return the bytes sent down and up, from the docstring."""
    found = BYTES.search(docstring(kind))
    assert found, f"{kind.__name__}: the docstring has no line about the bytes of a round"
    bound = "at most " if found["bound"] else ""
    return tuple(way if way == "`0`" else bound + way for way in (found["down"], found["up"]))  # type: ignore[return-value]


def kept_by(kind: type[Algorithm], who: str) -> str:
    """Return what `a client` or `the server` keeps from round to round, in addition to the shared model."""
    return dict(KEPT.findall(docstring(kind))).get(who, "nothing")


@cache
def built(kind: type[Algorithm]) -> Algorithm:
    """Return a method with its defaults, which a network has set up."""
    method = kind()
    with suppress(ConfigError):  # the network has no adapters
        method.prepare_network(ResNet8((1, 8, 8), 10))
    return method


def models(kind: type[Algorithm]) -> str:
    """Return which models a method trains, and so which metrics to read."""
    one, family = built(kind).one_model, kind.family()
    if family == "clustered":
        return "per cluster"
    own = family in ("personalized", "decentralized") or built(kind).personal
    return ", ".join([*(["global"] if one else []), *(["per client"] if own else [])])


def needs_classes(kind: type[Algorithm]) -> bool:
    """Return whether a method works only with class labels."""
    return any(True for _ in built(kind).of_classes)


def year(kind: type[Algorithm]) -> str:
    """Return the year of a method's paper; empty if it has none."""
    reference = read_references().get(kind.__name__)
    return str(reference.year) if reference else ""


def config_of(kind: type[Algorithm]) -> str | None:
    """Return the shipped config that trains a method on the digits; None for a method that needs another model."""
    names = [name for name in digits_configs() if digits_configs()[name] == kind.__name__]
    return min(names, key=len) if names else None


def command(kind: type[Algorithm]) -> str | None:
    """Return the command that trains a method on the digits; None for a method that needs another model."""
    name = config_of(kind)
    return f"fl-lightning fit --config {name}" if name else None


@cache
def digits_configs() -> dict[str, str]:
    """Return the method of each shipped config on the digits."""
    found = {}
    for name in shipped("configs"):
        if name.startswith("digits_"):
            algorithm = yaml.safe_load(shipped_text(name, "configs"))["algorithm"]
            found[name] = algorithm if isinstance(algorithm, str) else algorithm["class_path"]
    return found


# --- Tables ---


def overview() -> str:
    """Return a table of all methods."""
    columns = ["method", "family", "year", "what it does", "sends", "a client keeps", "models", "classes", "engines"]
    return table(columns, ([f"[{kind.__name__}]({page_of(kind)})", *overview_cells(kind)] for kind in methods()))


def overview_cells(kind: type[Algorithm]) -> list[str]:
    """Return the cells of a method in the overview, after its name."""
    name, what = kind.__name__, (inspect.getdoc(kind) or "").partition("\n")[0]
    classes_needed, engines = "needed" if needs_classes(kind) else "", "not stacked" if name in NOT_STACKED else "all"
    family, sent = kind.family().replace("_", " "), bytes_of(kind)[1]
    return [family, year(kind), what, sent, kept_by(kind, "a client"), models(kind), classes_needed, engines]


def facts(page: str) -> str:
    """Return a table of facts about the methods of a page, one column each."""
    kinds = on_page(page)
    rows = {
        "family": [kind.family().replace("_", " ") for kind in kinds],
        "import": [f"`from fl_lightning.algorithms import {kind.__name__}`" for kind in kinds],
        "bytes down": [bytes_of(kind)[0] for kind in kinds],
        "bytes up": [bytes_of(kind)[1] for kind in kinds],
        "a client keeps": [kept_by(kind, "a client") for kind in kinds],
        "the server keeps": [server_keeps(kind) for kind in kinds],
        "models": [models(kind) for kind in kinds],
        "class labels": ["needed" if needs_classes(kind) else "not needed" for kind in kinds],
        "[engines](../scale.md)": ["all but stacked" if kind.__name__ in NOT_STACKED else "all" for kind in kinds],
        "[checked](../correctness.md)": [checked(kind) for kind in kinds],
    }
    names = [f"`{kind.__name__}`" for kind in kinds] if len(kinds) > 1 else [""]
    return table(["", *names], ([name, *cells] for name, cells in rows.items()))


def server_keeps(kind: type[Algorithm]) -> str:
    """Return all that the server keeps from round to round."""
    kept = kept_by(kind, "the server")
    if not kind.server:
        return "there is no server"
    if built(kind).one_model:
        return "the shared model" if kept == "nothing" else f"the shared model; {kept}"
    return "the shared part of the model" if kept == "nothing" and "model" in bytes_of(kind)[1] else kept


def checked(kind: type[Algorithm]) -> str:
    """Return how a method is checked, from the table in docs/correctness.md."""
    rows = PAGES.with_name("correctness.md").read_text()
    found = re.search(rf"^\| \[{kind.__name__}\]\(.+\) \| .+ \| (\d\S+) \| (\S+) \|$", rows, re.MULTILINE)
    return f"a run equals a loop by hand within {found[1]} ({found[2]})" if found else "by its tests"


def options(kind: type[Algorithm]) -> str:
    """Return a table of a method's own options, and their ranges for tuning."""
    described = find_class(f"{kind.__module__}.{kind.__name__}").help
    rows = [
        [f"`{name}`", format_default(parameter.default), described[name].replace("||", "‖").replace("|", "\\|")]
        for name, parameter in inspect.signature(kind.__init__).parameters.items()
        if name != "self" and not (name in COMMON and parameter.default in (None, "average"))
    ]
    ranges = ", ".join(f"`{name}` {format_range(space)}" for name, space in kind.search_space.items())
    parts = [table(["option", "default", ""], rows)] if rows else ["It has only the common options."]
    return "\n\n".join([*parts, *([f"Tuned over: {ranges}."] if ranges else [])])


def parts() -> str:
    """Return a table of the loss terms and aggregators that work in one method only."""
    pages = {kind.__name__: page_of(kind) for kind in methods()}
    rows = [
        [f"{word} `{part.__name__}`", f"[{part.only_in}]({pages[part.only_in]})"]
        for word, kind in (("loss term", "loss_terms"), ("aggregator", "aggregators"))
        for part in classes(kind)
        if part.only_in
    ]
    return table(["part", "works only in"], rows)


def table(columns: list[str], rows: Any) -> str:
    """Return a Markdown table."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [columns, *rows]).replace(
        "|\n", f"|\n|{'---|' * len(columns)}\n", 1
    )


def citation(reference: Reference) -> str:
    """Return a paper as a line of text: authors, title with a link, venue and year."""
    first = reference.authors[:3]
    authors = ", ".join(first) + (" et al." if len(reference.authors) > len(first) else "")
    title = f"[{reference.title}]({reference.url})" if reference.url else reference.title
    return f"{authors}: {title}. {reference.venue}, {reference.year}."


def papers(page: str) -> list[Reference]:
    """Return the papers of a page's methods, without repetition."""
    return list({one.key: one for kind in on_page(page) for one in sources(kind.__name__)}.values())


def format_default(default: Any) -> str:
    """Return a default value as YAML."""
    if default is None or isinstance(default, bool):
        return f"`{str(default).lower().replace('none', 'null')}`"
    return f"`{list(default) if isinstance(default, tuple) else default}`"


def format_range(space: dict[str, Any]) -> str:
    """Return the values or the bounds of an option's range for tuning."""
    if "values" in space:
        return "in {" + ", ".join(map(str, space["values"])) + "}"
    return f"from {space['min']} to {space['max']}" + (" (log)" if "log" in space["distribution"] else "")


# --- The tables that are stored in pages ---


def filled(page: Path) -> str:
    """Return the text of a page with its generated blocks updated."""
    text = page.read_text()
    for name, block in {"overview": overview, "parts": parts}.items():
        begin, end = f"<!-- from the code: {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        if found:
            text = f"{before}{begin}\n{block()}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    stored = [PAGES / "index.md", PAGES / "combining.md"]
    if "--check" in sys.argv:
        stale = [page.name for page in stored if filled(page) != page.read_text()]
        sys.exit(f"docs/methods: {', '.join(stale)}: run python docs/reference.py" if stale else 0)
    for page in stored:
        page.write_text(filled(page))
