"""A W&B sweep carried out here: the points that the file asks for, each once, whatever is killed."""

import contextlib
import csv
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import optuna
import pytest
import sqlalchemy
import yaml
from commands import TINY, contents, run, summary, table, tiny
from optuna.samplers import TPESampler
from optuna.storages import RDBStorage
from scipy import stats
from test_sweeps import SWEEPS, agent_at, loaded, points, started  # noqa: F401  # a fixture

from fl_lightning.analysis import sweep as sweeps
from fl_lightning.analysis.executor import FAILED, JobResult
from fl_lightning.analysis.sweep import Study, TrialResult, rank_settings, run_sweep
from fl_lightning.analysis.sweep_file import parse_sweep, read_sweep, sweep_path
from fl_lightning.cli.jobs import FIT
from fl_lightning.cli.sweep_metric import check_metric
from fl_lightning.core.errors import ConfigError

GRID = {"a": {"values": [1, 0.5, "x y"]}, "seed": {"values": [0, 1]}, "b": {"min": 2, "max": 4}, "c": {"value": True}}
NUMBERS = {"x": {"min": 0.0, "max": 1.0}, "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1.0}}


@pytest.fixture(autouse=True)
def quick_and_quiet(monkeypatch):
    """Optuna tells nothing, and the database does not wait for the disk."""
    before, real = optuna.logging.get_verbosity(), sweeps.storage_at

    def storage_at(path):
        storage = real(path)
        with storage.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA synchronous=OFF")
        return storage

    monkeypatch.setattr(sweeps, "storage_at", storage_at)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


def content(method="grid", parameters=None, **more):
    return {
        "program": "fl-lightning",
        "command": ["${program}", "fit", "--config", "digits_fedskc.yaml", "${args}"],
        "method": method,
        "metric": {"name": "global/acc", "goal": "maximize"},
        "parameters": GRID if parameters is None else parameters,
        **more,
    }


def parsed(method="grid", parameters=None, settings=(), **more):
    return parse_sweep(content(method, parameters, **more), Path("some.yaml"), settings)


def numbers(words):
    """The values of a point's command line, by key."""
    pairs = (word.removeprefix("--").split("=") for word in words if "=" in word)
    return {key: float(value) for key, value in pairs}


class Killed(BaseException):
    """Where a kill would have hit."""


class Fake:
    """Takes the place of `run_jobs`: a point's figures are those of a function, by round.

    Args:
        figure: Of a point's values by key, the metric by round; or a reason to fail.
        kill: At which of the moments around points' runs to be killed.
        summary: Of the points' `final/summary.json`.
    """

    def __init__(self, figure, kill=None, **summary):
        self.figure, self.kill, self.summary = figure, kill, summary
        self.moment, self.ran = 0, []

    def passing(self):
        self.moment += 1
        if self.moment == self.kill:
            raise Killed

    def __call__(self, jobs, program, workers, threads, should_stop):
        for point in jobs:
            self.passing()
            if (point.folder / "final/summary.json").exists():
                yield JobResult(point, 0, "")
                continue
            self.ran.append(point.words)
            told = self.figure(numbers(point.words))
            point.folder.mkdir(parents=True, exist_ok=True)
            if isinstance(told, str):
                (point.folder / FAILED).write_text(told)
                yield JobResult(point, 1, told)
                continue
            (point.folder / "config.yaml").write_text(f"rounds: {len(told)}\n")
            for end in range(1, len(told) + 1):
                write_metrics(point.folder, told[:end])
                if should_stop and should_stop(point):
                    yield JobResult(point, 143, "stopped by SIGTERM")
                    break
            else:
                (point.folder / "final").mkdir()
                (point.folder / "final/summary.json").write_text(json.dumps({"rounds": len(told)} | self.summary))
                self.passing()
                yield JobResult(point, 0, "")


def write_metrics(folder, values):
    lines = [f"{number},{value!r}\n" for number, value in enumerate(values, 1)]
    (folder / "metrics.csv").write_text("round,global/acc\n" + "".join(lines))


def faked(monkeypatch, folder, sweep, fake, **options):
    """A sweep's results with fake runs."""
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(sweeps, "run_jobs", fake)
    return run_sweep(sweep, folder, FIT, **options)


def plain(results):
    """Results less their folders' random names."""
    return [(one.number, dict(one.settings), one.state, one.value, one.rounds, one.reason) for one in results]


def parabola(values):
    """Best, 1, at x = 0.3 and lr = 0.01."""
    return [1 - (values["x"] - 0.3) ** 2 - (math.log10(values["lr"]) + 2) ** 2 / 16]


# --- What the file asks for ---


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("agent_at")
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_command_line_is_the_one_wandbs_agent_makes(path, monkeypatch):
    """But for being offline; and the grid has the points that W&B's has."""
    ours, theirs = parse_sweep(loaded(path), path), list(points(path))
    assert len(ours.grid()) == len(theirs)
    for drawn, point in zip(ours.grid(), theirs, strict=True):
        _, command, *words = started(path, point, monkeypatch).command
        place = words.index("--logger.offline") + 1
        assert (command, words[place]) == ("fit", "false")
        assert list(ours.command(drawn)) == [*words[:place], "true", *words[place + 1 :]]


def test_a_grid_is_the_product_of_its_values():
    sweep = parsed()
    expected = [
        ("--config", "digits_fedskc.yaml", f"--a={a}", f"--seed={seed}", f"--b={b}", "--c=true")
        for a, seed, b in product(["1", "0.5", "x y"], [0, 1], [2, 3, 4])
    ]
    assert [sweep.command(drawn) for drawn in sweep.grid()] == expected


def test_a_value_that_is_listed_twice_is_one_point():
    sweep = parsed(parameters={"a": {"values": [1, 2, 1, "2"]}, "b": {"values": [[1, 2], {"k": None}, [1, 2]]}})
    words = [sweep.command(drawn)[2:] for drawn in sweep.grid()]
    assert words == [(a, b) for a in ("--a=1", "--a=2") for b in ("--b=[1, 2]", '--b={"k": null}')]


def test_settings_and_the_environment_fill_the_command_line(monkeypatch):
    monkeypatch.setenv("FL_X", "a b")
    command = ["fl-lightning", "fit", "--config", "${envvar:FL_X}.yaml", "--logger.offline=false", "--rounds", 4]
    sweep = parsed(
        command=[*command, "${args}", "--seed", 3], parameters={"k": {"value": 1e-5}}, settings=["rounds=2", "a=b=c"]
    )
    assert sweep.command({"k": "1e-05"}) == (
        *("--config", "a b.yaml", "--logger.offline=true", "--rounds", "4", "--rounds=2", "--a=b=c"),
        *("--k=1e-05", "--seed", "3"),
    )


def ppf(name, low, high):
    """W&B's distributions by their definitions, continuous ones."""
    if name == "uniform":
        return stats.uniform(low, high - low)
    return stats.loguniform(low, high) if name == "log_uniform_values" else stats.loguniform(*np.exp([low, high]))


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("uniform", -1, 3), ("log_uniform_values", 1e-5, 1.0), ("log_uniform", -3, 2)],
)
def test_numbers_are_drawn_as_the_distribution_has_them(name, low, high, tmp_path):
    drawn = draws({"distribution": name, "min": low, "max": high}, tmp_path)
    expected = ppf(name, low, high)
    assert expected.support()[0] <= min(drawn)
    assert max(drawn) <= expected.support()[1]
    assert stats.kstest(drawn, expected.cdf).pvalue > 1e-3
    other = "log_uniform_values" if name == "uniform" else "uniform"
    assert stats.kstest(drawn, ppf(other, abs(low) if name == "uniform" else low, high).cdf).pvalue < 1e-6


