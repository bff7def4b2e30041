"""Write an HTML page with interactive figures of many runs. It works offline and executes no code of the runs.

The page contains the runs' numbers as JSON. `page.js` draws them in the browser with Plotly.
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
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError
from plotly.offline import get_plotlyjs

from fl_lightning.analysis.comparison import compare, format_setting, group_labels
from fl_lightning.analysis.result_table import ResultTable
from fl_lightning.analysis.statistics import spread
from fl_lightning.core.errors import ConfigError, one_line
from fl_lightning.core.files import write_atomically
from fl_lightning.core.names import join_names
from fl_lightning.runs.csv_reader import read_columns
from fl_lightning.runs.curves import x_values
from fl_lightning.runs.partition import MAX_COLUMNS, group_clients, read_counts
from fl_lightning.runs.reader import Run

MARK = b'<meta name="generator" content="fl-lightning report">'
"""A line at the start of every report that marks the file as a report."""

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
ROUNDING = 1e-15
"""Magnitude below which a metric is a rounding error."""
MOST_ROUNDS = 1000
"""Maximum number of rounds of a run that are drawn."""
MOST_POINTS = 1000
"""Maximum number of clients of a run that are drawn as points."""
MOST_CELLS = 300_000
"""Maximum number of cells, clients times classes, of all partitions together."""
IMAGE_BYTES, IMAGES_BYTES = 150_000, 2_000_000
"""Maximum size of one image and of all images. Larger images are reduced."""
MOST_FILE_BYTES = {".csv": 2**30, ".png": 20_000_000}
MOST_PIXELS = 25_000_000
"""Limits above which a file or an image is not opened."""
SIDES = (1400, 1000, 700)
"""Lengths in pixels of the longer side, tried in turn to reduce a large image."""
MOST_TEXT = 300
"""Maximum number of characters of a setting's value."""


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


def write_report(runs: Sequence[Run], path: Path, sections: Sequence[Section] = ()) -> list[str]:
    """Write the HTML report of some runs to a file.

    Args:
        runs: At least one run.
        path: The file; an existing report is replaced.
        sections: Sections to show first.

    Returns:
        A line for each part that was left out.

    Raises:
        ConfigError: The file exists and is not a report, or cannot be written.
    """
    if path.exists() and not is_report(path):
        raise ConfigError(f"-o: {path} exists and is not a report. Name another file, or remove it")
    data = contents(runs) | {"sections": list(map(section_data, sections))}
    try:
        write_atomically(path, page(data))
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


def contents(runs: Sequence[Run]) -> dict[str, Any]:
    """Return everything that the report of some runs shows, as JSON data with five significant digits per number."""
    left_out: list[str] = []
    names = run_names(runs)
    group_names, groups = groups_of(runs)
    group_of = {run: i for i, group in enumerate(groups) for run in group}
    texts = [setting_texts(run) for run in runs]
    common, others = split_settings(texts)
    entries = []
    for run, name, settings in zip(runs, names, others, strict=True):
        rounds = drawn_rounds(run)
        if len(rounds) < len(run.rounds):
            left_out.append(f"{name}: {len(rounds):,} of {len(run.rounds):,} rounds are drawn")
        values = {"axes": axes(run, rounds), "metrics": metrics(run, rounds)}
        values["clients"] = _read_or_skip(left_out, f"{name}/clients.csv", clients, run, rounds) or {}
        entries.append({"name": name, "group": group_of[run], **values, "settings": settings})
    return {
        "title": title_of(texts, names),
        "groups": group_names,
        "runs": entries,
        "common": common,
        "summary": summary(groups),
        "partitions": partitions(runs, names, left_out),
        "images": last_images(runs, names, left_out),
        "sections": [],
        "left_out": left_out,
    }


# --- numbers ---


