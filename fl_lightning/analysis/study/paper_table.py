"""Read a results table of a paper from its YAML file, and list the runs that reproduce its numbers.

A file of `papers/` holds rows (methods), columns (scenarios), seeds, the metric (an entry of `final/summary.json`),
the paper's numbers, and its claims. A row or a column is a mapping from options of `fit` to values. With the key
`metric` it has a metric of its own; a row's takes precedence over a column's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import yaml

from fl_lightning.analysis.baselines import expand_baseline, setting_words, to_word
from fl_lightning.analysis.study.checks import check_keys, check_seeds, errors_at, is_number, require
from fl_lightning.analysis.study.executor import Job
from fl_lightning.analysis.study.folder import folder_name, run_folder
from fl_lightning.core.config import flatten, read_config, split_setting
from fl_lightning.core.config_files import named_file, nearest_file, read_configs
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.strict_yaml import load_yaml, read_yaml

Unit = Literal["percent", "rounds"]
Settings = Mapping[str, Any]
"""Options of a command line, by key."""

REQUIRED = ("paper", "title", "metric", "unit", "seeds", "columns", "rows", "paper_values")
OPTIONAL = ("beside", "claims")

READINGS = ("_best", "_last", "_last10")

SET_ELSEWHERE = {"config": "columns", "algorithm": "rows", "seed": "--seeds", "run_dir": "--out"}


class Scale(NamedTuple):
    """How much smaller the experiments of a table are made. Options of a method that count rounds do not change.

    Local epochs stay as they are by default, because fewer local epochs remove the client drift that many methods
    counteract.

    Args:
        factor: The factor for rounds and training samples, in (0, 1].
        epochs: Whether local epochs (`trainer.max_epochs`) are multiplied by the factor, too.
    """

    factor: float = 1.0
    epochs: bool = False

    @property
    def rule(self) -> str:
        """Return a description of the effect, for the text above a table."""
        scaled = "rounds, local epochs (trainer.max_epochs)" if self.epochs else "rounds"
        return f"only {scaled} and training samples are multiplied by {self.factor:g} and rounded up"


class PaperValue(NamedTuple):
    """A number that is printed in a table of a paper, in the table's unit (percent or rounds).

    Args:
        mean: The number.
        std: The standard deviation, if the paper prints one.
    """

    mean: float
    std: float | None = None


class Claim(NamedTuple):
    """A paper's claim that one row (method) of its table is better than another row.

    Args:
        better: The better row: a higher percentage, or fewer rounds.
        than: The other row.
        columns: The columns for which the claim is made.
    """

    better: str
    than: str
    columns: tuple[str, ...]


@dataclass(frozen=True)
class PaperTable:
    """A table of a paper, or a part of it: the published numbers, and the experiments that reproduce them.

    Args:
        name: The name of the file, without its suffix.
        title: The table's title.
        metric: The entry of `final/summary.json` to read, unless a row or a column has its own.
        unit: `percent` (fractions of our runs are multiplied by 100), or `rounds` (fewer are better).
        seeds: The seeds; each cell has one run per seed.
        columns: The options of each column, by name; at least a `config`.
        rows: The options of each row, by name.
        paper_values: The paper's numbers by column and row.
        claims: The paper's claims about its rows.
        beside: Further entries of `final/summary.json` to show in each cell, by description. In percent.
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
    beside: Mapping[str, str] = field(default_factory=dict)

    def part(self, rows: Sequence[str] = (), columns: Sequence[str] = (), seeds: Sequence[int] = ()) -> PaperTable:
        """Return the table with only the given rows, columns and seeds, in the table's order; by default all of them.

        Args:
            rows: Names of rows, or parts of a name that no other row has.
            columns: Names of columns, or parts of a name that no other column has.
            seeds: Any seeds, also others than the table's.

        Raises:
            ConfigError: A name is unknown or ambiguous, or a seed is negative or repeated.
        """
        if negative := [seed for seed in seeds if seed < 0]:
            raise ConfigError(f"--seeds: {negative[0]} is below 0")
        if len({*seeds}) < len(seeds):
            raise ConfigError(f"--seeds: {' '.join(map(str, seeds))} has a seed twice. Leave one out")
        row_names, column_names = _select(rows, self.rows, "row"), _select(columns, self.columns, "column")
        claims = (c._replace(columns=tuple(name for name in c.columns if name in column_names)) for c in self.claims)
        return replace(
            self,
            rows={name: self.rows[name] for name in row_names},
            columns={name: self.columns[name] for name in column_names},
            seeds=tuple(seeds) or self.seeds,
            claims=tuple(c for c in claims if c.columns and {c.better, c.than} <= set(row_names)),
        )

    def figure(self, column: str, row: str) -> str:
        """Return the name of a cell's metric in `final/summary.json`, such as `global/acc_last`."""
        return self.rows[row].get("metric") or self.columns[column].get("metric") or self.metric

    def series(self, column: str, row: str) -> str:
        """Return the column name of a cell's metric in `metrics.csv`, such as `global/acc`.

        It is the name in `final/summary.json` without `_best`, `_last` or `_last10`.
        """
        return re.sub(f"({'|'.join(READINGS)})$", "", self.figure(column, row))

    def words(self, column: str, row: str) -> list[str]:
        """Return the `fit` command line of a cell's runs, without the seed: options of the column, then of the row."""
        algorithm_first = sorted(self.rows[row].items(), key=lambda option: option[0] != "algorithm")
        parts = (self.columns[column], dict(algorithm_first))
        return [word for part in parts for word in setting_words(part) if not word.startswith("--metric=")]