def draws(told, folder, count=200):
    """Random values of one parameter, without the database."""
    sweep = parsed("random", {"k": told})
    study = Study.__new__(Study)
    study.sweep, study.seed = sweep, 5
    study._study = optuna.create_study()
    drawn = [sweep.command(study._propose(number))[-1] for number in range(count)]
    return [yaml.safe_load(word.removeprefix("--k=")) for word in drawn] if "values" not in told else drawn


@pytest.mark.parametrize(
    ("told", "every"),
    [
        ({"min": 2, "max": 5}, [2, 3, 4, 5]),
        ({"distribution": "int_uniform", "min": -1, "max": 1}, [-1, 0, 1]),
        ({"distribution": "q_uniform", "min": 0.1, "max": 0.5, "q": 0.1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"distribution": "q_uniform", "min": 0.28, "max": 0.29, "q": 0.01}, [0.28, 0.29]),  # of floats: 28.00..4 q
        ({"distribution": "q_uniform", "min": 3, "max": 21, "q": 8}, [8, 16]),
        ({"distribution": "q_uniform", "min": 0, "max": 3}, [0, 1, 2, 3]),
        ({"distribution": "q_log_uniform_values", "min": 1, "max": 40, "q": 8}, [8, 16, 24, 32, 40]),
        ({"distribution": "q_log_uniform", "min": 0, "max": 1.5, "q": 0.5}, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]),
        ({"values": ["a", 2, 0.5]}, ["--k=a", "--k=2", "--k=0.5"]),
    ],
)
def test_what_can_be_counted_is_drawn_in_full_and_nothing_else(told, every, tmp_path):
    drawn = draws(told, tmp_path)
    assert sorted(set(drawn), key=str) == sorted(every, key=str)
    assert {type(value) for value in drawn} == {type(value) for value in every}


def test_a_quantized_number_is_the_nearest_multiple_within_the_bounds():
    for log, (low, high, q) in product([False, True], [(1, 100, 8), (0.05, 0.95, 0.1), (7, 9, 3)]):
        told = {"distribution": "q_log_uniform_values" if log else "q_uniform", "min": low, "max": high, "q": q}
        parameter = parsed("random", {"k": told}).parameters["k"]
        inside = [k * q for k in range(1000) if low - 1e-9 <= k * q <= high + 1e-9]
        for x in np.linspace(low, high, 99):
            nearest = min(abs(one - x) for one in inside)
            assert abs(float(parameter.word(x)) - x) == pytest.approx(nearest, abs=1e-9)


# --- What cannot be done ---

