"""A paper's table: its file, and the run that stands behind each of its numbers.

A file of `papers/` holds rows (methods), columns (scenarios), seeds, which figure of `final/summary.json` is read, the
paper's own numbers and what it claims of them. What a row or a column sets is a mapping of what would stand on the
command line of `fit`; a `metric` among it is another figure for that row or column, a row's before a column's.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from fl_lightning.analysis.baselines import expand_baseline, to_word
from fl_lightning.analysis.executor import Job
from fl_lightning.core.config import (
    flatten,
    load_yaml,
    named_file,
    nearest_file,
    read_config,
    read_yaml,
    with_config_paths,
)
from fl_lightning.core.errors import ConfigError

Unit = Literal["percent", "rounds"]
Settings = Mapping[str, Any]
"""What would stand on a command line, by key."""

REQUIRED = {"paper", "title", "metric", "unit", "seeds", "columns", "rows", "paper_values"}
OPTIONAL = {"claims"}

SCALED = ("rounds", "trainer.max_epochs")
READINGS = ("_best", "_last", "_last10")
RULE = "rounds, local epochs (trainer.max_epochs) and training samples times {:g}, rounded up; nothing else"
"""How a table is shrunk. A method's own numbers of rounds and epochs stay as they are."""

TOLD_ELSEWHERE = {"config": "columns", "algorithm": "rows", "seed": "--seeds", "run_dir": "--out"}


class PaperValue(NamedTuple):
    """A number that a paper prints, in the table's unit.

    Args:
        mean: The number.
        std: Its standard deviation, where the paper prints one.
    """

    mean: float
    std: float | None = None


class Claim(NamedTuple):
    """What a paper says of two of its rows.

    Args:
        better: The row that does better: has more percent, or needs fewer rounds.
        than: The other row.
        columns: In which columns.
    """

    better: str
    than: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, or the part of one that is wanted.

    Args:
        name: The file's name, less its ending.
        title: What it is called.
        metric: The figure of `final/summary.json` that is read, unless a row or a column has its own.
        unit: `percent`, where our figures are shares, or `rounds`, of which fewer are better.
        seeds: A run each.
        columns: By name, what a column sets; a `config` at least.
        rows: By name, what a row sets.
        paper_values: The paper's numbers by column and row, where there is one.
        claims: What the paper says of them.
    """

    name: str
    title: str
    metric: str
    unit: Unit
    seeds: tuple[int, ...]
    columns: Mapping[str, Settings]
    rows: Mapping[str, Settings]
    paper_values: Mapping[tuple[str, str], PaperValue]
    claims: tuple[Claim, ...]

    def part(self, rows: Sequence[str] = (), columns: Sequence[str] = (), seeds: Sequence[int] = ()) -> PaperTable:
        """Those rows, columns and seeds alone, in the table's order; all of them where none are named.

        Args:
            rows: Names, or fragments that one name alone has.
            columns: The same.
            seeds: Any; the table's own are no limit.

        Raises:
            ConfigError: A name is unknown, or may mean several; or a seed is below 0.
        """
        if low := [seed for seed in seeds if seed < 0]:
            raise ConfigError(f"--seeds: {low[0]} is below 0")
        wanted_rows, wanted_columns = _named(rows, self.rows, "row"), _named(columns, self.columns, "column")
        left = (c._replace(columns=tuple(one for one in c.columns if one in wanted_columns)) for c in self.claims)
        return replace(
            self,
            rows={name: self.rows[name] for name in wanted_rows},
            columns={name: self.columns[name] for name in wanted_columns},
            seeds=tuple(dict.fromkeys(seeds)) or self.seeds,
            claims=tuple(c for c in left if c.columns and {c.better, c.than} <= set(wanted_rows)),
        )

    def figure(self, column: str, row: str) -> str:
        """The figure of `final/summary.json` that stands in a cell."""
        return self.rows[row].get("metric") or self.columns[column].get("metric") or self.metric

    def series(self, column: str, row: str) -> str:
        """Return the metric in `metrics.csv` that a cell's figure is of: the figure without its reading."""
        return re.sub(f"({'|'.join(READINGS)})$", "", self.figure(column, row))

    def words(self, column: str, row: str) -> list[str]:
        """The command line of `fit` behind a cell, less the seed: what the column says, then what the row says."""
        method = dict(self.rows[row])
        first = {"algorithm": method.pop("algorithm")} if "algorithm" in method else {}
        pairs = [*self.columns[column].items(), *first.items(), *method.items()]
        return [word for key, value in pairs if key != "metric" for word in (f"--{key}", to_word(value))]


# --- A file ----------------------------------------------------------------------------------------------------------


