"""Write an HTML page with interactive figures of many runs. It works offline and executes no code of the runs.

The page contains the runs' numbers as JSON. `page.js` draws them in the browser with Plotly.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from plotly.offline import get_plotlyjs

from fl_lightning.analysis.html_report.contents import contents
from fl_lightning.analysis.result_table import ResultTable
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.runs.reader import Run

MARK = b'<meta name="generator" content="fl-lightning report">'
"""A line at the start of every report that marks the file as a report."""


class Section(NamedTuple):
    """An extra section of a report: a title, tables and figures.

    Args:
        title: The title.
        tables: The tables.
        figures: SVG images.
    """

    title: str
    tables: Sequence[ResultTable]
    figures: Sequence[bytes] = ()


def write_report(
    runs: Sequence[Run], path: Path, sections: Sequence[Section] = (), reference: Mapping[str, Any] | None = None
) -> list[str]:
    """Write the HTML report of some runs to a file.

    Args:
        runs: At least one run.
        path: The file; an existing report is replaced.
        sections: Sections to show first.
        reference: Settings of the group that the others are tested against, as in `compare`; by default FedAvg.

    Returns:
        A line for each part that was left out.

    Raises:
        ConfigError: The file exists and is not a report, or cannot be written, or the reference matches no group.
    """
    if path.exists() and not is_report(path):
        raise ConfigError(f"-o: {path} exists and is not a report. Name another file, or remove it")
    data = contents(runs, reference) | {"sections": list(map(section_data, sections))}
    try:
        write_atomically(path, page(data).encode(errors="replace"))  # names of folders need not be UTF-8
    except OSError as error:
        raise ConfigError(f"-o: {path} cannot be written: {one_line(error)}") from error
    return data["left_out"]


def section_data(section: Section) -> dict[str, Any]:
    """Return a section as JSON data, with figures as data URLs."""
    tables = [{"header": each.header, "rows": each.rows, "notes": each.notes} for each in section.tables]
    figures = [f"data:image/svg+xml;base64,{base64.b64encode(each).decode()}" for each in section.figures]
    return {"title": section.title, "tables": tables, "figures": figures}


def is_report(path: Path) -> bool:
    """Return whether a file is an HTML report written by `write_report`."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK in file.read(500)


def page(data: Mapping[str, Any]) -> str:
    """Return the HTML page of a report, given the report's data as `contents` returns it.

    The page's Content-Security-Policy allows only its own script and Plotly's, by their hashes, and no network access.
    """
    folder = files("fl_lightning.analysis.html_report")
    parts = {name: (folder / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    plotly = get_plotlyjs()
    policy = {
        "default-src": "'none'",
        "script-src": f"{_hash(parts['js'])} {_hash(plotly)}",
        "style-src": "'unsafe-inline'",  # Plotly needs inline styles, which execute no code
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return Template(parts["html"]).substitute(
        policy="; ".join(f"{what} {sources}" for what, sources in policy.items()),
        title=html.escape(data["title"]),
        style=parts["css"],
        data=escape_json(data),
        plotly=base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode(),
        script=parts["js"],
    )


def escape_json(data: Any) -> str:
    """Return data as JSON that is safe inside HTML: pure ASCII, with `<`, `>` and `&` escaped."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", plain)


def _hash(script: str) -> str:
    """Return the SHA-256 hash of a script in the form that a Content-Security-Policy needs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