BAD = {
    "method: 'girdle' is not one of grid, random, bayes": {"method": "girdle"},
    "a sweep has no key 'metod' here; did you mean method?": {"metod": "grid"},
    r"command: only .* can be run here": {"command": ["python", "${program}", "${args}"]},
    r"command: only .* with program fl-lightning": {"program": "train.py"},
    r"command: only .* \"\$\{args\}\"\]": {"command": ["${program}", "fit", "--config", "digits_fedskc.yaml"]},
    r"command: \$\{args_json\} is not known": {"command": ["${program}", "fit", "${args_json}", "${args}"]},
    r"command: \$\{envvar:FL_NO\} needs the environment's FL_NO": {
        "command": ["${program}", "fit", "--config", "${envvar:FL_NO}", "${args}"]
    },
    "command: --run_dir=x is set by the sweep": {"command": ["${program}", "fit", "--run_dir=x", "${args}"]},
    "metric: name the metric to optimise": {"metric": None},
    "metric: needs a name": {"metric": {"goal": "maximize"}},
    "metric: needs a name, and goal minimize or maximize": {"metric": {"name": "a", "goal": "max"}},
    "metric has no key 'target' here": {"metric": {"name": "a", "target": 1}},
    "run_cap: 0 is not a number of trials": {"run_cap": 0},
    "early_terminate: type 'median' is not supported": {"early_terminate": {"type": "median", "min_iter": 1}},
    "early_terminate: strict: false": {"early_terminate": {"type": "hyperband", "min_iter": 1, "strict": False}},
    "early_terminate: needs min_iter, or max_iter and s": {"early_terminate": {"type": "hyperband", "max_iter": 9}},
    r"early_terminate: eta: 2.5 is not a whole number of at least 2": {
        "early_terminate": {"type": "hyperband", "min_iter": 1, "eta": 2.5}
    },
    "early_terminate: max_iter: 2 is not a whole number of at least 3": {
        "early_terminate": {"type": "hyperband", "max_iter": 2, "s": 1}
    },
    "parameters: name at least one key": {"parameters": []},
    "parameters: run_dir is set by the sweep": {"parameters": {"run_dir": {"values": ["a"]}}},
    "parameters: k: needs values, value, or min and max; it is 3": {"parameters": {"k": 3}},
    "parameters: k: needs values, value, or min and max; it is {'min': 3}": {"parameters": {"k": {"min": 3}}},
    "parameters: k: nested parameters are not supported": {"parameters": {"k": {"parameters": {}}}},
    "parameters: k: probabilities are not supported": {"parameters": {"k": {"values": [1], "probabilities": [1]}}},
    "parameters: k: distribution 'normal' is not supported": {"parameters": {"k": {"distribution": "normal"}}},
    "parameters: k: categorical takes values, not min": {"parameters": {"k": {"values": [1], "min": 0}}},
    "parameters: k: uniform takes min, max, not q": {
        "parameters": {"k": {"distribution": "uniform", "min": 0, "max": 1, "q": 1}}
    },
    "parameters: k: uniform needs max": {"parameters": {"k": {"distribution": "uniform", "min": 0}}},
    r"parameters: k: values: \[\] is not a list": {"parameters": {"k": {"values": []}}},
    "parameters: k: values: 3 is not a list": {"parameters": {"k": {"values": 3}}},
    "parameters: k: min 2 is above max 1": {"parameters": {"k": {"min": 2, "max": 1}}},
    "parameters: k: min: 'a' is not a number": {"parameters": {"k": {"min": "a", "max": 1}}},
    "parameters: k: max: True is not a whole number": {"parameters": {"k": {"min": 0, "max": True}}},
    "parameters: k: min: 0.5 is not a whole number": {
        "parameters": {"k": {"distribution": "int_uniform", "min": 0.5, "max": 1}}
    },
    "parameters: k: min 0 is not above 0": {
        "parameters": {"k": {"distribution": "log_uniform_values", "min": 0, "max": 1}}
    },
    "parameters: k: q 0 is not above 0": {
        "parameters": {"k": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0}}
    },
    "parameters: k: no multiple of q 5 is between 6 and 9": {
        "parameters": {"k": {"distribution": "q_uniform", "min": 6, "max": 9, "q": 5}}
    },
    "parameters: k: a grid needs values": {"parameters": {"k": {"min": 0.5, "max": 1}}},
}


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_done_is_refused_in_one_line(message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(content() | BAD[message]))
    with pytest.raises(ConfigError, match=f"bad.yaml: {message}") as caught:
        parse_sweep(read_sweep(path), path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "sweep: nowhere is neither a file here nor a shipped sweep; there are cwfedavg_lam, digits_"),
        (["a/nowhere.yaml"], "sweep: a/nowhere.yaml is neither a file here nor a shipped sweep"),
        ([], "sweep: which one? there are cwfedavg_lam, digits_"),
        (["digits_fedskc_tau", "--set", "rounds"], "--set: 'rounds' is not of the form KEY=VALUE"),
        (["digits_fedskc_tau", "--set", "seed=1"], "--set: seed is a parameter of the sweep. Leave it out"),
        (["digits_fedskc_tau", "--set", "run_dir=a"], "--set: run_dir is set by the sweep"),
        (["digits_fedskc_tau", "--workers", "0"], "--workers: 0 is below 1"),
        (["digits_fedskc_tau", "--count", "0"], "--count: 0 is below 1"),
        (["digits_fedskc_tau", "--threads", "0"], "--threads: 0 is below 1"),
        (["digits_fedskc_tau", "--seed", "-1"], "--seed: -1 is below 0"),
        (["random.yaml"], "--count: method random needs a number of trials. Give --count N, or run_cap: N"),
        (["list.yaml"], "list.yaml needs lines `key: value`, it holds list"),
        (["broken.yaml"], "broken.yaml is no readable YAML: line "),
        (["lost.yaml"], "--config: lost_config.yaml is neither a file here nor a shipped config"),
    ],
)
def test_a_bad_command_is_refused_in_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("random.yaml").write_text(yaml.safe_dump(content("random", NUMBERS)))
    Path("list.yaml").write_text("[1]")
    Path("broken.yaml").write_text("{")
    lost = content(command=["${program}", "fit", "--config", "lost_config.yaml", "${args}"])
    Path("lost.yaml").write_text(yaml.safe_dump(lost))
    outcome = run("sweep", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"fl-lightning: error: {message}")
    assert outcome.err.count("\n") == 1


def test_a_shipped_sweep_goes_by_its_bare_name_and_a_file_here_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = sweep_path("fedskc_tau.yaml")
    assert shipped == sweep_path("fedskc_tau") != Path("fedskc_tau.yaml")
    assert shipped.read_text() == (SWEEPS[0].parent / "fedskc_tau.yaml").read_text()
    Path("fedskc_tau.yaml").write_text("{}")
    assert sweep_path("fedskc_tau.yaml") == Path("fedskc_tau.yaml")


# --- Which points come next ---


@pytest.mark.thorough
def test_bayes_finds_the_optimum_and_goes_on_near_it(tmp_path, monkeypatch):
    values = {}
    for method in ("random", "bayes"):
        fake = Fake(parabola)
        results = faked(monkeypatch, tmp_path / method, parsed(method, NUMBERS), fake, count=30, seed=4)
        assert len(fake.ran) == len({tuple(one.settings.values()) for one in results}) == 30
        assert [one.value for one in results] == [parabola(numbers(words))[0] for words in fake.ran]
        assert rank_settings(results, True)[0].results[0].value == max(one.value for one in results)
        values[method] = [one.value for one in results]
    assert max(values["bayes"]) > 0.995
    assert mean(values["bayes"][20:]) > mean(values["random"][20:]) + 0.15
    assert mean(values["bayes"][20:]) > mean(values["bayes"][:10]) + 0.15


