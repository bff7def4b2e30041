"""Many runs as one HTML page: figures to look into, from `file://`, with no network and none of the runs' code.

The runs' numbers travel once, as JSON; `page.js` makes the figures of them in the browser, by Plotly.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import io
import json
import math
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from PIL import Image
from plotly.offline import get_plotlyjs

from fl_lightning.analysis.comparison import Group, compare, spread, text
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.evaluation.metrics import read_columns
from fl_lightning.runs.partition import MAX_COLUMNS, binned, read_counts
from fl_lightning.runs.reader import Run

MARK = b'<meta name="generator" content="fl-lightning report">'
"""What a page begins with: by it a file is known to be one."""

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
MOST_ROUNDS = 1000
"""Rounds of a run that are drawn."""
MOST_POINTS = 1000
"""Clients of a run that have a point each in its last round."""
MOST_CELLS = 300_000
"""Cells, clients times classes, of all partitions together."""
PICTURE_BYTES, PICTURES_BYTES = 150_000, 2_000_000
"""What one picture, and all of them, may take; a larger one is reduced."""
MOST_FILE_BYTES = {".csv": 2**30, ".png": 20_000_000}
MOST_PIXELS = 25_000_000
"""What is larger is not opened."""
SIDES = (1400, 1000, 700)
"""Pixels of the longer side that a large picture is reduced to, one after another until it is small enough."""
MOST_TEXT = 300
"""Characters of a setting's value."""


def write_report(runs: Sequence[Run], path: Path) -> list[str]:
    """Write the page of these runs.

    Args:
        runs: At least one.
        path: The file; a report that is there already is replaced.

    Returns:
        What had to be left out, a line each.

    Raises:
        ConfigError: The file is there and is no report, or cannot be written.
    """
    if path.exists() and not is_report(path):
        raise ConfigError(f"-o: {path} is there already and is no report; name another file, or remove it")
    data = contents(runs)
    try:
        write_atomically(path, page(data))
    except OSError as error:
        raise ConfigError(f"-o: {path} cannot be written: {one_line(error)}") from error
    return data["left_out"]