def read_table(name: str) -> PaperTable:
    """A table, by the path of its file or by the name of a shipped one.

    Raises:
        ConfigError: There is none, or it does not hold what a table needs; the message says what.
    """
    path = named_file(name, "papers")
    if path is None:
        near = nearest_file(name, "papers")
        mend = f"did you mean {near}?" if near else "`fl-lightning list papers` names those"
        raise ConfigError(f"there is neither a file {name} nor a shipped table of that name; {mend}")
    content = read_yaml(path, path.name)
    try:
        return _table(path.stem, content)
    except _Flaw as flaw:
        raise ConfigError(f"{path.name}: {flaw}") from flaw


class _Flaw(Exception):
    """What is wrong with a table's file."""


def _require(met: bool, message: str) -> None:
    if not met:
        raise _Flaw(message)


def _table(name: str, content: Any) -> PaperTable:
    _require(isinstance(content, dict), "it needs lines `key: value`")
    keys = set(content)
    _require(keys >= REQUIRED, f"it lacks {', '.join(sorted(REQUIRED - keys))}")
    _require(keys <= REQUIRED | OPTIONAL, f"a table has no key {', '.join(map(str, keys - REQUIRED - OPTIONAL))}")
    units, seeds = get_args(Unit), content["seeds"]
    _require(content["unit"] in units, f"unit: {content['unit']!r} is not {' or '.join(units)}")
    whole = isinstance(seeds, list) and seeds and all(type(seed) is int and seed >= 0 for seed in seeds)
    _require(bool(whole), f"seeds: {seeds} is no list of whole numbers")
    columns, rows = (_lines(content, key) for key in ("columns", "rows"))
    for column, settings in columns.items():
        _require("config" in settings, f"columns: {column} names no config")
    if content["unit"] == "percent":
        for figure in [content, *columns.values(), *rows.values()]:
            metric = str(figure.get("metric", READINGS[0]))
            _require(metric.endswith(READINGS), f"metric: {metric} has no reading. Append one of {', '.join(READINGS)}")
    return PaperTable(
        name,
        title=str(content["title"]),
        metric=str(content["metric"]),
        unit=content["unit"],
        seeds=tuple(seeds),
        # A config comes first: what it says is overridden by what follows it.
        columns={name: {"config": settings["config"], **settings} for name, settings in columns.items()},
        rows=rows,
        paper_values=_paper_values(content["paper_values"], columns, rows),
        claims=tuple(_claim(claim, columns, rows) for claim in content.get("claims") or ()),
    )


def _lines(content: dict[str, Any], key: str) -> dict[str, Settings]:
    lines = content[key]
    _require(isinstance(lines, dict) and bool(lines), f"{key}: it needs lines `NAME: {{key: value, ...}}`")
    for name, settings in lines.items():
        _require(isinstance(settings, dict), f"{key}: {name} is no mapping {{key: value, ...}}")
    return {str(name): settings for name, settings in lines.items()}


def _paper_values(
    lines: Any, columns: Mapping[str, Settings], rows: Mapping[str, Settings]
) -> dict[tuple[str, str], PaperValue]:
    _require(isinstance(lines, dict), "paper_values: it needs lines `ROW: [number, ...]`")
    lines = {str(row): values for row, values in lines.items()}
    for row in lines.keys() ^ rows.keys():
        raise _Flaw(f"paper_values: {row} " + ("has no line" if row in rows else "is no row"))
    found = {}
    for row, values in lines.items():
        fits = isinstance(values, list) and len(values) == len(columns)
        _require(fits, f"paper_values: {row} needs {len(columns)} numbers, one a column; null where there is none")
        for column, value in zip(columns, values, strict=True):
            numbers = value if isinstance(value, list) else [value]
            if value is not None:
                proper = len(numbers) in (1, 2) and all(type(number) in (int, float) for number in numbers)
                _require(proper, f"paper_values: {row}: {value!r} is neither a number nor [mean, deviation]")
                found[column, row] = PaperValue(*numbers)
    return found


def _claim(claim: Any, columns: Mapping[str, Settings], rows: Mapping[str, Settings]) -> Claim:
    form = "{better: ROW, than: ROW, columns: [COLUMN, ...]}"
    proper = isinstance(claim, dict) and {"better", "than"} <= claim.keys() <= {"better", "than", "columns"}
    _require(proper, f"claims: {claim} is not of the form {form}, of which columns may be left out")
    better, than, where = str(claim["better"]), str(claim["than"]), tuple(map(str, claim.get("columns", columns)))
    for name, there, what in [(better, rows, "row"), (than, rows, "row"), *((one, columns, "column") for one in where)]:
        _require(name in there, f"claims: {name} is no {what}")
    return Claim(better, than, where)


def _named(asked: Sequence[str], there: Mapping[str, Any], what: str) -> list[str]:
    """The names that are meant, in their own order; all of them where none is."""
    meant = {_one_named(name, there, what) for name in asked}
    return [name for name in there if name in meant or not asked]


