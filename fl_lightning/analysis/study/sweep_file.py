"""Read W&B sweep files: the command line of the trials, and the distributions of the parameters to tune."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import SuccessiveHalvingPruner

from fl_lightning.analysis.baselines import option_values, to_word
from fl_lightning.analysis.study.checks import check_keys, check_seeds, errors_at, is_count, is_number, require
from fl_lightning.core.config import split_setting
from fl_lightning.core.config_files import named_file, nearest_file, shipped
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.spelling import suggest
from fl_lightning.evaluation.summary import better_goal

METHODS = ("grid", "random", "bayes")
UNRELATED_KEYS = {"name", "description", "project", "entity", "program"}
"""Keys that do not affect the trials. They may change during a sweep."""
KEYS = {*UNRELATED_KEYS, "command", "method", "metric", "parameters", "early_terminate", "run_cap", "seeds"}
"""Keys that a sweep file may have: those of W&B, and `seeds`, which only this package has."""
SET_BY_SWEEP = {"config", "resume", "run_dir"}
"""Options of `fit` that a sweep file cannot vary, because the sweep sets them itself."""
BOUNDS = ("min", "max")
DISTRIBUTIONS = {"constant": ("value",), "categorical": ("values",), "int_uniform": BOUNDS} | {
    f"{q}{name}": BOUNDS for name in ("uniform", "log_uniform", "log_uniform_values") for q in ("", "q_")
}
"""The supported distributions of W&B, with the keys that they need."""
EXPONENT = re.compile(r"[-+]?[0-9]+([.][0-9]*)?[eE][-+]?[0-9]+")
"""Matches numbers such as `1e-3`, which YAML takes for text."""
COMMAND = '[${program}, fit, --config, NAME.yaml, ..., "${args}"]'


@dataclass(frozen=True)
class Parameter:
    """A parameter of a sweep, with the distribution of its values.

    Args:
        distribution: The distribution that Optuna draws from; for listed values, categorical over them.
        words: For listed values, the text of each for the command line, as the file has it.
        q: If given, drawn values are rounded to multiples of it within the distribution's bounds.
    """

    distribution: BaseDistribution
    words: Mapping[Any, str] = field(default_factory=dict)
    q: float | None = None

    def rounded(self, drawn: Any) -> Any:
        """Return a value that Optuna drew, rounded to a multiple of `q`, the parameter's step size, if it has one."""
        if self.q is None:
            return drawn
        low, high = multiples(self.distribution, self.q)
        number = self.q * min(max(round(drawn / self.q), low), high)
        return number if isinstance(self.q, int) else float(f"{number:.12g}")  # without rounding errors

    def word(self, drawn: Any) -> str:
        """Convert a value that Optuna drew to text for the command line.

        If the parameter has a `q`, the value is rounded to a multiple of it.
        """
        return self.words[drawn] if self.words else to_word(self.rounded(drawn))

    @property
    def values(self) -> list[Any] | None:
        """All possible values of the parameter; None for a continuous distribution."""
        if isinstance(self.distribution, CategoricalDistribution):
            return list(self.distribution.choices)
        if isinstance(self.distribution, IntDistribution):
            return list(range(self.distribution.low, self.distribution.high + 1))
        return None