@pytest.mark.thorough
def test_bayes_minimizes_where_that_is_the_goal(tmp_path, monkeypatch):
    metric = {"name": "global/acc", "goal": "minimize"}
    with pytest.warns(UserWarning, match="takes the worst global/acc"):
        sweep = parsed("bayes", {"x": NUMBERS["x"]}, metric=metric)
    results = faked(monkeypatch, tmp_path, sweep, Fake(lambda v: [(v["x"] - 0.3) ** 2]), count=20)
    assert abs(float(rank_settings(results, sweep.maximize)[0].settings["x"]) - 0.3) < 0.05
    assert sweep.maximize is False
    assert parsed(metric={"name": "loss"}).maximize is False  # W&B's default


@pytest.mark.thorough
def test_random_points_depend_on_the_seed_alone(tmp_path, monkeypatch):
    sweep = parsed("random", NUMBERS)
    one, same, other = (
        faked(monkeypatch, tmp_path / str(k), sweep, Fake(figure), count=4, seed=seed)
        for k, (seed, figure) in enumerate([(3, parabola), (3, lambda _: [0.0]), (4, parabola)])
    )
    assert [r.settings for r in one] == [r.settings for r in same]
    assert not {r.settings["x"] for r in one} & {r.settings["x"] for r in other}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("count", "cap", "most"), [(None, None, 18), (4, None, 4), (None, 5, 5), (6, 5, 5), (50, None, 18)]
)
def test_there_are_as_many_points_as_asked_for(count, cap, most, tmp_path, monkeypatch):
    grid = {key: value for key, value in GRID.items() if key != "c"} | {"a": {"values": [1, 2, 3]}}
    fake = Fake(lambda values: [values["b"]])
    sweep = parsed(parameters=grid, **({} if cap is None else {"run_cap": cap}))
    results = faked(monkeypatch, tmp_path, sweep, fake, count=count)
    assert fake.ran == [sweep.command(drawn) for drawn in sweep.grid()[:most]]
    assert [one.number for one in results] == list(range(most))


def test_a_count_may_grow(tmp_path, monkeypatch):
    sweep, fake = parsed("random", NUMBERS), Fake(parabola)
    few = faked(monkeypatch, tmp_path, sweep, fake, count=3)
    many = faked(monkeypatch, tmp_path, sweep, fake, count=5)
    assert plain(many[:3]) == plain(few)
    assert len(many) == len(fake.ran) == 5


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", ["grid", "random", "bayes"])
def test_a_kill_at_any_moment_loses_no_point_and_repeats_none(method, tmp_path, monkeypatch):
    """Around every run: after the point was drawn, and after it ended but before that was noted."""
    parameters = {"x": {"values": [0.1, 0.2, 0.4]}, "lr": {"values": [0.1, 0.01]}} if method == "grid" else NUMBERS
    monkeypatch.setattr(sweeps, "TPESampler", partial(TPESampler, n_startup_trials=2))
    sweep, count = parsed(method, parameters), 5
    whole = faked(monkeypatch, tmp_path / "whole", sweep, Fake(parabola), count=count)
    for kill in (1, 4, 7, 2 * count):
        folder = tmp_path / str(kill)
        killed = Fake(parabola, kill)
        with pytest.raises(Killed):
            faked(monkeypatch, folder, sweep, killed, count=count)
        rest = Fake(parabola)
        results = faked(monkeypatch, folder, sweep, rest, count=count)
        assert plain(results) == plain(whole)
        assert len(killed.ran) + len(rest.ran) == count
        assert len(list((folder / "points").iterdir())) == count


# --- What comes of points ---


def test_a_failed_point_keeps_its_reason_and_is_tried_again_when_that_is_removed(tmp_path, monkeypatch):
    sweep = parsed(parameters={"x": {"values": [1, 2, 3]}})
    failing = Fake(lambda v: "diverged [/bold]" if v["x"] == 2 else [v["x"]])
    results = faked(monkeypatch, tmp_path, sweep, failing)
    assert [(one.state, one.value, one.reason) for one in results] == [
        ("complete", 1.0, ""),
        ("failed", None, "diverged [/bold]"),
        ("complete", 3.0, ""),
    ]
    mended = Fake(lambda v: [9.0])
    assert plain(faked(monkeypatch, tmp_path, sweep, mended)) == plain(results)
    assert mended.ran == []
    (results[1].folder / FAILED).unlink()
    again = faked(monkeypatch, tmp_path, sweep, mended)
    assert [(one.state, one.value, one.reason) for one in again] == [
        ("complete", 1.0, ""),
        ("complete", 9.0, ""),
        ("complete", 3.0, ""),
    ]
    assert [one.folder for one in again] == [one.folder for one in results]
    assert len(mended.ran) == 1


@pytest.mark.parametrize("code", [2, -9])
def test_bad_input_ends_the_sweep_only_at_its_first_point_and_both_are_tried_again(code, tmp_path, monkeypatch):
    sweep, bad = parsed(parameters={"x": {"values": [1, 2, 3]}}), {1}

    def fake(points, *rest):
        for point in points:
            if numbers(point.words)["x"] in bad:
                yield JobResult(point, code, "x: there is none")
            else:
                yield from Fake(lambda v: [v["x"]])([point], *rest)

    if code == 2:
        with pytest.raises(ConfigError, match=r"^x: there is none$"):
            faked(monkeypatch, tmp_path, sweep, fake)
    else:
        states = [one.state for one in faked(monkeypatch, tmp_path, sweep, fake)]
        assert states == ["unfinished", "complete", "complete"]
    bad.clear()
    bad.add(2)
    results = faked(monkeypatch, tmp_path, sweep, fake)
    expected = [("complete", ""), ("unfinished", "x: there is none"), ("complete", "")]
    assert [(one.state, one.reason) for one in results] == (expected if code == 2 else [("complete", "")] * 3)
    bad.clear()
    results = faked(monkeypatch, tmp_path, sweep, fake)
    assert [(one.state, one.value) for one in results] == [("complete", 1.0), ("complete", 2.0), ("complete", 3.0)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("metric", "figures", "value", "reason"),
    [
        ("global/acc", [0.1, 0.4, 0.3], 0.3, ""),
        ("global/acc_best", [0.1, 0.4, 0.3], 0.4, ""),
        ("global/acc", [0.1, math.nan], None, "global/acc is nan"),
        ("global/acc", [0.1, math.inf], None, "global/acc is inf"),
    ],
)
def test_the_metric_is_the_last_rounds_or_the_whole_runs(metric, figures, value, reason, tmp_path, monkeypatch):
    sweep = parsed(parameters={"x": {"value": 1}}, metric={"name": metric, "goal": "maximize"})
    (result,) = faked(monkeypatch, tmp_path, sweep, Fake(lambda _: figures, **{"global/acc_best": 0.4}))
    assert (result.value, result.reason, result.rounds) == (value, reason, len(figures))
    assert result.state == ("failed" if reason else "complete")