# --- The file --------------------------------------------------------------------------------------------------------


def read_table(name: str) -> PaperTable:
    """Return a paper's table, given the path of a table file or the name of a table that is shipped with the package.

    Raises:
        ConfigError: The file does not exist, or is not a valid table; the message says why.
    """
    path = named_file(name, "papers")
    if path is None:
        near = nearest_file(name, "papers")
        fix = f"Did you mean {near}?" if near else "See `fl-lightning list papers`."
        raise ConfigError(f"{name}: neither a file nor a shipped table. {fix}")
    content = read_yaml(path, path.name)
    with errors_at(path.name):
        return _table(path.stem, content)


def _table(name: str, content: Any) -> PaperTable:
    check_keys("", content, (*REQUIRED, *OPTIONAL), REQUIRED)
    unit, seeds = content["unit"], check_seeds("seeds", content["seeds"])
    require(unit in get_args(Unit), f"unit: {unit!r} is not {' or '.join(get_args(Unit))}")
    columns, rows = (_read_mapping(content, key) for key in ("columns", "rows"))
    for column, settings in columns.items():
        require("config" in settings, f"columns: {column} has no config")
    if unit == "percent":
        for figure in [content, *columns.values(), *rows.values()]:
            metric = str(figure.get("metric", READINGS[0]))
            require(metric.endswith(READINGS), f"metric: {metric} has no suffix. Append one of {', '.join(READINGS)}")
    beside = content.get("beside") or {}
    require(isinstance(beside, dict), "beside: it needs lines `DESCRIPTION: METRIC`")
    require(not beside or unit == "percent", "beside: it needs a table in percent")
    return PaperTable(
        name,
        title=str(content["title"]),
        metric=str(content["metric"]),
        unit=unit,
        seeds=seeds,
        # The config comes first, so that the other options override it.
        columns={name: {"config": settings["config"], **settings} for name, settings in columns.items()},
        rows=rows,
        paper_values=_paper_values(content["paper_values"], columns, rows),
        claims=tuple(_claim(claim, columns, rows) for claim in content.get("claims") or ()),
        beside={str(name): str(metric) for name, metric in beside.items()},
    )


def _read_mapping(content: dict[str, Any], key: str) -> dict[str, Settings]:
    lines = content[key]
    require(isinstance(lines, dict) and lines, f"{key}: it needs lines `NAME: {{key: value, ...}}`")
    for name, settings in lines.items():
        require(isinstance(settings, dict), f"{key}: {name} is not a mapping {{key: value, ...}}")
    return {str(name): settings for name, settings in lines.items()}


def _paper_values(
    lines: Any, columns: Mapping[str, Settings], rows: Mapping[str, Settings]
) -> dict[tuple[str, str], PaperValue]:
    """Check the lines `ROW: [number, ...]` of a table file, and return their numbers by column and row.

    A number may be a list `[mean, deviation]`. If it is null, it is left out.
    """
    require(isinstance(lines, dict), "paper_values: it needs lines `ROW: [number, ...]`")
    lines, found = {str(row): values for row, values in lines.items()}, {}
    check_keys("paper_values", lines, rows, rows)
    for row, values in lines.items():
        form = f"{len(columns)} numbers, one per column. Use null where the paper has none"
        has_form = isinstance(values, list) and len(values) == len(columns)
        require(has_form, f"paper_values: {row} needs {form}")
        for column, value in zip(columns, values, strict=True):
            numbers = value if isinstance(value, list) else [value]
            is_value = value is None or (len(numbers) in (1, 2) and all(map(is_number, numbers)))
            require(is_value, f"paper_values: {row}: {value!r} is neither a number nor [mean, deviation]")
            if value is not None:
                found[column, row] = PaperValue(*numbers)
    return found


def _claim(claim: Any, columns: Mapping[str, Settings], rows: Mapping[str, Settings]) -> Claim:
    check_keys("claims", claim, ("better", "than", "columns"), ("better", "than"))
    better, than, of_columns = str(claim["better"]), str(claim["than"]), tuple(map(str, claim.get("columns", columns)))
    for row in (better, than):
        require(row in rows, f"claims: {row} is not a row")
    for column in of_columns:
        require(column in columns, f"claims: {column} is not a column")
    return Claim(better, than, of_columns)