@dataclass(frozen=True)
class Sweep:
    """A sweep as its file describes it: search method, command line, parameters, metric and pruning.

    Args:
        name: The name of the file, without its suffix.
        method: `grid`, `random` or `bayes`.
        words: The command line of `fit` before the parameters, without `fit`.
        words_after: The command line after the parameters.
        parameters: The parameters that vary, by key.
        metric: The metric to optimise: a column of `metrics.csv` (its last value), or an entry of `final/summary.json`.
        maximize: Whether larger values are better.
        pruner: Decides which trials end early; None if all trials run to their end.
        rounds_to_prune: A trial that reached this round does not end early.
        run_cap: Maximum number of trials; None for no limit.
        content: The content of the file.
        seeds: Each trial is run with each of these seeds, and its value is the mean. If empty, a trial is one run.
        start: The values of the first trial; if empty, the search method chooses them.
    """

    name: str
    method: str
    words: tuple[str, ...]
    words_after: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    metric: str
    maximize: bool
    pruner: SuccessiveHalvingPruner | None
    rounds_to_prune: float
    run_cap: int | None
    content: Mapping[str, Any]
    seeds: tuple[int, ...] = ()
    start: Mapping[str, Any] = field(default_factory=dict)

    def command(self, drawn: Mapping[str, Any], seed: int | None = None) -> tuple[str, ...]:
        """Return the command-line arguments of `fit` for one run of a trial.

        Args:
            drawn: The values that Optuna drew for the trial's parameters.
            seed: The seed, if the sweep has seeds.
        """
        return self.command_with({key: parameter.word(drawn[key]) for key, parameter in self.parameters.items()}, seed)

    def command_with(self, settings: Mapping[str, str], seed: int | None = None) -> tuple[str, ...]:
        """Return the command-line arguments of `fit` for one run with given settings.

        Args:
            settings: The text of each parameter's value.
            seed: The seed, if the sweep has seeds.
        """
        values = [f"--{key}={word}" for key, word in settings.items()]
        return (*self.words, *values, *([] if seed is None else [f"--seed={seed}"]), *self.words_after)

    def grid(self) -> list[dict[str, Any]]:
        """Return the parameter values of all trials of a grid search; the last parameter varies fastest."""
        values = [parameter.values or [] for parameter in self.parameters.values()]
        return [dict(zip(self.parameters, chosen, strict=True)) for chosen in product(*values)]


def sweep_path(name: str) -> Path:
    """Return the path of a sweep file. `name` is this path, or the name of a sweep that the package ships.

    Raises:
        ConfigError: The file does not exist.
    """
    if path := named_file(name, "sweeps"):
        return path
    near = nearest_file(name, "sweeps") if name else None
    wrong = f"{name} is neither a file here nor a shipped sweep." if name else "no file given."
    raise ConfigError(f"sweep: {wrong} {suggest(near, (one.removesuffix('.yaml') for one in shipped('sweeps')))}")


def parse_sweep(content: Mapping[str, Any], path: Path, settings: Sequence[str] = ()) -> Sweep:
    """Check the content of a W&B sweep file, and convert it to a `Sweep`.

    Args:
        content: The file's content.
        path: The file's path, for messages and the sweep's name.
        settings: Words `KEY=VALUE` to add to the command line of every trial.

    Raises:
        ConfigError: The file is invalid, or uses a feature of W&B's server; the message names the key.
    """
    with errors_at(path):
        check_keys("", content, KEYS)
        words, after = _command(content.get("command"), content.get("program"))
        method, run_cap, seeds = str(content.get("method")), content.get("run_cap"), content.get("seeds")
        require(method in METHODS, f"method: {method!r} is not one of {', '.join(METHODS)}")
        require(run_cap is None or is_count(run_cap, 1), f"run_cap: {run_cap!r} is not a number of trials")
        metric, maximize = _metric(content.get("metric"))
        pruner, rounds = _pruner(content.get("early_terminate"))
        parameters = _parameters(content.get("parameters"), method == "grid")
        seeds = () if seeds is None else check_seeds("seeds", seeds)
        own = "seed" in parameters or option_values([*words, *after, *(f"--{word}" for word in settings)], "seed")
        require(
            not (seeds and own), "seeds: the parameters, the command or --set have seed, too. Leave one of them out"
        )
    words += tuple(_setting(word, parameters) for word in settings)
    return Sweep(path.stem, method, words, after, parameters, metric, maximize, pruner, rounds, run_cap, content, seeds)


# --- The command line --------------------------------------------------------------------------------------------