def test_an_accuracy_that_is_never_reached_is_a_failure_and_not_a_zero(tmp_path, monkeypatch):
    sweep = parsed(parameters={"x": {"value": 1}}, metric={"name": "R_0.9", "goal": "minimize"})
    (result,) = faked(monkeypatch, tmp_path, sweep, Fake(lambda _: [0.1], **{"R_0.9": None}))
    assert (result.state, result.reason) == ("failed", "R_0.9 is never reached")


@pytest.mark.parametrize(
    ("metric", "goal", "better"),
    [
        ("global/acc", "minimize", "maximize"),
        ("client/acc_mean_best", "minimize", "maximize"),
        ("client/f1_score_weighted_last", "minimize", "maximize"),
        ("global/mean_absolute_error", "maximize", "minimize"),
        ("client/loss_mean", "maximize", "minimize"),
        ("R_0.9", "maximize", "minimize"),
    ],
)
def test_a_goal_that_takes_the_worst_for_the_best_is_warned_of(metric, goal, better):
    line = f"metric: goal {goal} takes the worst {metric} as the best. Set goal: {better}."
    with pytest.warns(UserWarning, match=line):
        assert parsed(metric={"name": metric, "goal": goal}).maximize is (goal == "maximize")
    assert parsed(metric={"name": metric, "goal": better}).maximize is (better == "maximize")


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("metric", "method", "parameters", "refused"),
    [
        (
            "global/acc",
            "grid",
            {"algorithm": {"value": "Local"}},
            "global/acc with algorithm Local. Use client/acc_mean.",
        ),
        (
            "global/acc_best",
            "grid",
            {"algorithm": {"values": ["FedAvg", "FedPer"]}},
            "with algorithm FedPer. Use client/",
        ),
        (
            "global/acc",
            "random",
            {"algorithm": {"values": ["FedAvg", "Local"]}},
            "with algorithm Local. Use client/acc",
        ),
        ("global/ac", "random", {"optimizer.lr": {"min": 0.1, "max": 0.2}}, "no round has global/ac. Use global/acc."),
        (
            "client/f1_score_mean",
            "grid",
            {"seed": {"values": [0, 1]}},
            "no round has client/f1_score_mean. Use client/",
        ),
    ],
)
def test_a_metric_that_a_method_never_has_is_refused_before_the_first_run(
    metric, method, parameters, refused, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    command = ["${program}", "fit", "--config", "tiny.yaml", "${args}"]
    goal = {"name": metric, "goal": "maximize"}
    Path("some.yaml").write_text(yaml.safe_dump(content(method, parameters, command=command, metric=goal, run_cap=2)))
    outcome = run("sweep", "some.yaml")
    assert outcome.code == 2
    assert outcome.err.startswith("fl-lightning: error: metric: no round has ")
    assert refused in outcome.err
    assert outcome.err.count("\n") == 1
    assert not Path("runs").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("metric", ["client/acc_mean", "client/acc_mean_best", "R_0.5", "client/train_loss"])
def test_a_metric_that_every_point_has_is_let_by(metric):
    goal = "minimize" if metric in ("R_0.5", "client/train_loss") else "maximize"
    parameters = {"algorithm": {"values": ["FedAvg", "Local"]}, "rounds": {"value": 1}}
    check_metric(parsed("grid", parameters, metric={"name": metric, "goal": goal}))


def test_a_metric_that_there_is_not_ends_the_sweep_at_its_first_point(tmp_path, monkeypatch):
    sweep = parsed(parameters={"x": {"values": [1, 2]}}, metric={"name": "global/ac", "goal": "maximize"})
    message = "metric: global/ac not found in this run. Use one of global/acc, round, rounds"
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^{message}$"):
            faked(monkeypatch, tmp_path, sweep, fake := Fake(lambda _: [0.1]))
        assert len(fake.ran) <= 1


def test_a_metric_that_one_point_lacks_is_its_failure(tmp_path, monkeypatch):
    sweep = parsed(parameters={"x": {"values": [1, 2]}})
    fake = Fake(lambda v: [0.1])

    def lacking(points, *rest):
        for outcome in fake(points, *rest):
            if numbers(outcome.job.words)["x"] == 2:
                path = outcome.job.folder / "metrics.csv"
                path.write_text(path.read_text().replace("global/acc", "client/acc_mean"))
            yield outcome

    results = faked(monkeypatch, tmp_path, sweep, lacking)
    assert [one.state for one in results] == ["complete", "failed"]
    assert results[1].reason.startswith("metric: global/acc not found in this run. Use one of client/acc_mean")


# --- Ending early ---


def curve(values):
    """A curve of its own for each x, of nine rounds."""
    rng = np.random.default_rng(int(values["x"]))
    return (np.cumsum(rng.random(9)) / 9).tolist()


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:metric. goal minimize takes the worst")
@pytest.mark.parametrize(
    ("goal", "early", "options", "last"),
    [
        ("maximize", {"min_iter": 1}, {"min_resource": 1, "reduction_factor": 3}, 9),
        ("minimize", {"min_iter": 2, "eta": 2}, {"min_resource": 2, "reduction_factor": 2}, 9),
        ("minimize", {"max_iter": 9, "s": 1, "strict": True}, {"min_resource": 3, "reduction_factor": 3}, 9),
        ("maximize", {"max_iter": 9, "s": 9, "eta": 2}, {"min_resource": 1, "reduction_factor": 2}, 9),
        ("maximize", {"max_iter": 6, "s": 1, "eta": 2, "min_iter": 1}, {"min_resource": 3, "reduction_factor": 2}, 6),
    ],
)
def test_points_are_ended_early_where_optuna_itself_would(goal, early, options, last, tmp_path, monkeypatch):
    more = {"early_terminate": {"type": "hyperband", **early}, "metric": {"name": "global/acc", "goal": goal}}
    sweep = parsed(parameters={"x": {"values": list(range(8))}}, **more)
    shown, real = [], RDBStorage.set_trial_intermediate_value
    record = lambda storage, *told: (shown.append(told[:2]), real(storage, *told))  # noqa: E731
    monkeypatch.setattr(RDBStorage, "set_trial_intermediate_value", record)
    results = faked(monkeypatch, tmp_path, sweep, Fake(curve))
    assert len(shown) == len(set(shown)) > 8  # each round once

    reference = optuna.create_study(direction=goal, pruner=optuna.pruners.SuccessiveHalvingPruner(**options))
    expected = []
    for x in range(8):
        trial = reference.ask()
        for number, value in enumerate(values := curve({"x": x}), 1):
            trial.report(value, number)
            if number < last and trial.should_prune():  # there is nothing to be saved after the last round
                reference.tell(trial, state=optuna.trial.TrialState.PRUNED)
                expected.append(("ended early", number, value))
                break
        else:
            reference.tell(trial, values[-1])
            expected.append(("complete", 9, values[-1]))
    assert [(one.state, one.rounds, one.value) for one in results] == expected
    assert {state for state, _, _ in expected} == {"complete", "ended early"}


@pytest.mark.thorough
def test_ended_points_stay_ended_and_a_kill_forgets_no_round(tmp_path, monkeypatch):
    sweep = parsed(parameters={"x": {"values": list(range(5))}}, early_terminate={"type": "hyperband", "min_iter": 2})
    whole = faked(monkeypatch, tmp_path / "whole", sweep, Fake(curve))
    moments = Fake(curve)
    faked(monkeypatch, tmp_path / "count", sweep, moments)
    for kill in range(1, moments.moment + 1, 3):
        with pytest.raises(Killed):
            faked(monkeypatch, tmp_path / str(kill), sweep, Fake(curve, kill))
        assert plain(faked(monkeypatch, tmp_path / str(kill), sweep, Fake(curve))) == plain(whole)


def test_rounds_that_nobody_looked_at_count_too(tmp_path, monkeypatch):
    """A run may end between two looks: those after it are compared with it all the same."""
    sweep = parsed(parameters={"x": {"values": [1, 2]}}, early_terminate={"type": "hyperband", "min_iter": 1})
    curves = {1: [0.9, 0.9, 0.9], 2: [0.1, 0.1, 0.1]}
    fake = Fake(lambda v: curves[v["x"]])

    def unseen(jobs, program, workers, threads, should_stop):
        yield from fake(
            jobs, program, workers, threads, lambda point: numbers(point.words)["x"] == 2 and should_stop(point)
        )

    results = faked(monkeypatch, tmp_path, sweep, unseen)
    assert [(one.state, one.rounds) for one in results] == [("complete", 3), ("ended early", 1)]


def test_ending_early_needs_a_metric_by_round(tmp_path, monkeypatch):
    metric = {"name": "global/acc_best", "goal": "maximize"}
    more = {"early_terminate": {"type": "hyperband", "min_iter": 2}, "metric": metric}
    message = r"metric: global/acc_best not found by round, which early_terminate needs. Use one of global/acc, round"
    fake = Fake(curve, **{"global/acc_best": 0.4})
    with pytest.raises(ConfigError, match=f"^{message}$"):
        faked(monkeypatch, tmp_path, parsed(parameters={"x": {"value": 1}}, **more), fake)


# --- What it ends with ---


def result(number, value, state="complete", **settings):
    words = {key: str(word) for key, word in settings.items()}
    return TrialResult(number, Path(f"points/{number}"), words, state, value, 3, "" if state == "complete" else "why")


def test_settings_are_ranked_by_their_seeds_mean_and_whole_ones_first():
    results = [
        result(0, 0.5, a=1, seed=0),
        result(1, 0.7, a=1, seed=1),
        result(2, 0.9, a=2, seed=0),
        result(3, None, "failed", a=2, seed=1),
        result(4, None, "failed", a=3, seed=0),
        result(5, 0.95, "ended early", a=3, seed=1),
        result(6, 0.61, a=4, seed=0),
        result(7, 0.62, a=4, seed=1),
    ]
    for maximize, order in ((True, ["4", "1", "2", "3"]), (False, ["1", "4", "2", "3"])):
        groups = rank_settings(results, maximize)
        assert [group.settings for group in groups] == [{"a": a} for a in order]
    assert rank_settings(results, True)[1].values == [0.5, 0.7]


# --- The command ---


def write_sweep(folder, parameters, *words, **more):
    """A tiny sweep's file and config."""
    (folder / "tiny.yaml").write_text(TINY)
    command = ["${program}", "fit", "--config", str(folder / "tiny.yaml"), "--rounds", 2, *words, "${args}"]
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content(parameters=parameters, command=command, **more)))
    return path