def _select(names: Sequence[str], all_names: Mapping[str, Any], kind: str) -> list[str]:
    """Return the full names of the selected rows or columns in the table's order; all names by default."""
    selected = {_full_name(name, all_names, kind) for name in names}
    return [name for name in all_names if name in selected or not names]


def _full_name(name: str, all_names: Mapping[str, Any], kind: str) -> str:
    """Return the row or column name that equals the text `name`, or else the only name that contains this text."""
    matches = [name] if name in all_names else [each for each in all_names if name.lower() in each.lower()]
    require(len(matches) < 2, f"--{kind}s: {name!r} is in {' | '.join(matches)}. Give the whole name")
    require(matches, f"--{kind}s: {kind} {name!r} not found. Available: {' | '.join(all_names)}.")
    return matches[0]


# --- The runs -------------------------------------------------------------------------------------------------------


def table_jobs(
    table: PaperTable, out: Path, scale: Scale = Scale(), overrides: Sequence[str] = ()
) -> dict[tuple[str, str, int], Job]:
    """Return the jobs that reproduce a paper's table: one run for each column, row and seed.

    The name of a run's folder ends in a digest of all settings, so another scale or override is another run. Columns
    that differ only in the metric share their runs.

    Args:
        table: The table, or a part of it.
        out: The folder of all runs.
        scale: How much smaller each experiment is made.
        overrides: Words KEY=VALUE that override settings of every experiment, also scaled ones.

    Raises:
        ConfigError: An override is not of that form or sets what rows and columns set, the scale is out of range, or a
            config cannot be read.
    """
    override_words = [_override_word(pair) for pair in overrides]
    jobs = {}
    for column, row in product(table.columns, table.rows):
        words = table.words(column, row)
        settings = settings_of(words)
        extra = [*scaled_options(settings, scale), *override_words]
        settings |= settings_of(extra)
        parent = Path(_column_folder(table.columns[column]), folder_name(row))
        for seed in table.seeds:
            words_of_run = (*words, f"--seed={seed}", *extra)
            jobs[column, row, seed] = Job(run_folder(out, parent, seed, settings), words_of_run)
    return jobs


def scaled_options(settings: Settings, scale: Scale) -> list[str]:
    """Return the `fit` options that make an experiment smaller: fewer rounds and training samples.

    Args:
        settings: The experiment's settings, by dotted key.
        scale: How much smaller, and whether local epochs are multiplied by the factor, too. A factor of 1 adds no
            options.

    Raises:
        ConfigError: The scale is out of range, or the settings lack the number of rounds.
    """
    factor = scale.factor
    require(0 < factor <= 1, f"--scale: {factor:g} is not above 0 and at most 1")
    if factor == 1:
        return []
    require("rounds" in settings, "--scale: an experiment of this table does not set rounds. Add rounds to its config")
    keys = ("rounds", "trainer.max_epochs") if scale.epochs else ("rounds",)
    numbers = {key: settings[key] for key in keys if (settings.get(key) or 0) > 0}  # epochs None or -1: no limit
    smaller: dict[str, Any] = {key: _scale_number(number, factor) for key, number in numbers.items()}
    samples = settings.get("scenario.train_samples")
    if isinstance(samples, int):
        smaller["scenario.train_samples"] = _scale_number(samples, factor)
    else:  # a share of all samples; without one, all samples
        smaller["scenario.train_samples"] = (samples or 1) * factor
    return setting_words(smaller)


def settings_of(words: Sequence[str]) -> dict[str, Any]:
    """Return all settings that a `fit` command line gives, by dotted key: its options, and those of its config files.

    They include the options of the baseline that `--algorithm` names.

    Args:
        words: Options `--KEY=VALUE`; later ones override earlier ones.

    Raises:
        ConfigError: A config or its baselines cannot be read.
    """
    settings: dict[str, Any] = {}
    for word in expand_baseline(read_configs(words)).words:
        key, _, value = word.removeprefix("--").partition("=")
        if key == "config":
            content = read_config(Path(value))
            settings |= flatten({name: part for name, part in content.items() if name != "baselines"})
        else:
            settings |= flatten(_value(value), key)
    return settings


def _scale_number(number: int, scale: float) -> int:
    return max(math.ceil(round(number * scale, 9)), 1)  # 0.07 * 100 > 7 in floating point


def _override_word(pair: str) -> str:
    key, _ = split_setting("--set", pair)
    if key in SET_ELSEWHERE:
        raise ConfigError(f"--set: {key} is set by {SET_ELSEWHERE[key]}. Leave it out")
    return f"--{pair}"


def _value(word: str) -> Any:
    """Return an option's value parsed as YAML, or the text itself if it is not YAML."""
    try:
        return load_yaml(word)
    except (ValueError, yaml.YAMLError):
        return word


def _column_folder(column: Settings) -> str:
    """Return the folder name for all runs of a table's column: the name of its config, then its other options."""
    options = (f"{key}-{to_word(value)}" for key, value in column.items() if key not in ("config", "metric"))
    return folder_name("-".join([Path(column["config"]).stem, *options]))