def round_number(value: float) -> float | int | None:
    """Return a number rounded to five significant digits; None for NaN and infinity, which JSON lacks.

    Numbers below `ROUNDING` are rounding errors, such as the deviation of equal accuracies, and become 0.
    """
    rounded = float(f"{value:.5g}") if not abs(value) < ROUNDING else 0
    if not math.isfinite(rounded):  # the largest floats round to infinity
        return None
    return int(rounded) if abs(rounded) < 1e15 and rounded == int(rounded) else rounded


def drawn_rounds(run: Run) -> list[int]:
    """Return the numbers of a run's rounds to draw: all; in long runs every n-th evaluated round and the last round."""
    count = len(run.rounds)
    if count <= MOST_ROUNDS:
        return list(range(1, count + 1))
    evaluated = [i for i, row in enumerate(run.rounds, 1) if any("/acc" in name for name in row)] or range(1, count + 1)
    step = -(-len(evaluated) // (MOST_ROUNDS - 1))
    return sorted({*evaluated[step - 1 :: step], count})


def axes(run: Run, rounds: Sequence[int]) -> dict[str, list[float | int | None]]:
    """Return the x values of a run's curves at some rounds: round number, total bytes and total seconds until then."""
    sent, seconds = x_values(run.rounds, "bytes"), x_values(run.rounds, "seconds")
    return {
        "round": list(rounds),
        "bytes": [round_number(sent[i - 1]) for i in rounds],
        "seconds": [round_number(seconds[i - 1]) for i in rounds],
    }


def metrics(run: Run, rounds: Sequence[int]) -> dict[str, list[float | int | None]]:
    """Return each metric's values at some rounds of a run, None where missing; metrics without values are left out."""
    names = dict.fromkeys(name for row in run.rounds for name in row if name != "round")
    columns = {name: [round_number(run.rounds[i - 1].get(name, math.nan)) for i in rounds] for name in names}
    return {name: values for name, values in columns.items() if any(value is not None for value in values)}


def clients(run: Run, rounds: Sequence[int]) -> dict[str, Any]:
    """Return the distribution of each metric over a run's clients: quantiles by round, and values in the last round.

    Raises:
        FileNotFoundError: `clients.csv` does not exist.
        ValueError: The file is not a valid `clients.csv`.
    """
    columns = {name: np.asarray(column) for name, column in read_columns(own_file(run, "clients.csv")).items()}
    if not {"round", "client"} <= columns.keys():
        raise ValueError("the columns round and client are missing")
    round, client = columns.pop("round"), columns.pop("client")
    spreads = {name: _spread(round, client, values, rounds) for name, values in columns.items()}
    return {name: each for name, each in spreads.items() if each}


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
        "quantiles": [[round_number(value) for value in line] for line in quantiles.tolist()],
        "last": {
            "round": int(found[-1]),
            "client": client[last][chosen].astype(int).tolist(),
            "value": [round_number(value) for value in values[last][chosen].tolist()],
        },
    }