def told(folder):
    """A sweep's trials.csv, less the folders' random names."""
    with (folder / "trials.csv").open(newline="") as file:
        return [{key: text for key, text in row.items() if key != "folder"} for row in csv.DictReader(file)]


def test_a_sweeps_table_and_files_are_those_of_its_runs(tmp_path, monkeypatch):
    """Each point is what `fit` makes of it; one that diverges is told with its reason, and the rest carried on."""
    monkeypatch.chdir(tmp_path)
    parameters = {"optimizer.lr": {"values": [1e30, 0.5, 1e-5]}, "seed": {"values": [0, 1]}}
    file = write_sweep(tmp_path, parameters)
    outcome = run("sweep", file, "--workers", "2", "--threads", "1")
    assert (outcome.code, outcome.err) == (0, "")
    accs = {}
    for lr, seed in product(["0.5", "1e-05"], ["0", "1"]):
        alone = tmp_path / f"alone-{lr}-{seed}"
        tiny(alone, "--rounds=2", f"--optimizer.lr={lr}", f"--seed={seed}")
        accs[lr, seed] = summary(alone)["global/acc_last"]
    lines = told(folder := Path("runs/sweeps/small"))
    failure = "client 0, round 1: loss term 'ce' is NaN or Inf: lower the learning rate or the term's coefficient"
    assert [(line["optimizer.lr"], line["seed"]) for line in lines] == list(
        product(["1e+30", "0.5", "1e-05"], ["0", "1"])
    )
    for line in lines[2:]:
        assert float(line["global/acc"]) == accs[line["optimizer.lr"], line["seed"]]
        assert (line["state"], line["rounds"], line["reason"]) == ("complete", "2", "")
    assert [(line["state"], line["rounds"]) for line in lines[:2]] == [("failed", "0")] * 2
    assert lines[0]["reason"] == failure

    means = {lr: [accs[lr, seed] for seed in "01"] for lr in ("0.5", "1e-05")}
    best = max(means, key=lambda lr: mean(means[lr]))
    printed = table(outcome.out)
    order = [lr for lr in printed if lr in (*means, "1e+30")]
    assert order == [*sorted(means, key=lambda lr: -mean(means[lr])), "1e+30"]
    for lr, values in means.items():
        assert printed[lr][:2] == [f"{mean(values):.4f} ± {stdev(values):.4f}", "2 of 2"]
    assert printed["1e+30"][:2] == ["", "0 of 2"]
    assert re.search(rf"^trial \d of 6, optimizer.lr=0.5 seed=1: {accs['0.5', '1']:.4f}$", outcome.out, re.M)
    assert f"trial 1 of 6, optimizer.lr=1e+30 seed=0: failed: {failure}\n" in outcome.out

    text = (folder / "best.yaml").read_text()
    assert text.startswith(f"# The best of the sweep small: optimizer.lr={best} seed=0.\n")
    again = run("fit", "--config", folder / "best.yaml", "--run_dir", tmp_path / "best")
    assert again.code == 0, again.err
    assert summary(tmp_path / "best")["global/acc_last"] == accs[best, "0"]

    before = contents(folder / "points")
    repeated = run("sweep", file, "--workers", "2", "--threads", "1")
    assert table_of(repeated) == table_of(outcome)
    assert "trial 1 of" not in repeated.out  # it is not done again
    assert contents(folder / "points") == before

    changed = yaml.safe_load(file.read_text())
    changed["parameters"]["optimizer.lr"]["values"].pop()
    file.write_text(yaml.safe_dump(changed))
    refused = run("sweep", file, "--set", "rounds=3")
    assert refused.code == 2
    assert "runs/sweeps/small holds another sweep: command (fit --config" in refused.err
    assert "--rounds 2 -> fit" in refused.err
    assert "parameters.optimizer.lr.values ([1e+30, 0.5, 1e-05] -> [1e+30, 0.5])" in refused.err
    assert refused.err.endswith(". Undo the change, or give another --out\n")
    assert contents(folder / "points") == before


