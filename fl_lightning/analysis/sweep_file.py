"""W&B's sweep files, read to be carried out here: what each point's command line is, and where its values come from."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import SuccessiveHalvingPruner

from fl_lightning.analysis.baselines import to_word
from fl_lightning.core.config import named_file, nearest_file, read_config, shipped
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.metrics import better_goal

METHODS = ("grid", "random", "bayes")
UNRELATED_KEYS = {"name", "description", "project", "entity", "program"}
"""What says nothing about the points: a sweep goes on whatever becomes of it."""
KEYS = {*UNRELATED_KEYS, "command", "method", "metric", "parameters", "early_terminate", "run_cap"}
SWEEPS_OWN = {"config", "resume", "run_dir"}
FORM = '[${program}, fit, --config, NAME.yaml, ..., "${args}"]'


@dataclass(frozen=True)
class Parameter:
    """A key that a sweep varies.

    Args:
        distribution: Where Optuna draws its value from; of values that are listed, their words.
        q: Round what was drawn to a multiple of this, within the distribution's bounds.
    """

    distribution: BaseDistribution
    q: float | None = None

    def word(self, drawn: Any) -> str:
        """The value's word on the command line, given what was drawn."""
        if self.q is None:
            return to_word(drawn)
        low, high = multiples(self.distribution, self.q)
        number = self.q * min(max(round(drawn / self.q), low), high)
        return to_word(
            number if isinstance(self.q, int) else float(f"{number:.12g}")
        )  # less what float sums leave behind

    @property
    def values(self) -> list[Any] | None:
        """All it can be, if they can be listed."""
        if isinstance(self.distribution, CategoricalDistribution):
            return list(self.distribution.choices)
        if isinstance(self.distribution, IntDistribution):
            return list(range(self.distribution.low, self.distribution.high + 1))
        return None


@dataclass(frozen=True)
class Sweep:
    """What a sweep file asks for.

    Args:
        name: The file's, less its suffix.
        method: `grid`, `random` or `bayes`.
        words: The command line of `fit` up to the parameters, less that word.
        after: What follows them there.
        parameters: What varies, by key.
        metric: What is compared: a column of `metrics.csv` (its last value), or a figure of `final/summary.json`.
        maximize: Whether more of it is better.
        pruner: Says which points to end early; None for none.
        rounds_to_prune: Points that have come so far are not ended early any more.
        run_cap: The most points, if the file says so.
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

    def command(self, drawn: Mapping[str, Any]) -> tuple[str, ...]:
        """A point's command line, given what was drawn for each parameter."""
        values = (f"--{key}={parameter.word(drawn[key])}" for key, parameter in self.parameters.items())
        return (*self.words, *values, *self.words_after)

    def grid(self) -> list[dict[str, Any]]:
        """Every point of a grid, the last parameter varying fastest."""
        values = [parameter.values or [] for parameter in self.parameters.values()]
        return [dict(zip(self.parameters, chosen, strict=True)) for chosen in product(*values)]


def sweep_path(name: str) -> Path:
    """A sweep file by path, or by the bare name of a shipped one.

    Raises:
        ConfigError: There is none.
    """
    if path := named_file(name, "sweeps"):
        return path
    near = nearest_file(name, "sweeps") if name else None
    names = ", ".join(one.removesuffix(".yaml") for one in shipped("sweeps"))
    wrong = f"{name} is neither a file here nor a shipped sweep;" if name else "which one?"
    raise ConfigError(f"sweep: {wrong} " + (f"did you mean {near}?" if near else f"there are {names}"))


def read_sweep(path: Path) -> dict[str, Any]:
    """A sweep file's content.

    Raises:
        ConfigError: It is no readable YAML, or no mapping.
    """
    return read_config(path)


def parse_sweep(content: Mapping[str, Any], path: Path, settings: Sequence[str] = ()) -> Sweep:
    """What a sweep file asks for.

    Args:
        content: The file's content.
        path: Where it lies, for messages and the sweep's name.
        settings: Words `KEY=VALUE` that every point's command line has too.

    Raises:
        ConfigError: It asks for what cannot be done here; the message names the file and the key.
    """
    try:
        _known("a sweep", content, KEYS)
        words, after = _command(content.get("command"), content.get("program"))
        method = content.get("method")
        if method not in METHODS:
            raise ConfigError(f"method: {method!r} is none of {', '.join(METHODS)}")
        metric, maximize = _metric(content.get("metric"))
        pruner, rounds = _pruner(content.get("early_terminate"))
        parameters = _parameters(content.get("parameters"), method == "grid")
        run_cap = content.get("run_cap")
        if run_cap is not None and (not isinstance(run_cap, int) or run_cap < 1):
            raise ConfigError(f"run_cap: {run_cap!r} is no number of points")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    words += tuple(_setting(word, parameters) for word in settings)
    return Sweep(path.stem, method, words, after, parameters, metric, maximize, pruner, rounds, run_cap)


