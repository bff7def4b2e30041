"""Read benchmark files: which methods compete in which scenarios, and how they are tuned and tested."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from fl_lightning.analysis.baselines import setting_words
from fl_lightning.analysis.study.checks import check_keys, check_seeds, errors_at, is_count, is_number, require
from fl_lightning.analysis.study.folder import folder_name
from fl_lightning.core.config import read_config, split_setting
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.spelling import nearest, suggest
from fl_lightning.evaluation.summary import better_goal

Settings = Mapping[str, Any]
"""Options of `fit`, by key."""

Part = TypeVar("Part")

KEYS = ("config", "settings", "scenarios", "tables", "methods", "search", "tuning", "seeds", "reference", "untuned")
TABLE_KEYS = ("metric", "goal", "methods", "settings")
METHOD_KEYS = ("settings", "search")
TUNING_KEYS = ("trials", "processor_seconds", "seeds", "settings", "early_terminate")
SET_ELSEWHERE = {"config": "config", "algorithm": "methods", "seed": "seeds", "run_dir": "--out", "resume": "--out"}
"""Options of `fit` that `settings` cannot have, with the part of the benchmark that sets them."""

TUNING_SETTINGS = {"scenario.validation_share": 0.2, "logger": False}
"""Settings of all trials, unless the file has others: trials never see a test sample."""


@dataclass(frozen=True)
class MethodOptions:
    """The `fit` options and the search ranges that a benchmark file gives for one method.

    Args:
        settings: Options of `fit`. The class is that of the method's name, unless they have `algorithm`.
        search: Ranges in the syntax of a sweep file, in addition to the common ones and those of the class. None
            instead of a range removes it.
    """

    settings: Settings = field(default_factory=dict)
    search: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class BenchmarkTable:
    """A table of a benchmark: methods that are tuned and compared by one metric.

    Args:
        name: The name of the table.
        metric: A column of `metrics.csv`. The value of a run is that of its last evaluated round.
        maximize: Whether larger values are better.
        methods: The names of the methods.
        settings: Options of all runs of the table.
    """

    name: str
    metric: str
    maximize: bool
    methods: tuple[str, ...]
    settings: Settings = field(default_factory=dict)


@dataclass(frozen=True)
class Tuning:
    """The tuning of a benchmark, equal for all methods: trials, seeds, settings, early stopping and processor time.

    Args:
        trials: Number of trials of each method in each scenario of each table.
        seeds: Each trial is run with each of these seeds, and its value is the mean.
        settings: Options of all trials.
        early_terminate: Which trials end early, in the syntax of a sweep file; None if all run to their end.
        processor_seconds: No trial begins once the others have used this much processor time.
    """

    trials: int
    seeds: tuple[int, ...]
    settings: Settings = field(default_factory=dict)
    early_terminate: Settings | None = None
    processor_seconds: float = math.inf


@dataclass(frozen=True)
class Benchmark:
    """The contents of a benchmark file: which methods to compare, in which scenarios, and how to tune them.

    Args:
        name: The name of the file, without its suffix.
        configs: Config files that all runs share; later ones override earlier ones.
        settings: Options of all runs; they override the configs.
        scenarios: The options of each scenario, by name.
        tables: The tables.
        methods: The options of methods that differ from the class of their name, by name.
        search: Ranges that all methods are tuned over, by key, in the syntax of a sweep file.
        tuning: How each method is tuned.
        seeds: The seeds of the tuned methods, different from those of the tuning.
        reference: The method that the others are compared with.
        untuned: Whether to run each method also with the values of the configs, to show what tuning changed.
        overrides: Options of all runs that override all others.
    """

    name: str
    configs: tuple[str, ...]
    settings: Settings
    scenarios: Mapping[str, Settings]
    tables: tuple[BenchmarkTable, ...]
    methods: Mapping[str, MethodOptions]
    search: Settings
    tuning: Tuning
    seeds: tuple[int, ...]
    reference: str = "FedAvg"
    untuned: bool = True
    overrides: Settings = field(default_factory=dict)

    def entries(self) -> Iterator[Entry]:
        """Yield an entry for each combination of table, scenario and method."""
        for table in self.tables:
            for scenario in self.scenarios:
                for method in table.methods:
                    yield Entry(self, table, scenario, method)


@dataclass(frozen=True)
class Entry:
    """A combination of table, scenario and method in a benchmark. Each combination is tuned separately.

    Args:
        benchmark: The benchmark.
        table: The table.
        scenario: The name of the scenario.
        method: The name of the method.
    """

    benchmark: Benchmark
    table: BenchmarkTable
    scenario: str
    method: str

    @property
    def name(self) -> str:
        """The entry as text, such as `global, Dirichlet 0.1, FedAvg`."""
        return ", ".join(filter(None, (self.table.name, self.scenario, self.method)))

    @property
    def folder(self) -> Path:
        """The relative path of the entry's folder, such as `global/Dirichlet-0.1/FedAvg`."""
        return Path(*map(folder_name, filter(None, (self.table.name, self.scenario, self.method))))

    @property
    def options(self) -> MethodOptions:
        """The options of the federated method in this entry."""
        return self.benchmark.methods.get(self.method, MethodOptions())

    def words(self) -> tuple[str, ...]:
        """Return the command line of `fit` that all runs of the entry share, without tuned values and seed."""
        own = dict(self.options.settings)
        first = {"algorithm": own.pop("algorithm", self.method)}
        scenario = self.benchmark.scenarios[self.scenario]
        configs = (f"--config={name}" for name in self.benchmark.configs)
        parts = (first, self.benchmark.settings, scenario, self.table.settings, own, self.benchmark.overrides)
        return (*configs, *(word for part in parts for word in setting_words(part)))

    def tuning_words(self) -> tuple[str, ...]:
        """Return the `fit` command line of the entry's trials, without the seed and without the values to tune."""
        return (*self.words(), *setting_words(TUNING_SETTINGS | dict(self.benchmark.tuning.settings)))

    def ranges(self, search_space: Settings) -> dict[str, Any]:
        """Return the range of each key to tune, given the `search_space` of the method's class."""
        own = {f"algorithm.{key}": value for key, value in search_space.items()}
        found = own | dict(self.benchmark.search) | dict(self.options.search)
        return {key: value for key, value in found.items() if value is not None}