@pytest.mark.thorough
def test_a_sweep_whose_points_all_fail_ends_with_exit_code_1(tmp_path, monkeypatch):
    fake = Fake(lambda _: "diverged")
    monkeypatch.setattr(sweeps, "run_jobs", fake)
    outcome = run("sweep", "digits_fedskc_tau", "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "best" not in outcome.out
    assert not (tmp_path / "out/best.yaml").exists()
    assert len(told(tmp_path / "out")) == len(fake.ran) == 12


def test_a_mistake_may_be_mended_until_a_point_has_begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_sweep(tmp_path, {"x": {"values": [1]}})
    seen = []

    def refusing(points, *_):
        for point in points:
            seen.append(point.words[-1])
            yield JobResult(point, 2, "no")

    monkeypatch.setattr(sweeps, "run_jobs", refusing)
    assert run("sweep", file).err == "fl-lightning: error: no\n"
    file.write_text(file.read_text().replace("x:", "y:"))
    assert run("sweep", file).err == "fl-lightning: error: no\n"
    assert seen == ["--x=1", "--y=1"]
    monkeypatch.setattr(sweeps, "run_jobs", Fake(lambda _: [0.5]))
    assert run("sweep", file).code == 0
    assert run("sweep", file, "--count", "1").code == 0
    (tmp_path / "tiny.yaml").write_text(TINY.replace("rounds: 3", "rounds: 4"))
    refused = run("sweep", file, "--seed", "2")
    assert f"configs.{tmp_path}/tiny.yaml.rounds (3 -> 4); seed (0 -> 2). Undo the change" in refused.err
    file.write_text(file.read_text() + "name: another\nrun_cap: 1\ndescription: told\n")
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert run("sweep", file).code == 0


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """A folder with a finished sweep of three points that random numbers made."""
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path, {"x": {"min": 0.0, "max": 1.0}}, method="random")
    monkeypatch.setattr(sweeps, "run_jobs", Fake(lambda values: [values["x"]]))
    assert run("sweep", "small.yaml", "--count", "3").code == 0
    return tmp_path / "runs/sweeps/small"


def set_to_sql(statement):
    def change(path):
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.execute(statement)

    return change