# --- names, groups and settings ---


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return the name of each run: the path of its folder relative to the folder that contains all runs."""
    folders = [run.run_dir.absolute() for run in runs]
    base = os.path.commonpath([folder.parent for folder in folders])
    return [str(folder.relative_to(base)) for folder in folders]


def title_of(texts: Sequence[Mapping[str, str]], names: Sequence[str]) -> str:
    """Return the title of a report, such as `FedAvg on Digits: 6 runs, 3 seeds`.

    For a single run, its name replaces the counts.

    Args:
        texts: The settings of each run.
        names: The name of each run.
    """
    methods, datasets, seeds = (
        list(dict.fromkeys(settings[key] for settings in texts if key in settings))
        for key in ("algorithm", "scenario.dataset", "seed")
    )
    what = " on ".join(filter(None, map(join_names, (methods, datasets))))
    counts = f"{len(names)} runs{f', {len(seeds)} seeds' if len(seeds) > 1 else ''}" if len(names) > 1 else names[0]
    return f"{what}: {counts}" if what else counts


def split_settings(texts: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], list[dict[str, str]]]:
    """Return the settings that all runs have in common, and the other settings of each run."""
    common = {key: text for key, text in texts[0].items() if all(each.get(key) == text for each in texts)}
    return common, [{key: text for key, text in each.items() if key not in common} for each in texts]


def setting_texts(run: Run) -> dict[str, str]:
    """Return the settings of a run by key, as text of at most `MOST_TEXT` characters."""
    texts = {key: format_setting(value) for key, value in run.settings.items()}
    return {key: each if len(each) <= MOST_TEXT else f"{each[: MOST_TEXT - 1]}…" for key, each in texts.items()}


def groups_of(runs: Sequence[Run]) -> tuple[list[str], list[list[Run]]]:
    """Return the names and runs of the groups that `compare` forms. Each run without a config is a separate group."""
    configured = [run for run in runs if run.config]
    groups = compare(configured, reference={}).groups if configured else []
    others = [run for run in runs if not run.config]
    return group_labels(groups) + [run.run_dir.name for run in others], [group.runs for group in groups] + [
        [run] for run in others
    ]


def summary(groups: Sequence[Sequence[Run]]) -> dict[str, Any]:
    """Return the results of each group: mean ± sample standard deviation of summary values over the group's runs."""
    names = dict.fromkeys(name for group in groups for run in group for name in run.summary)
    columns = [name for name in names if name.endswith(("_last", "_best")) or name.startswith("R_")]
    columns.sort(key=lambda name: (not name.startswith("global/"), not name.startswith("R_")))
    rows = []
    for group in groups:
        figures = [_mean_and_deviation([run.summary.get(name) for run in group]) for name in columns]
        rounds = _mean_and_deviation([len(run.rounds) for run in group])
        sent = _mean_and_deviation([run.rounds[-1].get("comm/total_bytes", math.nan) / 1e6 for run in group])
        seconds = _mean_and_deviation([sum(row.get("time/round_s", math.nan) for row in run.rounds) for run in group])
        rows.append([str(len(group)), rounds, *figures, sent, seconds])
    return {"columns": ["runs", "rounds", *columns, "MB", "seconds"], "rows": rows}


def _mean_and_deviation(values: Sequence[float | None]) -> str | None:
    """Return the mean ± standard deviation of the finite values, with their count if other values are missing."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    figures = spread(known)
    if figures is None:
        return None
    cell = f"{figures.mean:.4g} ± {figures.std:.2g}" if figures.std else f"{figures.mean:.4g}"
    return cell if len(known) == len(values) else f"{cell} ({len(known)} of {len(values)})"


# --- partitions and images ---


def partitions(runs: Sequence[Run], names: Sequence[str], left_out: list[str]) -> list[dict[str, Any]]:
    """Return each distinct partition: its runs, counts and names. More than 200 clients are averaged in groups."""
    found: dict[Any, dict[str, Any]] = {}
    cells = 0
    for i, run in enumerate(runs):
        path = f"{names[i]}/partition.csv"
        partition = _read_or_skip(left_out, path, lambda run: read_counts(own_file(run, "partition.csv")), run)
        if partition is None:
            continue
        counts, names_of = partition
        if known := found.get(key := (counts.shape, counts.tobytes(), *map(tuple, names_of))):
            known["runs"].append(i)
            continue
        drawn = group_clients(counts).T if len(counts) > MAX_COLUMNS else counts
        cells += drawn.size
        if cells > MOST_CELLS:
            left_out.append(f"{path}: earlier partitions fill the page")
            continue
        rows = [[round_number(count) for count in row] for row in drawn.tolist()]
        shown = {"clients": names_of.clients if len(counts) <= MOST_POINTS else [], "classes": names_of.classes}
        found[key] = {"runs": [i], "clients": len(counts), "counts": rows, "names": shown}
    return list(found.values())


def last_images(runs: Sequence[Run], names: Sequence[str], left_out: list[str]) -> list[dict[str, Any]]:
    """Return the latest image in each subfolder of the runs' `figures/`, as many as the page may contain."""
    found, size = [], 0
    for i, run in enumerate(runs):
        for name, file in _read_or_skip(left_out, f"{names[i]}/figures", image_files, run.run_dir) or []:
            path = f"{names[i]}/figures/{name}/{file}"
            image = _read_or_skip(left_out, path, embed_image, run, name, file)
            if image and size + len(image["source"]) > IMAGES_BYTES:
                left_out.append(f"{path}: earlier images fill the page")
            elif image:
                size += len(image["source"])
                found.append({"run": i, "name": name, "round": int(file[6:-4]), **image})
    return found