# --- The file --------------------------------------------------------------------------------------------------------


def benchmark_path(name: str) -> Path:
    """Return the path of a benchmark file, given this path or the name of a benchmark that is included in the package.

    Raises:
        ConfigError: The file does not exist.
    """
    folder = Path(str(files("fl_lightning.configs"))) / "benchmarks"
    included = {path.stem: path for path in sorted(folder.glob("*.yaml"))}
    if Path(name).is_file():
        return Path(name)
    if name.removesuffix(".yaml") in included:
        return included[name.removesuffix(".yaml")]
    fix = suggest(nearest(name, included), included)
    raise ConfigError(f"benchmark: {name} is neither a file here nor an included benchmark. {fix}")


def read_benchmark(path: Path) -> Benchmark:
    """Read a YAML file that says which methods a benchmark compares, in which scenarios, and how it tunes them.

    Raises:
        ConfigError: The file does not exist or is invalid; the message names the key.
    """
    content = read_config(path)
    with errors_at(path):
        return _benchmark(path.stem, content)


def _benchmark(name: str, content: Any) -> Benchmark:
    check_keys("", content, KEYS, needed=("config", "tables", "tuning", "seeds"))
    config = content["config"]
    configs = tuple(config if isinstance(config, list) else [config])
    valid = configs and all(isinstance(one, str) and one for one in configs)
    require(valid, f"config: {config!r} is not the name of a config, or a list of names")
    scenarios = _named("scenarios", content.get("scenarios", {"": {}}), "{key: value, ...}", _settings)
    tables = _named("tables", content["tables"], "{metric: global/acc, methods: [FedAvg, ...]}", _table)
    listed = sorted({method for table in tables.values() for method in table.methods})
    methods = content.get("methods", {})
    check_keys("methods", methods, listed)
    untuned, reference = content.get("untuned", True), content.get("reference", "FedAvg")
    require(isinstance(untuned, bool), f"untuned: {untuned!r} is neither true nor false")
    if "reference" in content:
        require(reference in listed, f"reference: {reference} is in no table. {suggest(None, listed)}")
    tuning, seeds = _tuning(content["tuning"]), check_seeds("seeds", content["seeds"])
    for seed in sorted({*seeds} & {*tuning.seeds}):
        raise ConfigError(f"seeds: {seed} is a seed of the tuning, too. Test with other seeds")
    return Benchmark(
        name,
        configs,
        _settings("settings", content.get("settings", {})),
        scenarios,
        tuple(tables.values()),
        {str(key): _method(f"methods: {key}", value) for key, value in methods.items()},
        _search("search", content.get("search", {})),
        tuning,
        seeds,
        reference,
        untuned,
    )