def is_report(path: Path) -> bool:
    """Whether a file is a page of ours."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK in file.read(500)


def page(data: Mapping[str, Any]) -> str:
    """The whole page of what `contents` made.

    Nothing can run in it but its own script and Plotly's, which the page's policy names by their hashes; nothing can
    be fetched or sent.
    """
    parts = {name: _template(f"page.{name}") for name in ("html", "css", "js")}
    plotly = get_plotlyjs()
    policy = {
        "default-src": "'none'",
        "script-src": f"{_hash(parts['js'])} {_hash(plotly)}",
        "style-src": "'unsafe-inline'",  # Plotly styles what it draws; a style runs nothing
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    count = len(data["runs"])
    return Template(parts["html"]).substitute(
        policy="; ".join(f"{what} {sources}" for what, sources in policy.items()),
        title=html.escape(f"{count} runs" if count > 1 else data["runs"][0]["name"]),
        style=parts["css"],
        data=escaped(data),
        plotly=base64.b64encode(gzip.compress(plotly.encode(), mtime=0)).decode(),
        script=parts["js"],
    )


def escaped(data: Any) -> str:
    """JSON that no HTML parser can find markup in: of ASCII, and without `<`, `>` and `&`."""
    plain = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda sign: f"\\u{ord(sign[0]):04x}", plain)


def contents(runs: Sequence[Run]) -> dict[str, Any]:
    """What the page shows of these runs, as it travels: numbers with five digits, by column."""
    left_out: list[str] = []
    names = run_names(runs)
    group_names, groups = grouped(runs)
    group_of = {run: i for i, group in enumerate(groups) for run in group}
    common, own = told_apart([setting_texts(run) for run in runs])
    shown = []
    for run, name, settings in zip(runs, names, own, strict=True):
        rounds = drawn_rounds(run)
        if len(rounds) < len(run.rounds):
            left_out.append(f"{name}: {len(rounds):,} of {len(run.rounds):,} rounds are drawn")
        shown.append(
            {
                "name": name,
                "group": group_of[run],
                "axes": axes(run, rounds),
                "metrics": metrics(run, rounds),
                "clients": _unless_unreadable(left_out, f"{name}/clients.csv", clients, run, rounds) or {},
                "settings": settings,
            }
        )
    return {
        "groups": group_names,
        "runs": shown,
        "common": common,
        "summary": summary(groups),
        "partitions": partitions(runs, names, left_out),
        "pictures": pictures(runs, names, left_out),
        "left_out": left_out,
    }


# --- numbers ---


def short(value: float) -> float | int | None:
    """A number with five digits; None for one that is none, which JSON cannot say."""
    rounded = float(f"{value:.5g}")
    if not math.isfinite(rounded):  # the very largest floats are rounded to what is none
        return None
    return int(rounded) if abs(rounded) < 1e15 and rounded == int(rounded) else rounded


def drawn_rounds(run: Run) -> list[int]:
    """The rounds to draw: all or, of too many, every second, third, ... of those with an accuracy, and the last."""
    count = len(run.rounds)
    if count <= MOST_ROUNDS:
        return list(range(1, count + 1))
    evaluated = [i for i, row in enumerate(run.rounds, 1) if any("/acc" in name for name in row)] or range(1, count + 1)
    step = -(-len(evaluated) // (MOST_ROUNDS - 1))
    return sorted({*evaluated[step - 1 :: step], count})


def axes(run: Run, rounds: Sequence[int]) -> dict[str, list[float | int | None]]:
    """What a run's curves are drawn against: rounds, bytes and seconds so far; None where that is not known."""
    seconds = list(accumulate(row.get("time/round_s", math.nan) for row in run.rounds))
    return {
        "round": list(rounds),
        "bytes": [short(run.rounds[i - 1].get("comm/total_bytes", math.nan)) for i in rounds],
        "seconds": [short(seconds[i - 1]) for i in rounds],
    }


def metrics(run: Run, rounds: Sequence[int]) -> dict[str, list[float | int | None]]:
    """A run's metrics by name, None in rounds without; those that none of these rounds has are left out."""
    names = dict.fromkeys(name for row in run.rounds for name in row if name != "round")
    columns = {name: [short(run.rounds[i - 1].get(name, math.nan)) for i in rounds] for name in names}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def clients(run: Run, rounds: Sequence[int]) -> dict[str, Any]:
    """How single clients' figures spread: quantiles by round, and each client's own in the last round that has any.

    Raises:
        FileNotFoundError: There is no `clients.csv`.
        ValueError: It is none.
    """
    columns = {name: np.asarray(column) for name, column in read_columns(own_file(run, "clients.csv")).items()}
    if not {"round", "client"} <= columns.keys():
        raise ValueError("it has no columns round and client")
    return {
        name: spread
        for name, values in columns.items()
        if name not in ("round", "client")
        and (spread := _spread(columns["round"], columns["client"], values, rounds)) is not None
    }


def _spread(round: np.ndarray, client: np.ndarray, values: np.ndarray, rounds: Sequence[int]) -> dict[str, Any] | None:
    kept = np.isfinite(values) & np.isfinite(client) & np.isin(round, rounds)
    if not kept.any():
        return None
    order = np.argsort(round[kept], kind="stable")
    round, client, values = round[kept][order], client[kept][order], values[kept][order]
    found, starts = np.unique(round, return_index=True)
    parts = np.split(values, starts[1:])
    quantiles = np.array([np.quantile(part, QUANTILES) for part in parts]).T
    last = slice(starts[-1], None)
    chosen = np.linspace(0, len(parts[-1]) - 1, min(len(parts[-1]), MOST_POINTS)).astype(int)
    return {
        "rounds": found.astype(int).tolist(),
        "quantiles": [[short(value) for value in line] for line in quantiles.tolist()],
        "last": {
            "round": int(found[-1]),
            "client": client[last][chosen].astype(int).tolist(),
            "value": [short(value) for value in values[last][chosen].tolist()],
        },
    }