def _known(what: str, given: Any, keys: set[str]) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{what}: needs lines `key: value`, it holds {given!r}")
    for key in given:
        if key not in keys:
            near = get_close_matches(str(key), sorted(keys), 1)
            mend = f"did you mean {near[0]}?" if near else f"only {', '.join(sorted(keys))} are taken here"
            raise ConfigError(f"{what} has no key {key!r} here; {mend}")


# --- The command line --------------------------------------------------------------------------------------------


def _command(given: Any, program: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words of `fit` before and after the parameters; a run that would log online is offline here."""
    words = [_filled(word) for word in given] if isinstance(given, list) else []
    if words[:1] == ["${program}"]:
        words[0] = str(program)
    if words[:2] != ["fl-lightning", "fit"] or words.count("${args}") != 1:
        raise ConfigError(f"command: only {FORM} with program fl-lightning can be carried out here")
    place = words.index("${args}")
    for word in [*words[:place], *words[place + 1 :]]:
        if "${" in word:
            raise ConfigError(f"command: {word} is not known; there are ${{program}}, ${{args}} and ${{envvar:NAME}}")
        if word.partition("=")[0] in ("--resume", "--run_dir"):
            raise ConfigError(f"command: {word} is the sweep's own to say; leave it out")
    return tuple(_offline(words[2:place])), tuple(_offline(words[place + 1 :]))


def _filled(word: Any) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in os.environ:
            raise ConfigError(f"command: {word} needs the environment's {match[1]}, which is not set")
        return os.environ[match[1]]

    return re.sub(r"\$\{envvar:(\w*)\}", value, to_word(word))


def _offline(words: Sequence[str]) -> list[str]:
    found = list(words)
    for i, word in enumerate(words):
        if word == "--logger.offline" and i + 1 < len(words):
            found[i + 1] = "true"
        elif word.startswith("--logger.offline="):
            found[i] = "--logger.offline=true"
    return found


def _setting(word: str, parameters: Mapping[str, Parameter]) -> str:
    key, sign, _ = word.partition("=")
    if not sign or not key:
        raise ConfigError(f"--set: {word!r} is not of the form KEY=VALUE")
    if key in parameters:
        raise ConfigError(f"--set: {key} is what the sweep varies")
    if key in SWEEPS_OWN:
        raise ConfigError(f"--set: {key} is the sweep's own to say")
    return f"--{word}"


# --- Metric and early ends ---------------------------------------------------------------------------------------


def _metric(given: Any) -> tuple[str, bool]:
    if given is None:
        raise ConfigError("metric: name what points are compared by: {name: global/acc, goal: maximize}")
    _known("metric", given, {"name", "goal"})
    goal = given.get("goal", "minimize")  # as W&B has it
    if not isinstance(given.get("name"), str) or goal not in ("minimize", "maximize"):
        raise ConfigError(f"metric: needs a name, and goal minimize or maximize; it is {dict(given)}")
    name = given["name"]
    if better_goal(name) not in (goal, None):
        better = better_goal(name)
        warnings.warn(f"metric: goal {goal} takes the worst {name} for the best. Set goal: {better}.", stacklevel=2)
    return name, goal == "maximize"


def _pruner(given: Any) -> tuple[SuccessiveHalvingPruner | None, float]:
    """W&B's hyperband: at rounds min_iter, min_iter * eta, ... the best 1/eta of those that came so far go on.

    That is one bracket of successive halving; Optuna's HyperbandPruner would deal the points out to several.
    """
    if given is None:
        return None, 0
    _known("early_terminate", given, {"type", "min_iter", "max_iter", "s", "eta", "strict"})
    if given.get("type") != "hyperband":
        raise ConfigError(f"early_terminate: type {given.get('type')!r} is not known here; there is hyperband")
    if given.get("strict", True) is not True:
        raise ConfigError("early_terminate: strict: false cannot be done here; leave it out")
    eta, s = _count("eta", given.get("eta", 3), 2), given.get("s")
    if "max_iter" not in given and "min_iter" in given:
        return SuccessiveHalvingPruner(_count("min_iter", given["min_iter"], 1), eta), math.inf
    if "max_iter" not in given or s is None:
        raise ConfigError("early_terminate: needs min_iter, or max_iter and s")
    most = _count("max_iter", given["max_iter"], eta)
    bands = [most // eta**i for i in range(1, _count("s", s, 1) + 1) if most >= eta**i]
    return SuccessiveHalvingPruner(bands[-1], eta), most


def _count(name: str, given: Any, least: int) -> int:
    if not isinstance(given, int) or given < least:
        raise ConfigError(f"early_terminate: {name}: {given!r} is no whole number from {least}")
    return given


# --- Parameters --------------------------------------------------------------------------------------------------


def _parameters(given: Any, grid: bool) -> dict[str, Parameter]:
    if not isinstance(given, Mapping) or not given:
        raise ConfigError("parameters: name at least one key, each with values, value, or min and max")
    found = {}
    for key, told in given.items():
        if key in SWEEPS_OWN:
            raise ConfigError(f"parameters: {key} is the sweep's own to say; put it into the command")
        try:
            found[str(key)] = _parameter(told)
        except ConfigError as error:
            raise ConfigError(f"parameters: {key}: {error}") from None
        if grid and found[key].values is None:
            raise ConfigError(f"parameters: {key}: a grid needs values, or whole numbers min and max")
    return found


def _parameter(told: Any) -> Parameter:
    if not isinstance(told, Mapping):
        raise ConfigError(f"needs values, value, or min and max; it is {told!r}")
    if "parameters" in told:
        raise ConfigError("nested parameters are not known here; write the key with dots")
    if "probabilities" in told:
        raise ConfigError("probabilities cannot be done here: values are drawn evenly; leave them out")
    name = told.get("distribution") or _inferred(told)
    if name not in DISTRIBUTIONS:
        raise ConfigError(f"distribution {name!r} cannot be done here; there are {', '.join(DISTRIBUTIONS)}")
    needs, make = DISTRIBUTIONS[name]
    q = {"q"} if name.startswith("q_") else set()
    for key in told:
        if key not in {*needs, *q, "distribution"}:
            raise ConfigError(f"{name} takes {', '.join([*needs, *q])}, not {key}")
    for key in needs:
        if key not in told:
            raise ConfigError(f"{name} needs {key}")
    return make(told)


def _inferred(told: Mapping[str, Any]) -> str:
    """The distribution that W&B takes where none is named."""
    for key, name in (("values", "categorical"), ("value", "constant")):
        if key in told:
            return name
    if "min" in told and "max" in told:
        return "int_uniform" if isinstance(told["min"], int) and isinstance(told["max"], int) else "uniform"
    raise ConfigError(f"needs values, value, or min and max; it is {dict(told)}")


def _listed(told: Mapping[str, Any]) -> Parameter:
    values = [told["value"]] if "value" in told else told["values"]
    if not isinstance(values, list) or not values:
        raise ConfigError(f"values: {values!r} is no list of them")
    return Parameter(CategoricalDistribution(list(dict.fromkeys(map(to_word, values)))))


def _numbers(log: bool = False, exponents: bool = False, whole: bool = False) -> Callable[..., Parameter]:
    """Makes a parameter of numbers between bounds: evenly on a log scale or not; bounds may be natural logarithms."""

    def make(told: Mapping[str, Any]) -> Parameter:
        low, high = (_number(key, told[key], whole) for key in ("min", "max"))
        if low > high:
            raise ConfigError(f"min {low} is above max {high}")
        if exponents:
            low, high = math.exp(low), math.exp(high)
        if log and low <= 0:
            raise ConfigError(f"min {low} is not above 0, which a logarithm needs")
        if whole:
            return Parameter(IntDistribution(int(low), int(high)))
        numbers = FloatDistribution(low, high, log=log)
        if not str(told.get("distribution")).startswith("q_"):
            return Parameter(numbers)
        q = _number("q", told.get("q", 1), whole=False)
        if q <= 0:
            raise ConfigError(f"q {q} is not above 0")
        least, most = multiples(numbers, q)
        if least > most:
            raise ConfigError(f"no multiple of q {q} is between {low} and {high}")
        return Parameter(numbers, q)

    return make


def _number(key: str, given: Any, whole: bool) -> float:
    if isinstance(given, bool) or not isinstance(given, int if whole else (int, float)) or not math.isfinite(given):
        raise ConfigError(f"{key}: {given!r} is no {'whole ' if whole else ''}number")
    return given


def multiples(numbers: Any, q: float) -> tuple[int, int]:
    """Which multiples of q, least and most, lie within a distribution's bounds."""
    slack = 1e-9  # of a q: 0.3 is three times 0.1
    return math.ceil(numbers.low / q - slack), math.floor(numbers.high / q + slack)


BOUNDS = ("min", "max")
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[..., Parameter]]] = {
    "constant": (("value",), _listed),
    "categorical": (("values",), _listed),
    "int_uniform": (BOUNDS, _numbers(whole=True)),
    "uniform": (BOUNDS, _numbers()),
    "q_uniform": (BOUNDS, _numbers()),
    "log_uniform": (BOUNDS, _numbers(log=True, exponents=True)),
    "q_log_uniform": (BOUNDS, _numbers(log=True, exponents=True)),
    "log_uniform_values": (BOUNDS, _numbers(log=True)),
    "q_log_uniform_values": (BOUNDS, _numbers(log=True)),
}