def image_files(folder: Path) -> list[tuple[str, str]]:
    """Return the subfolders of a run's `figures/`, each with the file name of the image of the latest round."""
    found = []
    for kind in sorted((folder / "figures").iterdir()):
        names = [path.name for path in kind.iterdir()] if kind.is_dir() else []
        if images := [name for name in names if re.fullmatch(r"round-[0-9]{1,9}\.png", name)]:
            found.append((kind.name, max(images, key=lambda name: int(name[6:-4]))))
    return found


def embed_image(run: Run, name: str, file: str) -> dict[str, Any]:
    """Return an image of a run as a data URL (`source`), and whether the image had to be made smaller (`reduced`).

    Raises:
        ValueError: The file is not a PNG image, or too large.
    """
    content = own_file(run, "figures", name, file).read_bytes()
    try:
        image = Image.open(io.BytesIO(content), formats=["PNG"])
        if image.width * image.height > MOST_PIXELS:
            raise Image.DecompressionBombError
        image.load()
    except UnidentifiedImageError as error:
        raise ValueError("it is not a PNG image") from error
    except Image.DecompressionBombError as error:
        raise ValueError(f"it has more than {MOST_PIXELS:,} pixels") from error
    except Exception as error:  # Pillow raises many kinds of errors for damaged images
        raise ValueError(f"it is damaged: {one_line(error)}") from error
    small = content if len(content) <= IMAGE_BYTES else reduce_image(image)
    return {"source": f"data:image/png;base64,{base64.b64encode(small).decode()}", "reduced": small is not content}


def reduce_image(image: Image.Image) -> bytes:
    """Return an image as PNG data, with fewer pixels and 128 colours to save space.

    Raises:
        ValueError: The reduced image is still too large.
    """
    for side in SIDES:
        image = image.convert("RGB")
        image.thumbnail((side, side))
        reduced = image.quantize(128, method=Image.Quantize.FASTOCTREE)  # the default takes seconds
        reduced.save(content := io.BytesIO(), format="PNG", optimize=True)
        if content.tell() <= IMAGE_BYTES:
            return content.getvalue()
    raise ValueError(f"it takes more than {IMAGE_BYTES:,} bytes even if reduced")


# --- files ---


def own_file(run: Run, *parts: str) -> Path:
    """Return the path of a file below a run's folder. Raise an error if it is too large or reached through a link.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: It is a link, not a regular file, or too large.
    """
    path = run.run_dir
    for part in parts:
        path = path / part
        about = path.lstat()
        if stat.S_ISLNK(about.st_mode):
            raise ValueError("it is a link")
    if not stat.S_ISREG(about.st_mode):
        raise ValueError("it is not a regular file")
    if about.st_size > MOST_FILE_BYTES[path.suffix]:
        raise ValueError("it is too large")
    return path


def _read_or_skip(left_out: list[str], name: str, read: Callable[..., Any], *arguments: Any) -> Any:
    """Return `read(*arguments)`, or None for a missing or invalid file. Invalid files are added to `left_out`."""
    try:
        return read(*arguments)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        left_out.append(f"{name}: {one_line(error)}")
        return None


def _hash(script: str) -> str:
    """Return the SHA-256 hash of a script in the form that a Content-Security-Policy needs."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