# --- names, groups and settings ---


def run_names(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its folder's path from the folder that holds them all."""
    folders = [run.run_dir.absolute() for run in runs]
    base = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(base)) for folder in folders]


def told_apart(texts: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """What all have in common, and what each has of the rest."""
    first, *others = texts
    common = {key: text for key, text in first.items() if all(other.get(key) == text for other in others)}
    return common, [{key: text for key, text in each.items() if key not in common} for each in texts]


def setting_texts(run: Run) -> dict[str, str]:
    """A run's settings as they are shown."""
    told = {key: text(value) for key, value in run.settings.items()}
    return {key: each if len(each) <= MOST_TEXT else f"{each[: MOST_TEXT - 1]}…" for key, each in told.items()}


def grouped(runs: Sequence[Run]) -> tuple[list[str], list[list[Run]]]:
    """Groups of runs as `compare` makes them, and what to call each; a run without a config is alone."""
    known = [run for run in runs if run.config]
    found = compare(known, reference={}).groups if known else []
    names = [group_name(group, found) for group in found]
    if len(found) == 1:
        names = [str(known[0].settings.get("algorithm", "all runs"))]
    alone = [run for run in runs if not run.config]
    return names + [run.run_dir.name for run in alone], [group.runs for group in found] + [[run] for run in alone]


def group_name(group: Group, groups: Sequence[Group]) -> str:
    """What to call a group: its method, and what tells it from others of that method."""
    alike = [other for other in groups if other.names.get("algorithm") == group.names.get("algorithm")]
    told = [
        value if key == "algorithm" else f"{key.rpartition('.')[2]}={value}"
        for key, value in group.names.items()
        if key == "algorithm" or len({other.names.get(key) for other in alike}) > 1
    ]
    return " ".join(told)


def summary(groups: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """The table at the page's top: means over a group's runs, ± their sample standard deviation."""
    names = dict.fromkeys(name for group in groups for run in group for name in run.summary)
    columns = [name for name in names if name.endswith(("_last", "_best")) or name.startswith("R_")]
    columns.sort(key=lambda name: (name.startswith("R_"), not name.startswith("global/")))
    rows = []
    for group in groups:
        figures = [_told([run.summary.get(name) for run in group]) for name in columns]
        rounds = _told([len(run.rounds) for run in group])
        sent = _told([run.rounds[-1].get("comm/total_bytes", math.nan) / 1e6 for run in group])
        seconds = _told([sum(row.get("time/round_s", math.nan) for row in run.rounds) for run in group])
        rows.append([str(len(group)), rounds, *figures, sent, seconds])
    return {"columns": ["runs", "rounds", *columns, "MB", "seconds"], "rows": rows}


def _told(values: Sequence[float | None]) -> str | None:
    """Mean ± standard deviation of those that are known, and of how many where they are not all."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    found = spread(known)
    if found is None:
        return None
    told = f"{found.mean:.4g} ± {found.std:.2g}" if found.std else f"{found.mean:.4g}"
    return told if len(known) == len(values) else f"{told} ({len(known)} of {len(values)})"


# --- partitions and pictures ---


def partitions(runs: Sequence[Run], names: Sequence[str], left_out: list[str]) -> list[dict[str, Any]]:
    """Who holds what, each partition once with the runs that have it; beyond 200 clients, means over neighbours."""
    found: dict[tuple[int, bytes], dict[str, Any]] = {}
    cells = 0
    for i, run in enumerate(runs):
        told = f"{names[i]}/partition.csv"
        counts = _unless_unreadable(left_out, told, lambda run: read_counts(own_file(run, "partition.csv")), run)
        if counts is None:
            continue
        if known := found.get(key := (len(counts), counts.tobytes())):
            known["runs"].append(i)
            continue
        drawn = binned(counts).T if len(counts) > MAX_COLUMNS else counts
        cells += drawn.size
        if cells > MOST_CELLS:
            left_out.append(f"{told}: the partitions before it have filled the page")
            continue
        rows = [[short(count) for count in row] for row in drawn.tolist()]
        found[key] = {"runs": [i], "clients": len(counts), "counts": rows}
    return list(found.values())


def pictures(runs: Sequence[Run], names: Sequence[str], left_out: list[str]) -> list[dict[str, Any]]:
    """The last picture of each kind that a run's callbacks left, as far as they fit into the page."""
    found, size = [], 0
    for i, run in enumerate(runs):
        for name, file in _unless_unreadable(left_out, f"{names[i]}/figures", last_pictures, run.run_dir) or []:
            told = f"{names[i]}/figures/{name}/{file}"
            picture = _unless_unreadable(left_out, told, embedded, run, name, file)
            if picture is None:
                continue
            size += len(picture["source"])
            if size > PICTURES_BYTES:
                left_out.append(f"{told}: the pictures before it have filled the page")
                size -= len(picture["source"])
                continue
            found.append({"run": i, "name": name, "round": int(file[6:-4]), **picture})
    return found


def last_pictures(folder: Path) -> list[tuple[str, str]]:
    """The kinds of pictures below a run's `figures/`, by name, and of each the last one's file name."""
    found = []
    for kind in sorted((folder / "figures").iterdir()):
        names = [path.name for path in kind.iterdir()] if kind.is_dir() else []
        if pictures := [name for name in names if re.fullmatch(r"round-[0-9]{1,9}\.png", name)]:
            found.append((kind.name, max(pictures, key=lambda name: int(name[6:-4]))))
    return found


def embedded(run: Run, name: str, file: str) -> dict[str, Any]:
    """A picture as the page carries it: its `source`, and whether it is `reduced`.

    Raises:
        ValueError: It is no PNG, or too large.
    """
    content = own_file(run, "figures", name, file).read_bytes()
    if content[:8] != b"\x89PNG\r\n\x1a\n" or content[12:16] != b"IHDR" or len(content) < 24:
        raise ValueError("it is no PNG")
    if math.prod(struct.unpack(">II", content[16:24])) > MOST_PIXELS:
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels")
    try:
        image = Image.open(io.BytesIO(content), formats=["PNG"])
        image.load()
    except Exception as error:  # a damaged picture can fail in as many ways as there are bytes
        raise ValueError(f"it is damaged: {one_line(error)}") from error
    small = content if len(content) <= PICTURE_BYTES else reduced(image)
    return {"source": f"data:image/png;base64,{base64.b64encode(small).decode()}", "reduced": small is not content}


def reduced(image: Image.Image) -> bytes:
    """A picture with fewer pixels and 128 colours.

    Raises:
        ValueError: Even so it is too large.
    """
    for side in SIDES:
        image = image.convert("RGB")
        image.thumbnail((side, side))
        few = image.quantize(128, method=Image.Quantize.FASTOCTREE)  # the default takes seconds
        few.save(content := io.BytesIO(), format="PNG", optimize=True)
        if content.tell() <= PICTURE_BYTES:
            return content.getvalue()
    raise ValueError(f"it takes more than {PICTURE_BYTES:,} bytes, however reduced")


# --- files ---


def own_file(run: Run, *parts: str) -> Path:
    """A file of a run: a regular one, in its folder, reached through no link.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is something else, or too large.
    """
    path = run.run_dir
    for part in parts:
        path = path / part
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            raise ValueError("a link, which leads who knows where")
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is no file")
    if about.st_size > MOST_FILE_BYTES[path.suffix]:
        raise ValueError("it is larger than it can be")
    return path


def _unless_unreadable(left_out: list[str], what: str, read: Callable[..., Any], *given: Any) -> Any:
    """What is read; None where there is nothing or, with a line that says so, where it cannot be read."""
    try:
        return read(*given)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        left_out.append(f"{what}: {one_line(error)}")
        return None


def _template(name: str) -> str:
    return (files("fl_lightning.analysis.html_report") / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """A script as a Content-Security-Policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