def _named(where: str, content: Any, form: str, parse: Callable[[str, Any], Part]) -> dict[str, Part]:
    """Parse the parts of a file that have a name. Their names must have different folders."""
    require(isinstance(content, Mapping) and content, f"{where}: it needs lines `NAME: {form}`")
    _check_folders([*map(str, content)], where)
    return {str(name): parse(f"{where}: {name}", part) for name, part in content.items()}


def parse_overrides(words: Sequence[str]) -> Settings:
    """Parse the `KEY=VALUE` arguments of `--set` into a mapping from keys to values.

    Raises:
        ConfigError: A word has another form, or the key cannot be set.
    """
    return _settings("--set", dict(split_setting("--set", word) for word in words))


def _settings(where: str, content: Any) -> Settings:
    require(isinstance(content, Mapping), f"{where}: it needs {{key: value, ...}} with options of fit ({content!r})")
    for key in content:
        if key in SET_ELSEWHERE and not (key == "algorithm" and where.startswith("methods")):
            raise ConfigError(f"{where}: {key} is set by {SET_ELSEWHERE[key]}. Leave it out")
    return content


def _search(where: str, content: Any) -> Settings:
    """Return search ranges. Each is checked later, with those of the method's class, when the sweep is built."""
    form = "it needs lines `KEY: {min: ..., max: ...}` as in a sweep file"
    require(isinstance(content, Mapping), f"{where}: {form} ({content!r})")
    return content


def _table(where: str, content: Any) -> BenchmarkTable:
    check_keys(where, content, TABLE_KEYS, needed=("metric", "methods"))
    metric, methods = content["metric"], content["methods"]
    require(isinstance(metric, str), f"{where}: metric: {metric!r} is not the name of a metric, such as global/acc")
    goal = better_goal(metric) if content.get("goal") is None else content["goal"]
    known = f"{where}: goal: which values of {metric} are better is not known. Set maximize or minimize"
    require(goal is not None, known)
    require(goal in ("maximize", "minimize"), f"{where}: goal: {goal!r} is unknown. Set maximize or minimize.")
    valid = isinstance(methods, list) and methods and all(isinstance(one, str) for one in methods)
    require(valid, f"{where}: methods: {methods!r} is not a list of names, such as [FedAvg, FedProx]")
    for i, one in enumerate(methods):
        require(one not in methods[:i], f"{where}: methods: {one} is given twice. Leave one out")
    _check_folders(methods, f"{where}: methods")
    settings, name = _settings(f"{where}: settings", content.get("settings", {})), where.removeprefix("tables: ")
    return BenchmarkTable(name, metric, goal == "maximize", tuple(methods), settings)


def _method(where: str, content: Any) -> MethodOptions:
    check_keys(where, content, METHOD_KEYS)
    settings = _settings(f"{where}: settings", content.get("settings", {}))
    return MethodOptions(settings, _search(f"{where}: search", content.get("search", {})))


def _tuning(content: Any) -> Tuning:
    check_keys("tuning", content, TUNING_KEYS, needed=("trials", "seeds"))
    trials, seconds = content["trials"], content.get("processor_seconds", math.inf)
    require(is_count(trials, 1), f"tuning: trials: {trials!r} is not a number of at least 1")
    require(is_number(seconds) and seconds > 0, f"tuning: processor_seconds: {seconds!r} is not a number above 0")
    seeds, settings = check_seeds("tuning: seeds", content["seeds"]), content.get("settings", {})
    return Tuning(trials, seeds, _settings("tuning: settings", settings), content.get("early_terminate"), seconds)


def _check_folders(names: Sequence[str], where: str) -> None:
    """Raise an error if two names would have the same folder."""
    folders: dict[str, str] = {}
    for name in names:
        other = folders.setdefault(folder_name(name), name)
        require(other == name, f"{where}: {other} and {name} would share the folder {folder_name(name)}. Rename one")