def _one_named(asked: str, there: Mapping[str, Any], what: str) -> str:
    if asked in there:
        return asked
    found = [name for name in there if asked.lower() in name.lower()]
    if len(found) > 1:
        raise ConfigError(f"--{what}s: {asked!r} is in {' | '.join(found)}; give one's whole name, or more of it")
    if not found:
        raise ConfigError(f"--{what}s: there is no {what} {asked!r}; there are {' | '.join(there)}")
    return found[0]


# --- Its runs --------------------------------------------------------------------------------------------------------


def table_jobs(
    table: PaperTable, out: Path, scale: float = 1.0, overrides: Sequence[str] = ()
) -> dict[tuple[str, str, int], Job]:
    """The run behind each of a table's numbers, by column, row and seed.

    Its folder is called after what it runs and after a digest of all its settings, so that another scale or another
    override makes it another run. Columns that differ in their figure alone have their runs in common.

    Args:
        table: The table, or the part of it that is wanted.
        out: The folder of all the runs.
        scale: How much smaller each experiment is made, see `RULE`.
        overrides: Words KEY=VALUE that have the last say in every experiment, about what is scaled too.

    Raises:
        ConfigError: A word is not of that form or sets what rows and columns do, the scale is out of range, or a
            config cannot be read.
    """
    last = [word for pair in overrides for word in _option(pair)]
    found = {}
    for column, row in product(table.columns, table.rows):
        words = table.words(column, row)
        settings = settings_of(words)
        extra = [*scaling(settings, scale), *last]
        settings |= settings_of(extra)
        place = out / _scenario(table.columns[column]) / _plain(row)
        told = json.dumps(settings, sort_keys=True, default=str)
        digest = hashlib.sha256(told.encode()).hexdigest()[:10]
        for seed in table.seeds:
            found[column, row, seed] = Job(place / f"seed_{seed}-{digest}", (*words, "--seed", str(seed), *extra))
    return found


def scaling(settings: Settings, scale: float) -> list[str]:
    """The words that make an experiment smaller, as `RULE` says; none for a scale of 1.

    Args:
        settings: What its command line says, by dotted key.
        scale: A share, in (0, 1].

    Raises:
        ConfigError: The scale is out of range, or the experiment does not say how many rounds it has.
    """
    if not 0 < scale <= 1:
        raise ConfigError(f"--scale: {scale:g} is not above 0 and at most 1")
    if scale == 1:
        return []
    if "rounds" not in settings:
        raise ConfigError("--scale: a config of this table does not say how many rounds it has")
    numbers = {key: settings[key] for key in SCALED if settings.get(key, 0) > 0}  # -1 epochs: steps alone decide
    smaller: dict[str, Any] = {key: _shrunk(number, scale) for key, number in numbers.items()}
    samples = settings.get("scenario.train_samples")
    smaller["scenario.train_samples"] = _shrunk(samples, scale) if isinstance(samples, int) else (samples or 1) * scale
    return [word for key, value in smaller.items() for word in (f"--{key}", to_word(value))]


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """What a command line of `fit` says, its configs and baselines read, by dotted key.

    Args:
        words: Options and their values in turns; later ones win.

    Raises:
        ConfigError: A config or its baselines cannot be read.
    """
    spelled = expand_baseline(with_config_paths(words))
    found: dict[str, Any] = {}
    for option, value in zip(spelled[::2], spelled[1::2], strict=True):
        key = option.removeprefix("--")
        if key == "config":
            content = read_config(Path(value))
            found |= flatten({name: part for name, part in content.items() if name != "baselines"})
        else:
            found |= flatten(_value(value), key)
    return found


def _shrunk(number: int, scale: float) -> int:
    return max(math.ceil(round(number * scale, 9)), 1)  # 0.07 of 100 is a little above 7 in floating point


def _option(pair: str) -> tuple[str, str]:
    key, sign, value = pair.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set: {pair!r} is not of the form KEY=VALUE")
    if key in TOLD_ELSEWHERE:
        raise ConfigError(f"--set: {key} is not for it to say, but for {TOLD_ELSEWHERE[key]}")
    return f"--{key}", value


def _value(word: str) -> Any:
    try:
        return load_yaml(word)
    except (ValueError, yaml.YAMLError):
        return word


def _scenario(column: Settings) -> str:
    """A column's folder: its config, and what it sets beside."""
    keys = {key: value for key, value in column.items() if key not in ("config", "metric")}
    return _plain("-".join([Path(column["config"]).stem, *(f"{key}-{to_word(value)}" for key, value in keys.items())]))


def _plain(name: str) -> str:
    """A name as a folder may have it."""
    return re.sub(r"[^\w.+]+", "-", name).strip("-.")[:80]
