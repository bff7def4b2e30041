"""Write the generated parts of docs/algorithms.md from the docstrings: `python docs/reference.py`."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any

from fl_lightning.algorithms import Algorithm
from fl_lightning.cli.catalogue import FAMILIES, classes
from fl_lightning.cli.signatures import find_class

PAGE = Path(__file__).with_name("algorithms.md")
COMMON = ("loss_terms", "aggregator", "buffers")
BYTES = re.compile(r"Bytes a round, each participant(?P<bound>, at most)?: down (?P<down>`[^`]+`), up (?P<up>`[^`]+`)")


def bytes_of(kind: type[Algorithm]) -> tuple[str, str]:
    """Return the bytes sent down and up, from the docstring."""
    found = BYTES.search(" ".join((inspect.getdoc(kind) or "").split()))
    assert found, f"{kind.__name__}: the docstring has no line about the bytes of a round"
    bound = "at most " if found["bound"] else ""
    return tuple(way if way == "`0`" else bound + way for way in (found["down"], found["up"]))  # type: ignore[return-value]


def overview() -> str:
    """Return a table of all methods."""
    lines = ["| method | family | what it does | bytes down | bytes up |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        for kind in classes("algorithms"):
            if kind.family() == family:
                what = (inspect.getdoc(kind) or "").partition("\n")[0]
                down, up = bytes_of(kind)
                name = f"[{kind.__name__}](#{anchor(kind)})"
                lines.append(f"| {name} | {family.replace('_', ' ')} | {what} | {down} | {up} |")
    return "\n".join(lines)


def options(kind: type[Algorithm]) -> str:
    """Return a table of a method's own options, their ranges for tuning, and the bytes that it sends."""
    described = find_class(f"{kind.__module__}.{kind.__name__}").help
    lines = ["| option | default | |", "|---|---|---|"]
    for name, parameter in inspect.signature(kind.__init__).parameters.items():
        if name != "self" and not (name in COMMON and parameter.default in (None, "average")):
            text = described[name].replace("||", "‖").replace("|", "\\|")
            lines.append(f"| `{name}` | {format_default(parameter.default)} | {text} |")
    down, up = bytes_of(kind)
    traffic = f"Bytes a round, each participant: down {down}, up {up}."
    ranges = ", ".join(f"`{name}` {format_range(space)}" for name, space in kind.search_space.items())
    table = [*lines, ""] if len(lines) > 2 else []
    return "\n".join([*table, *([f"Tuned over: {ranges}.", ""] if ranges else []), traffic])


def parts() -> str:
    """Return a table of the loss terms and aggregators that work in one method only."""
    lines = ["| part | works only in |", "|---|---|"]
    methods = {kind.__name__: kind for kind in classes("algorithms")}
    for word, kind in (("loss term", "loss_terms"), ("aggregator", "aggregators")):
        for part in classes(kind):
            if part.only_in:
                method = f"[{part.only_in}](#{anchor(methods[part.only_in])})"
                lines.append(f"| {word} `{part.__name__}` | {method} |")
    return "\n".join(lines)


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


def anchor(kind: type[Algorithm]) -> str:
    """Return the anchor of the heading above a method's block."""
    text = PAGE.read_text()
    assert marker(kind.__name__) in text, f"docs/algorithms.md has no line {marker(kind.__name__)}"
    heading = re.findall(r"^#+ (.+)$", text.partition(marker(kind.__name__))[0], re.MULTILINE)[-1]
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def marker(name: str) -> str:
    """Return the first line of a generated block."""
    return f"<!-- from the docstring: {name} -->"


def filled(text: str) -> str:
    """Return the page with its generated blocks updated."""
    blocks = {"overview": overview(), "parts": parts()} | {
        kind.__name__: options(kind) for kind in classes("algorithms")
    }
    for name, block in blocks.items():
        begin, end = marker(name), "<!-- end -->"
        assert begin in text, f"docs/algorithms.md has no line {begin}"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    now = PAGE.read_text()
    if "--check" in sys.argv:
        sys.exit(0 if filled(now) == now else "docs/algorithms.md: run python docs/reference.py")
    PAGE.write_text(filled(now))