DAMAGE = {
    "no database": lambda path: path.write_bytes(b"text\n" * 1000),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "page lost": lambda path: path.write_bytes((old := path.read_bytes())[:4096] + bytes(8192) + old[12288:]),
    "no study": set_to_sql("UPDATE studies SET study_name = 'other'"),
    "no folder": set_to_sql("DELETE FROM trial_user_attributes WHERE key = 'folder'"),
    "no point": set_to_sql("DELETE FROM trial_user_attributes WHERE key = 'point'"),
    "not JSON": set_to_sql("UPDATE trial_user_attributes SET value_json = '{'"),
    "no parameters": set_to_sql("DELETE FROM trial_params"),
    "no table": set_to_sql("DROP TABLE trial_values"),
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_study_is_named_and_left_as_it_is(damage, swept):
    DAMAGE[damage](swept / "study.db")
    before = contents(swept)
    outcome = run("sweep", "small.yaml", "--count", "3")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith("fl-lightning: error: runs/sweeps/small/study.db: damaged (")
    assert "). Restore it from a backup, or choose another folder with --out." in outcome.err
    assert "http" not in outcome.err
    assert {name: bytes for name, bytes in contents(swept).items() if name != ".owner"} == {
        name: bytes for name, bytes in before.items() if name != ".owner"
    }


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("left", ["study.db", "points"])
def test_a_sweep_that_lost_its_sweep_yaml_is_not_begun_anew(left, swept):
    (swept / "sweep.yaml").unlink()
    shutil.rmtree(swept / "points") if left == "study.db" else (swept / "study.db").unlink()
    before = contents(swept)
    outcome = run("sweep", "small.yaml", "--count", "3")
    assert outcome.code == 2
    message = f"runs/sweeps/small: sweep.yaml not found, but {left} of a sweep. Put it back, or choose another folder"
    assert outcome.err == f"fl-lightning: error: {message} with --out.\n"
    assert contents(swept).keys() == before.keys()


def test_a_study_that_lost_its_points_is_not_deleted_for_another_sweep(swept):
    shutil.rmtree(swept / "points")
    database = (swept / "study.db").read_bytes()
    outcome = run("sweep", "small.yaml", "--count", "3", "--seed", "7")
    assert (outcome.code, outcome.err.count("holds another sweep: seed (0 -> 7). Undo the change")) == (2, 1)
    assert (swept / "study.db").read_bytes() == database


def test_a_lost_study_is_named_where_points_are_left(swept):
    (swept / "study.db").unlink()
    before = contents(swept).keys()
    outcome = run("sweep", "small.yaml", "--count", "3")
    assert outcome.code == 2
    message = "runs/sweeps/small: study.db not found, but points of a sweep. Put it back, or choose another folder"
    assert outcome.err == f"fl-lightning: error: {message} with --out.\n"
    assert contents(swept).keys() == before


# --- A full disk ---


@pytest.mark.thorough
def test_a_study_without_room_ends_the_sweep_and_is_gone_on_with(swept, monkeypatch):
    """SQLite says that the disk is full where its file may not grow."""
    usual = sweeps.storage_at

    def full(path):
        storage = usual(path)
        with storage.engine.connect() as connection:
            pages = connection.exec_driver_sql("PRAGMA page_count").scalar()

        @sqlalchemy.event.listens_for(storage.engine, "checkout")
        def limit(connection, *_):
            connection.execute(f"PRAGMA max_page_count={pages + 1}")

        return storage

    with monkeypatch.context() as patch:
        patch.setattr(sweeps, "storage_at", full)
        outcome = run("sweep", "small.yaml", "--count", "60")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    reason = (
        "runs/sweeps/small/study.db: database or disk is full. Once that is fixed, the same command goes on from here."
    )
    assert outcome.err == f"fl-lightning: error: {reason}\n"
    assert run("sweep", "small.yaml", "--count", "60").code == 0
    assert [line["state"] for line in told(swept)] == ["complete"] * 60


@pytest.mark.thorough
def test_two_sweeps_over_one_folder_are_refused(tmp_path, monkeypatch):
    def meddled(points, *_):
        second = run("sweep", "digits_fedskc_tau", "--out", tmp_path / "out")
        assert (second.code, second.out) == (2, "")
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        message = f"{tmp_path}/out: {holder} uses this folder. Wait for it, or stop it."
        assert second.err == f"fl-lightning: error: {message}\n"
        yield from Fake(lambda v: [v["algorithm.tau"]])(points, None, 1, None, None)

    monkeypatch.setattr(sweeps, "run_jobs", meddled)
    assert run("sweep", "digits_fedskc_tau", "--out", tmp_path / "out").code == 0


# --- Killed ---


def kill_sweep(words, folder, delay, whole_group):
    """Kill a sweep, or its process alone, a while after its first round; False if it had ended by then."""
    command = [sys.executable, "-m", "fl_lightning", "sweep", *map(str, words), "--out", str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not any(folder.glob("points/*/config.yaml")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    time.sleep(delay)
    os.killpg(process.pid, signal.SIGKILL) if whole_group else process.kill()
    process.communicate(timeout=60)
    return process.returncode == -signal.SIGKILL


def same_end(folder, whole):
    assert told(folder) == told(whole)
    assert (folder / "best.yaml").read_text() == (whole / "best.yaml").read_text()


def table_of(outcome):
    return outcome.out[outcome.out.index("┏") :].partition("sweep: ")[0]


@pytest.mark.thorough
def test_a_killed_sweep_goes_on_to_the_same_end(tmp_path):
    file = write_sweep(tmp_path, {"algorithm.tau": {"values": [0.05, 0.2]}, "seed": {"values": [0, 1]}})
    words = [file, "--workers", "2", "--threads", "1"]
    whole = run("sweep", *words, "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    assert kill_sweep(words, tmp_path / "killed", 0.3, whole_group=False)
    rest = run("sweep", *words, "--out", tmp_path / "killed")
    assert rest.code == 0, rest.err
    assert table_of(rest) == table_of(whole)
    same_end(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("whole_group", [False, True])
def test_a_sweep_over_tau_killed_at_three_random_moments_ends_the_same(whole_group, tmp_path):
    words = ["digits_fedskc_tau", "--workers", "2", "--threads", "1", "--set", "logger=null"]
    began = time.monotonic()
    whole = run("sweep", *words, "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    lasted, chance = time.monotonic() - began, random.Random(3)
    for _ in range(3):
        assert kill_sweep(words, tmp_path / "killed", chance.uniform(0, lasted / 4), whole_group)
    rest = run("sweep", *words, "--out", tmp_path / "killed")
    assert rest.code == 0, rest.err
    assert table_of(rest) == table_of(whole)
    same_end(tmp_path / "killed", tmp_path / "whole")
    assert len(list((tmp_path / "killed/points").iterdir())) == 12