def _command(content: Any, program: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the trials' `fit` command line in two parts, before and after the parameters, with W&B set to offline."""
    words = [_with_environment(word) for word in content] if isinstance(content, list) else []
    words[:1] = [str(program)] if words[:1] == ["${program}"] else words[:1]
    valid = words[:2] == ["fl-lightning", "fit"] and words.count("${args}") == 1
    require(valid, f"command: only {COMMAND} with program fl-lightning can be run here")
    place = words.index("${args}")
    for word in [*words[2:place], *words[place + 1 :]]:
        known = "Available: ${program}, ${args}, ${envvar:NAME}."
        require("${" not in word, f"command: {word} is not known. {known}")
        is_set = word.partition("=")[0] in ("--resume", "--run_dir")
        require(not is_set, f"command: {word} is set by the sweep. Leave it out")
    return _log_offline(words[2:place]), _log_offline(words[place + 1 :])


def _with_environment(word: Any) -> str:
    """Return a word of the command, with each `${envvar:NAME}` replaced by the value of the environment variable."""

    def value(match: re.Match[str]) -> str:
        require(match[1] in os.environ, f"command: {word} needs the environment's {match[1]}, which is not set")
        return os.environ[match[1]]

    return re.sub(r"\$\{envvar:(\w*)\}", value, to_word(word))


def _log_offline(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line in which the option `--logger.offline`, if present, is set to true."""
    before = ["", *words]
    return tuple(
        "true" if last == "--logger.offline" else re.sub(r"^--logger\.offline=.*", "--logger.offline=true", word)
        for last, word in zip(before, words, strict=False)
    )


def _setting(word: str, parameters: Mapping[str, Parameter]) -> str:
    key, _ = split_setting("--set", word)
    require(key not in parameters, f"--set: {key} is a parameter of the sweep. Leave it out")
    require(key not in SET_BY_SWEEP, f"--set: {key} is set by the sweep")
    return f"--{word}"


# --- Metric and early termination ----------------------------------------------------------------------------------


def _metric(content: Any) -> tuple[str, bool]:
    require(content is not None, "metric: name the metric to optimise: {name: global/acc, goal: maximize}")
    check_keys("metric", content, ("name", "goal"))
    name, goal = content.get("name"), content.get("goal", "minimize")  # W&B's default
    valid = isinstance(name, str) and goal in ("minimize", "maximize")
    require(valid, f"metric: needs a name, and goal minimize or maximize; it is {dict(content)}")
    better = better_goal(name)
    if better not in (goal, None):
        warnings.warn(f"metric: goal {goal} takes the worst {name} as the best. Set goal: {better}.", stacklevel=2)
    return name, goal == "maximize"


def _pruner(content: Any) -> tuple[SuccessiveHalvingPruner | None, float]:
    """Convert `early_terminate` of a W&B sweep to an Optuna pruner, and return it with the round at which pruning ends.

    At rounds min_iter, min_iter * eta, ... the best 1/eta of the trials so far continue. This is a single bracket of
    successive halving; Optuna's HyperbandPruner would distribute the trials over several brackets.
    """
    if content is None:
        return None, 0
    check_keys("early_terminate", content, ("type", "min_iter", "max_iter", "s", "eta", "strict"))
    kind = content.get("type")
    require(kind == "hyperband", f"early_terminate: type {kind!r} is not supported. Use hyperband")
    require(content.get("strict", True) is True, "early_terminate: strict: false is not supported. Leave it out")

    def count(name: str, minimum: int, default: int | None = None) -> int:
        value = content.get(name, default)
        what = f"is not a whole number of at least {minimum}"
        require(is_count(value, minimum), f"early_terminate: {name}: {value!r} {what}")
        return value

    eta = count("eta", 2, 3)
    if "max_iter" not in content and "min_iter" in content:
        return SuccessiveHalvingPruner(count("min_iter", 1), eta), math.inf
    require({"max_iter", "s"} <= content.keys(), "early_terminate: needs min_iter, or max_iter and s")
    max_iter = count("max_iter", eta)
    pruning_rounds = [max_iter // eta**i for i in range(1, count("s", 1) + 1) if max_iter >= eta**i]
    return SuccessiveHalvingPruner(pruning_rounds[-1], eta), max_iter  # it begins at the earliest one


# --- Parameters --------------------------------------------------------------------------------------------------


def _parameters(content: Any, grid: bool) -> dict[str, Parameter]:
    valid = isinstance(content, Mapping) and content
    require(valid, "parameters: name at least one key, each with values, value, or min and max")
    parameters: dict[str, Parameter] = {}
    for key, description in content.items():
        require(key not in SET_BY_SWEEP, f"parameters: {key} is set by the sweep. Put it into the command")
        with errors_at(f"parameters: {key}"):
            parameter = parameters[str(key)] = _parameter(description)
            require(not grid or parameter.values is not None, "a grid needs values, or whole numbers min and max")
    return parameters


def _parameter(description: Any) -> Parameter:
    needs = "needs values, value, or min and max; it is"
    require(isinstance(description, Mapping), f"{needs} {description!r}")
    require("parameters" not in description, "nested parameters are not supported. Write the key with dots")
    fix = "values are drawn uniformly. Leave them out"
    require("probabilities" not in description, f"probabilities are not supported: {fix}")
    name = description.get("distribution") or _default_distribution(description)
    require(name, f"{needs} {dict(description)}")
    require(name in DISTRIBUTIONS, f"distribution {name!r} is not supported. Use one of {', '.join(DISTRIBUTIONS)}")
    required = DISTRIBUTIONS[name]
    allowed = [*required, *(["q"] if name.startswith("q_") else [])]
    for key in description:
        require(key in [*allowed, "distribution"], f"{name} takes {', '.join(allowed)}, not {key}")
    for key in required:
        require(key in description, f"{name} needs {key}")
    if required == BOUNDS:
        return _numeric_parameter(name, description)
    values = [description["value"]] if "value" in description else description["values"]
    require(isinstance(values, list) and values, f"values: {values!r} is not a list of values")
    return _listed_parameter(values)


def _listed_parameter(values: Sequence[Any]) -> Parameter:
    """Return a parameter of a sweep that takes one of the given values.

    Optuna stores numbers, truth values and text with their type, and numbers of one list with one type. Other values,
    such as lists, are text: Optuna's databases do not support them. So are values that Optuna takes for equal.
    """
    by_word: dict[str, Any] = {}
    for value in values:
        by_word.setdefault(to_word(value), value)
    choices = [float(word) if EXPONENT.fullmatch(word) else value for word, value in by_word.items()]
    if any(isinstance(one, float) for one in choices) and all(type(one) in (int, float) for one in choices):
        choices = [float(one) for one in choices]
    if any(isinstance(one, list | dict) for one in choices) or len(set(choices)) < len(choices):
        choices = list(by_word)
    return Parameter(CategoricalDistribution(choices), dict(zip(choices, by_word, strict=True)))


def _default_distribution(description: Mapping[str, Any]) -> str:
    """Return the name of the distribution that W&B uses for a parameter that does not name one; empty if unknown."""
    for key, name in (("values", "categorical"), ("value", "constant")):
        if key in description:
            return name
    if {*BOUNDS} <= description.keys():
        return "int_uniform" if all(isinstance(description[key], int) for key in BOUNDS) else "uniform"
    return ""


def _numeric_parameter(name: str, description: Mapping[str, Any]) -> Parameter:
    """Return a parameter with a numeric distribution. Bounds of `log_uniform` and `q_log_uniform` are logarithms."""
    whole, log = name == "int_uniform", "log" in name
    for key in (*BOUNDS, "q"):
        value = description.get(key, 1)
        valid = is_number(value) and math.isfinite(value) and (not whole or isinstance(value, int))
        require(valid, f"{key}: {value!r} is not a {'whole ' if whole else ''}number")
    low, high, q = description["min"], description["max"], description.get("q", 1)
    require(low <= high, f"min {low} is above max {high}")
    if log and not name.endswith("_values"):
        low, high = math.exp(low), math.exp(high)
    require(low > 0 or not log, f"min {low} is not above 0, which a logarithm needs")
    if whole:
        return Parameter(IntDistribution(low, high))
    numbers = FloatDistribution(low, high, log=log)
    if not name.startswith("q_"):
        return Parameter(numbers)
    require(q > 0, f"q {q} is not above 0")
    first, last = multiples(numbers, q)
    require(first <= last, f"no multiple of q {q} is between {low} and {high}")
    return Parameter(numbers, q=q)


def multiples(numbers: Any, q: float) -> tuple[int, int]:
    """Return the smallest and the largest integer n for which n * q lies between `numbers.low` and `numbers.high`."""
    slack = 1e-9  # rounding errors: 0.3 counts as three times 0.1
    return math.ceil(numbers.low / q - slack), math.floor(numbers.high / q + slack)
