"""`fl-lightning sweep`: the trials of a sweep file, their results, and sweeps that were killed."""

import csv
import gc
import json
import math
import os
import resource
import signal
import socket
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
import yaml
from commands import TINY, contents, run, summary, table, tiny
from fake_runs import FakeRuns, Killed, numbers
from optuna.samplers import TPESampler
from optuna.storages import InMemoryStorage, RDBStorage
from scipy import stats

from fl_lightning.analysis.study import search
from fl_lightning.analysis.study.executor import FAILED, JobResult
from fl_lightning.analysis.study.search import Budget, Search, run_sweep
from fl_lightning.analysis.study.sweep_file import parse_sweep
from fl_lightning.analysis.study.sweep_results import TrialResult, rank_settings
from fl_lightning.cli.commands import sweep as sweep_command
from fl_lightning.cli.sweep_metric import check_metric
from fl_lightning.core.config import read_config
from fl_lightning.core.errors import ConfigError

GRID = {"a": {"values": [1, 0.5, "x y"]}, "seed": {"values": [0, 1]}, "b": {"min": 2, "max": 4}, "c": {"value": True}}
NUMBERS = {"x": {"min": 0.0, "max": 1.0}, "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1.0}}


CONFIG_OF = sweep_command.config_of


@pytest.fixture(autouse=True)
def quick_and_quiet(monkeypatch):
    """Silence Optuna, do not wait for the disk, and neither check the metric nor resolve the best trial's config."""
    before = optuna.logging.get_verbosity()

    def open_storage(url):
        storage = RDBStorage(url)
        with storage.engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA synchronous=OFF")
        return storage

    monkeypatch.setattr(search, "RDBStorage", open_storage)
    monkeypatch.setattr(sweep_command, "check_metric", lambda sweep: None)
    monkeypatch.setattr(sweep_command, "config_of", lambda words: {"words": list(words)})
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


def run_faked(folder, sweep, fake, count=None, seed=0, **options):
    """Return a sweep's results with fake runs."""
    return run_sweep(sweep, folder, fake, seed, Budget(count), **options)


def without_folders(results):
    """Return results without their folders, whose names are random."""
    return [(one.number, dict(one.settings), one.state, one.value, one.rounds, one.reason) for one in results]


def parabola(values):
    """Return a metric whose best value, 1, is at x = 0.3 and lr = 0.01."""
    return [1 - (values["x"] - 0.3) ** 2 - (math.log10(values["lr"]) + 2) ** 2 / 16]


# --- Parameters ---


def test_a_grid_is_the_product_of_its_values():
    sweep = parsed()
    expected = [
        ("--config", "digits_fedskc.yaml", f"--a={a}", f"--seed={seed}", f"--b={b}", "--c=true")
        for a, seed, b in product(["1", "0.5", "x y"], [0, 1], [2, 3, 4])
    ]
    assert [sweep.command(drawn) for drawn in sweep.grid()] == expected


def test_a_value_that_is_listed_twice_counts_once():
    sweep = parsed(parameters={"a": {"values": [1, 2, 1, "2"]}, "b": {"values": [[1, 2], {"k": None}, [1, 2]]}})
    words = [sweep.command(drawn)[2:] for drawn in sweep.grid()]
    assert words == [(a, b) for a in ("--a=1", "--a=2") for b in ("--b=[1, 2]", '--b={"k": null}')]


def test_settings_and_environment_variables_are_in_the_command_line(monkeypatch):
    monkeypatch.setenv("FL_X", "a b")
    command = ["fl-lightning", "fit", "--config", "${envvar:FL_X}.yaml", "--logger.offline=false", "--rounds", 4]
    sweep = parsed(
        command=[*command, "${args}", "--seed", 3], parameters={"k": {"value": 1e-5}}, settings=["rounds=2", "a=b=c"]
    )
    assert sweep.command({"k": 1e-05}) == (
        *("--config", "a b.yaml", "--logger.offline=true", "--rounds", "4", "--rounds=2", "--a=b=c"),
        *("--k=1e-05", "--seed", "3"),
    )


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("values", "stored"),
    [
        ([0, 0.5, "1e-3"], [0.0, 0.5, 0.001]),
        ([1, 10], [1, 10]),
        ([True, "FedAvg", 2], [True, "FedAvg", 2]),
        ([[1, 2], {"k": None}, 3], ["[1, 2]", '{"k": null}', "3"]),  # Optuna's databases have no lists
        ([1, True], ["1", "true"]),  # equal to Optuna
    ],
)
def test_optuna_stores_listed_values_with_their_types(values, stored, tmp_path):
    sweep = parsed(parameters={"k": {"values": values}})
    run_faked(tmp_path, sweep, fake := FakeRuns(lambda _: [0.5]))
    assert [words[-1] for words in fake.ran] == [f"--k={sweeps_word(value)}" for value in values]
    found = [trial.params["k"] for trial in study_of(tmp_path).trials]
    assert found == stored
    assert [type(value) for value in found] == [type(value) for value in stored]


def sweeps_word(value):
    return value if isinstance(value, str) else json.dumps(value)


def study_of(folder):
    return optuna.load_study(study_name="sweep", storage=f"sqlite:///{folder / 'study.db'}")


def test_optuna_stores_the_numbers_of_the_runs(tmp_path):
    parameters = {"q": {"distribution": "q_uniform", "min": 0.1, "max": 0.9, "q": 0.2}, "n": {"min": 1, "max": 9}}
    run_faked(tmp_path, parsed("random", parameters), fake := FakeRuns(lambda _: [0.5]), count=4)
    params = [trial.params for trial in study_of(tmp_path).trials]
    assert params == [numbers(words) for words in fake.ran]
    assert {type(each["n"]) for each in params} == {int}
    assert study_of(tmp_path).metric_names == ["global/acc"]


def continuous(name, low, high):
    """Return one of W&B's continuous distributions, by its definition."""
    if name == "uniform":
        return stats.uniform(low, high - low)
    return stats.loguniform(low, high) if name == "log_uniform_values" else stats.loguniform(*np.exp([low, high]))


@pytest.mark.parametrize(
    ("name", "low", "high"), [("uniform", -1, 3), ("log_uniform_values", 1e-5, 1.0), ("log_uniform", -3, 2)]
)
def test_random_numbers_follow_the_distribution(tmp_path, name, low, high):
    drawn = draw_values(tmp_path, {"distribution": name, "min": low, "max": high})
    expected = continuous(name, low, high)
    assert expected.support()[0] <= min(drawn)
    assert max(drawn) <= expected.support()[1]
    assert stats.kstest(drawn, expected.cdf).pvalue > 1e-3
    other = "log_uniform_values" if name == "uniform" else "uniform"
    assert stats.kstest(drawn, continuous(other, abs(low) if name == "uniform" else low, high).cdf).pvalue < 1e-6


def draw_values(folder, description, count=200):
    """Return random values of one description, each drawn for a parameter of its own."""
    sweep = parsed("random", {f"k{number}": description for number in range(count)})
    (job,) = Search(sweep, folder, seed=5).jobs(1)
    drawn = [word.partition("=")[2] for word in job.words if word.startswith("--k")]
    return [yaml.safe_load(text) for text in drawn] if "values" not in description else drawn


@pytest.mark.parametrize(
    ("description", "values"),
    [
        ({"min": 2, "max": 5}, [2, 3, 4, 5]),
        ({"distribution": "q_uniform", "min": 0.1, "max": 0.5, "q": 0.1}, [0.1, 0.2, 0.3, 0.4, 0.5]),
        ({"distribution": "q_uniform", "min": 0.28, "max": 0.29, "q": 0.01}, [0.28, 0.29]),  # of floats: 28.00..4 q
        ({"distribution": "q_uniform", "min": 0, "max": 3}, [0, 1, 2, 3]),
        ({"distribution": "q_log_uniform_values", "min": 1, "max": 40, "q": 8}, [8, 16, 24, 32, 40]),
        ({"distribution": "q_log_uniform", "min": 0, "max": 1.5, "q": 0.5}, [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0]),
        ({"values": ["a", 2, 0.5]}, ["a", "2", "0.5"]),
    ],
)
def test_discrete_distributions_draw_every_value_and_no_other(tmp_path, description, values):
    drawn = draw_values(tmp_path, description)
    assert sorted(set(drawn), key=str) == sorted(values, key=str)
    assert {type(value) for value in drawn} == {type(value) for value in values}


def test_a_quantized_number_is_the_nearest_multiple_within_the_bounds():
    for log, (low, high, q) in product([False, True], [(1, 100, 8), (0.05, 0.95, 0.1), (7, 9, 3)]):
        description = {"distribution": "q_log_uniform_values" if log else "q_uniform", "min": low, "max": high, "q": q}
        parameter = parsed("random", {"k": description}).parameters["k"]
        inside = [k * q for k in range(1000) if low - 1e-9 <= k * q <= high + 1e-9]
        for x in np.linspace(low, high, 99):
            nearest = min(abs(one - x) for one in inside)
            assert abs(float(parameter.word(x)) - x) == pytest.approx(nearest, abs=1e-9)


# --- Messages ---

BAD = {
    "method: 'girdle' is not one of grid, random, bayes": {"method": "girdle"},
    "unknown key metod. Did you mean method?": {"metod": "grid"},
    "metric: name the metric to optimise": {"metric": None},
    "metric: needs a name, and goal minimize or maximize": {"metric": {"name": "a", "goal": "max"}},
    "run_cap: 0 is not a number of trials": {"run_cap": 0},
    "early_terminate: type 'median' is not supported": {"early_terminate": {"type": "median", "min_iter": 1}},
    "early_terminate: strict: false": {"early_terminate": {"type": "hyperband", "min_iter": 1, "strict": False}},
    "early_terminate: needs min_iter, or max_iter and s": {"early_terminate": {"type": "hyperband", "max_iter": 9}},
    r"early_terminate: eta: 2.5 is not a whole number of at least 2": {
        "early_terminate": {"type": "hyperband", "min_iter": 1, "eta": 2.5}
    },
    "parameters: name at least one key": {"parameters": []},
    "seeds: 3 is not a list of different numbers from 0, such as": {"seeds": 3},
    r"seeds: \[1, 1\] is not a list of different numbers from 0": {"seeds": [1, 1]},
    r"seeds: \[-1\] is not": {"seeds": [-1]},
    "seeds: the parameters, the command or --set have seed, too. Leave one of them out": {"seeds": [0, 1]},
    "parameters: run_dir is set by the sweep": {"parameters": {"run_dir": {"values": ["a"]}}},
}
BAD_COMMANDS = {
    r"only .* can be run here": ["python", "${program}", "${args}"],
    r"\$\{args_json\} is not known": ["${program}", "fit", "${args_json}", "${args}"],
    r"\$\{envvar:FL_NO\} needs the environment's FL_NO": ["${program}", "fit", "${envvar:FL_NO}", "${args}"],
    "--run_dir=x is set by the sweep": ["${program}", "fit", "--run_dir=x", "${args}"],
}
BAD |= {f"command: {message}": {"command": words} for message, words in BAD_COMMANDS.items()}
BAD_PARAMETERS = {
    "needs values, value, or min and max; it is 3": 3,
    "needs values, value, or min and max; it is {'min': 3}": {"min": 3},
    "nested parameters are not supported": {"parameters": {}},
    "probabilities are not supported": {"values": [1], "probabilities": [1]},
    "distribution 'normal' is not supported": {"distribution": "normal"},
    "categorical takes values, not min": {"values": [1], "min": 0},
    "uniform needs max": {"distribution": "uniform", "min": 0},
    r"values: \[\] is not a list": {"values": []},
    "min 2 is above max 1": {"min": 2, "max": 1},
    "min: 'a' is not a number": {"min": "a", "max": 1},
    "min: 0.5 is not a whole number": {"distribution": "int_uniform", "min": 0.5, "max": 1},
    "min 0 is not above 0": {"distribution": "log_uniform_values", "min": 0, "max": 1},
    "q 0 is not above 0": {"distribution": "q_uniform", "min": 0, "max": 1, "q": 0},
    "no multiple of q 5 is between 6 and 9": {"distribution": "q_uniform", "min": 6, "max": 9, "q": 5},
    "a grid needs values": {"min": 0.5, "max": 1},
}
BAD |= {f"parameters: k: {message}": {"parameters": {"k": given}} for message, given in BAD_PARAMETERS.items()}


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("message", BAD)
def test_a_wrong_sweep_file_is_refused_in_one_line(message, tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text(yaml.safe_dump(content() | BAD[message]))
    with pytest.raises(ConfigError, match=f"bad.yaml: {message}") as caught:
        parse_sweep(read_config(path), path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "sweep: nowhere is neither a file here nor a shipped sweep. Available: cwfedavg_lam, digits_"),
        ([], "sweep: no file given. Available: cwfedavg_lam, digits_"),
        (["digits_fedskc_tau", "--set", "rounds"], "--set: 'rounds' is not of the form KEY=VALUE"),
        (["digits_fedskc_tau", "--set", "seed=1"], "--set: seed is a parameter of the sweep. Leave it out"),
        (["digits_fedskc_tau", "--set", "run_dir=a"], "--set: run_dir is set by the sweep"),
        (["digits_fedskc_tau", "--seed", "-1"], "--seed: -1 is below 0"),
        (["random.yaml"], "--count: method random needs a number of trials. Give --count N, or run_cap: N"),
        (["list.yaml"], "list.yaml needs lines `key: value`, it holds list"),
        (["lost.yaml"], "--config: lost_config.yaml is neither a file here nor a shipped config"),
    ],
)
def test_a_bad_command_is_refused_in_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("random.yaml").write_text(yaml.safe_dump(content("random", NUMBERS)))
    Path("list.yaml").write_text("[1]")
    lost = content(command=["${program}", "fit", "--config", "lost_config.yaml", "${args}"])
    Path("lost.yaml").write_text(yaml.safe_dump(lost))
    outcome = run("sweep", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"fl-lightning: error: {message}")
    assert outcome.err.count("\n") == 1


# --- Proposed trials ---


@pytest.mark.thorough
def test_bayes_finds_the_optimum(tmp_path):
    values = {}
    for method in ("random", "bayes"):
        fake = FakeRuns(parabola)
        results = run_faked(tmp_path / method, parsed(method, NUMBERS), fake, count=30, seed=4)
        values[method] = [one.value for one in results]
        assert values[method] == [parabola(numbers(words))[0] for words in fake.ran]
    assert max(values["bayes"]) > 0.995
    assert mean(values["bayes"][20:]) > mean(values["random"][20:]) + 0.15


@pytest.mark.thorough
def test_random_trials_depend_only_on_the_seed(tmp_path):
    sweep = parsed("random", NUMBERS)
    one, same, other = (
        run_faked(tmp_path / str(k), sweep, FakeRuns(figure), count=4, seed=seed)
        for k, (seed, figure) in enumerate([(3, parabola), (3, lambda _: [0.0]), (4, parabola)])
    )
    assert [r.settings for r in one] == [r.settings for r in same]
    assert not {r.settings["x"] for r in one} & {r.settings["x"] for r in other}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("count", "cap", "most"), [(None, None, 18), (4, None, 4), (None, 5, 5), (6, 5, 5), (50, None, 18)]
)
def test_number_of_trials(count, cap, most, tmp_path):
    grid = {key: value for key, value in GRID.items() if key != "c"} | {"a": {"values": [1, 2, 3]}}
    fake = FakeRuns(lambda values: [values["b"]])
    sweep = parsed(parameters=grid, **({} if cap is None else {"run_cap": cap}))
    results = run_faked(tmp_path, sweep, fake, count=count)
    assert fake.ran == [sweep.command(drawn) for drawn in sweep.grid()[:most]]
    assert [one.number for one in results] == list(range(most))


def test_count_may_be_raised(tmp_path):
    sweep, fake = parsed("random", NUMBERS), FakeRuns(parabola)
    before = run_faked(tmp_path, sweep, fake, count=3)
    after = run_faked(tmp_path, sweep, fake, count=5)
    assert without_folders(after[:3]) == without_folders(before)
    assert len(after) == len(fake.ran) == 5


@pytest.mark.thorough
@pytest.mark.parametrize("method", ["grid", "random", "bayes"])
def test_a_killed_sweep_loses_and_repeats_no_trial(method, tmp_path, monkeypatch):
    """The kill comes after a trial was proposed, or after it ended and before its result was recorded."""
    parameters = {"x": {"values": [0.1, 0.2, 0.4]}, "lr": {"values": [0.1, 0.01]}} if method == "grid" else NUMBERS
    monkeypatch.setattr(search, "TPESampler", partial(TPESampler, n_startup_trials=2))
    sweep, count = parsed(method, parameters), 5
    whole = run_faked(tmp_path / "whole", sweep, FakeRuns(parabola), count=count)
    for kill in (4, 2 * count):
        folder = tmp_path / str(kill)
        killed = FakeRuns(parabola, kill)
        with pytest.raises(Killed):
            run_faked(folder, sweep, killed, count=count)
        rest = FakeRuns(parabola)
        results = run_faked(folder, sweep, rest, count=count)
        assert without_folders(results) == without_folders(whole)
        assert len(killed.ran) + len(rest.ran) == count
        assert len(list((folder / "trials").glob("*/*"))) == count


# --- Results of trials ---


def test_a_failed_trial_runs_again_when_its_reason_is_removed(tmp_path):
    sweep = parsed(parameters={"x": {"values": [1, 2, 3]}})
    failing = FakeRuns(lambda v: "diverged [/bold]" if v["x"] == 2 else [v["x"]])
    results = run_faked(tmp_path, sweep, failing)
    states = [("complete", 1.0, ""), ("failed", None, "diverged [/bold]"), ("complete", 3.0, "")]
    assert [(one.state, one.value, one.reason) for one in results] == states
    repaired = FakeRuns(lambda v: [9.0])
    assert without_folders(run_faked(tmp_path, sweep, repaired)) == without_folders(results)
    assert repaired.ran == []
    next(results[1].folder.rglob(FAILED)).unlink()
    again = run_faked(tmp_path, sweep, repaired)
    states[1] = ("complete", 9.0, "")
    assert [(one.state, one.value, one.reason) for one in again] == states
    assert [one.folder for one in again] == [one.folder for one in results]
    assert len(repaired.ran) == 1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("code", [2, -9])
def test_the_first_trial_ends_the_sweep_if_it_has_bad_input_but_not_if_it_is_killed(code, tmp_path):
    sweep, bad = parsed(parameters={"x": {"values": [1, 2, 3]}}), [1]

    def fake(jobs, should_stop):
        for job in jobs:
            if numbers(job.words)["x"] in bad:
                yield JobResult(job, code, "x: there is none")
            else:
                yield from FakeRuns(lambda v: [v["x"]])([job], should_stop)

    if code == 2:
        with pytest.raises(ConfigError, match=r"^x: there is none$"):
            run_faked(tmp_path, sweep, fake)
    else:
        states = [one.state for one in run_faked(tmp_path, sweep, fake)]
        assert states == ["unfinished", "complete", "complete"]
    bad[:] = [2]
    results = run_faked(tmp_path, sweep, fake)
    expected = [("complete", ""), ("unfinished", "x: there is none"), ("complete", "")]
    assert [(one.state, one.reason) for one in results] == (expected if code == 2 else [("complete", "")] * 3)
    bad.clear()
    results = run_faked(tmp_path, sweep, fake)
    assert [(one.state, one.value) for one in results] == [("complete", 1.0), ("complete", 2.0), ("complete", 3.0)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("metric", "figures", "value", "reason"),
    [
        ("R_0.9", [0.1], None, "R_0.9 is never reached"),
        ("global/acc", [0.1, 0.4, 0.3], 0.3, ""),
        ("global/acc_best", [0.1, 0.4, 0.3], 0.4, ""),
        ("global/acc", [0.1, math.nan], None, "global/acc is nan"),
    ],
)
def test_the_metric_comes_from_the_last_round_or_the_summary(metric, figures, value, reason, tmp_path):
    goal = "minimize" if metric == "R_0.9" else "maximize"
    sweep = parsed(parameters={"x": {"value": 1}}, metric={"name": metric, "goal": goal})
    fake = FakeRuns(lambda _: figures, **{"global/acc_best": 0.4, "R_0.9": None})
    (result,) = run_faked(tmp_path, sweep, fake)
    assert (result.value, result.reason, result.rounds) == (value, reason, len(figures))
    assert result.state == ("failed" if reason else "complete")


@pytest.mark.parametrize(
    ("metric", "goal", "better"), [("global/acc", "minimize", "maximize"), ("R_0.9", "maximize", "minimize")]
)
def test_a_goal_in_the_wrong_direction_gives_a_warning(metric, goal, better):
    line = f"metric: goal {goal} takes the worst {metric} as the best. Set goal: {better}."
    with pytest.warns(UserWarning, match=line):
        assert parsed(metric={"name": metric, "goal": goal}).maximize is (goal == "maximize")
    assert parsed(metric={"name": metric, "goal": better}).maximize is (better == "maximize")


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("metric", "method", "parameters", "fix"),
    [
        (
            "global/acc",
            "grid",
            {"algorithm": {"value": "Local"}},
            " with algorithm Local. Use one of client/acc_mean, ",
        ),
        ("global/ac", "random", {"optimizer.lr": {"min": 0.1, "max": 0.2}}, ". Use one of global/acc, global/loss, "),
        ("R_0.7", "grid", {"seed": {"value": 1}}, ". Use one of R_0.9, "),
    ],
)
def test_an_unknown_metric_is_refused_before_the_first_run(metric, method, parameters, fix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_command, "check_metric", check_metric)
    Path("tiny.yaml").write_text(TINY)
    command = ["${program}", "fit", "--config", "tiny.yaml", "${args}"]
    goal = {"name": metric, "goal": "minimize" if metric.startswith("R_") else "maximize"}
    Path("some.yaml").write_text(yaml.safe_dump(content(method, parameters, command=command, metric=goal, run_cap=2)))
    outcome = run("sweep", "some.yaml")
    assert outcome.err.startswith(f"fl-lightning: error: metric: no run has {metric}{fix}")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert ("global/acc" in outcome.err.partition("Use one of")[2]) == ("algorithm" not in parameters)
    assert not Path("runs").exists()


def test_a_missing_metric_ends_the_sweep_at_its_first_trial(tmp_path):
    sweep = parsed(parameters={"x": {"values": [1, 2]}}, metric={"name": "global/ac", "goal": "maximize"})
    message = "metric: global/ac not found in this run. Use one of global/acc, round, rounds"
    for _ in range(2):
        with pytest.raises(ConfigError, match=f"^{message}$"):
            run_faked(tmp_path, sweep, fake := FakeRuns(lambda _: [0.1]))
        assert len(fake.ran) <= 1


# --- Early termination ---


def curve(values):
    """Return nine rounds of a curve that depends on x."""
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
        ("maximize", {"max_iter": 6, "s": 1, "eta": 2, "min_iter": 1}, {"min_resource": 3, "reduction_factor": 2}, 6),
    ],
)
def test_trials_end_early_where_optunas_pruner_ends_them(goal, early, options, last, tmp_path, monkeypatch):
    more = {"early_terminate": {"type": "hyperband", **early}, "metric": {"name": "global/acc", "goal": goal}}
    sweep = parsed(parameters={"x": {"values": list(range(8))}}, **more)
    shown, real = [], InMemoryStorage.set_trial_intermediate_value

    def record(storage, trial, step, value):
        shown.append((trial, step))
        real(storage, trial, step, value)

    monkeypatch.setattr(InMemoryStorage, "set_trial_intermediate_value", record)
    results = run_faked(tmp_path, sweep, FakeRuns(curve))
    assert len(shown) == len(set(shown)) > 8  # each round once

    reference = optuna.create_study(direction=goal, pruner=optuna.pruners.SuccessiveHalvingPruner(**options))
    expected = []
    for x in range(8):
        trial = reference.ask()
        for number, value in enumerate(values := curve({"x": x}), 1):
            trial.report(value, number)
            if number < last and trial.should_prune():  # ending a trial after its last round saves nothing
                reference.tell(trial, state=optuna.trial.TrialState.PRUNED)
                expected.append(("ended early", number, value))
                break
        else:
            reference.tell(trial, values[-1])
            expected.append(("complete", 9, values[-1]))
    assert [(one.state, one.rounds, one.value) for one in results] == expected
    assert {state for state, _, _ in expected} == {"complete", "ended early"}


def test_trials_are_compared_with_runs_that_ended_between_two_polls(tmp_path):
    sweep = parsed(parameters={"x": {"values": [1, 2]}}, early_terminate={"type": "hyperband", "min_iter": 1})
    curves = {1: [0.9, 0.9, 0.9], 2: [0.1, 0.1, 0.1]}
    fake = FakeRuns(lambda v: curves[v["x"]])

    def run_jobs(jobs, should_stop):
        return fake(jobs, lambda job: numbers(job.words)["x"] == 2 and should_stop(job))

    results = run_faked(tmp_path, sweep, run_jobs)
    assert [(one.state, one.rounds) for one in results] == [("complete", 3), ("ended early", 1)]


def test_early_termination_needs_a_metric_of_each_round(tmp_path):
    metric = {"name": "global/acc_best", "goal": "maximize"}
    more = {"early_terminate": {"type": "hyperband", "min_iter": 2}, "metric": metric}
    message = r"metric: global/acc_best not found by round, which early_terminate needs. Use one of global/acc, round"
    fake = FakeRuns(curve, **{"global/acc_best": 0.4})
    with pytest.raises(ConfigError, match=f"^{message}$"):
        run_faked(tmp_path, parsed(parameters={"x": {"value": 1}}, **more), fake)


# --- Seeds ---

SEEDS = {"seeds": [0, 1, 2], "parameters": {"x": {"values": [1, 2, 3]}}}


def test_a_trial_is_run_with_each_seed_and_its_value_is_the_mean(tmp_path, monkeypatch):
    """The best setting is not that of the best run. If a seed fails, the trial fails and its other seeds do not run."""
    monkeypatch.chdir(tmp_path)
    values = {(1, 0): 0.9, (1, 1): 0.3, (1, 2): 0.3, (2, 0): 0.6, (2, 1): 0.6, (2, 2): 0.7, (3, 0): 0.1, (3, 1): "NaN"}
    write_sweep(tmp_path, **SEEDS)
    fake = FakeRuns(lambda v: one if isinstance(one := values[v["x"], v["seed"]], str) else [0.0, one])
    monkeypatch.setattr(sweep_command, "run_jobs", fake)
    outcome = run("sweep", "small.yaml")
    assert (outcome.code, outcome.err) == (0, "")
    assert [(numbers(words)["x"], numbers(words)["seed"]) for words in fake.ran] == list(values)
    lines = [line for line in outcome.out.splitlines() if line.startswith("trial")]
    assert lines == [
        f"trial {i} of 3, x={i}: {end}" for i, end in enumerate(["0.5000", "0.6333", "failed: seed 1: NaN"], 1)
    ]
    printed = table(outcome.out)
    assert printed["2"] == [f"0.6333 ± {stdev([0.6, 0.6, 0.7]):.4f}", "3 of 3"]
    assert printed["3"] == ["", "0 of 3", "failed: seed 1: NaN"]
    folder = tmp_path / "runs/sweeps/small"
    first, second, third = read_trials(folder)
    assert [second[f"global/acc seed {seed}"] for seed in range(3)] == ["0.6", "0.6", "0.7"]
    assert (float(first["global/acc"]), third["state"]) == (0.5, "failed")
    assert sorted(path.name.partition("-")[0] for path in (folder / "trials/0001").iterdir()) == [
        "seed_0",
        "seed_1",
        "seed_2",
    ]
    best = (folder / "best.yaml").read_text()
    assert best.startswith("# The best of the sweep small: x=2, mean over the seeds 0, 1, 2.\nwords:\n")
    assert yaml.safe_load(best)["words"][-2:] == ["--x=2", "--seed=0"]
    assert run("sweep", "small.yaml").code == 0
    assert len(fake.ran) == len(values)
    next(folder.glob("trials/0002/seed_1-*/failed.txt")).unlink()
    values.update({(3, 1): 0.1, (3, 2): 0.1})
    assert run("sweep", "small.yaml").code == 0
    assert [line["state"] for line in read_trials(folder)] == ["complete"] * 3
    assert "--set: seed" not in (refused := run("sweep", "small.yaml", "--set", "seed=1")).err
    assert refused.err.startswith("fl-lightning: error: small.yaml: seeds: ")


def by_seed(values):
    """Return two rounds of a metric. A setting's mean over two seeds is x / 10, and its runs differ by more."""
    return [values["x"] / 10 + values["seed"] - 0.5] * 2


def test_trials_are_pruned_by_the_mean_over_seeds(tmp_path):
    """A killed sweep makes the same decisions."""
    early = {"type": "hyperband", "min_iter": 1, "eta": 2}
    sweep = parsed(parameters={"x": {"values": [2, 1, 3]}}, seeds=[0, 1], early_terminate=early)
    whole = run_faked(tmp_path / "whole", sweep, FakeRuns(by_seed))
    states = [(one.state, round(one.value, 9), one.rounds) for one in whole]
    assert states == [("complete", 0.2, 2), ("ended early", 0.1, 1), ("complete", 0.3, 2)]
    assert whole[1].describe() == "ended early after round 1, at 0.1000"  # seed 0 has finished round 2
    assert list(study_of(tmp_path / "whole").trials[1].intermediate_values) == [1]
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        run_faked(folder, sweep, FakeRuns(by_seed, kill=7))  # before the second seed of the second trial
    assert without_folders(run_faked(folder, sweep, FakeRuns(by_seed))) == without_folders(whole)


def test_all_runs_of_a_trial_end_when_the_trial_ends(tmp_path):
    sweep = parsed(parameters={"x": {"values": [1]}}, seeds=[0, 1])
    stopped = []

    def run_jobs(jobs, should_stop):
        first, second = jobs
        assert not should_stop(first)
        yield JobResult(second, 1, "diverged")
        stopped.append(should_stop(first))
        yield JobResult(first, 143, "stopped by SIGTERM")

    shown = []
    (result,) = run_faked(tmp_path, sweep, run_jobs, show=lambda result, most: shown.append(result.state))
    assert (stopped, shown, result.reason) == ([True], ["failed"], "seed 1: diverged")


# --- Ranking ---


def result(number, value, state="complete", **settings):
    words, complete = {key: str(word) for key, word in settings.items()}, state == "complete"
    values = [value] if complete else ()
    return TrialResult(number, Path(f"trials/{number}"), words, state, value, 3, "" if complete else "why", values)


def test_settings_are_ranked_by_their_mean_with_incomplete_ones_last():
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
    """Write a small sweep file and its config."""
    (folder / "tiny.yaml").write_text(TINY)
    command = ["${program}", "fit", "--config", str(folder / "tiny.yaml"), "--rounds", 2, *words, "${args}"]
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(content(parameters=parameters, command=command, **more)))
    return path


def read_trials(folder):
    """Return the rows of a sweep's trials.csv without the folders, whose names are random."""
    with (folder / "trials.csv").open(newline="") as file:
        return [{key: text for key, text in row.items() if key != "folder"} for row in csv.DictReader(file)]


def test_the_table_and_the_files_of_a_sweep(tmp_path, monkeypatch):
    """A trial that diverges is reported with its reason, and does not stop the others."""
    monkeypatch.chdir(tmp_path)
    file = write_sweep(tmp_path, {"optimizer.lr": {"values": [1e30, 0.5, 1e-5]}, "seed": {"values": [0, 1]}})
    fake = FakeRuns(lambda v: "diverged [/bold]" if v["optimizer.lr"] > 1 else [0.1, v["optimizer.lr"] + v["seed"] / 4])
    monkeypatch.setattr(sweep_command, "run_jobs", fake)
    outcome = run("sweep", file)
    assert (outcome.code, outcome.err) == (0, "")
    lines = read_trials(folder := Path("runs/sweeps/small"))
    assert [(line["optimizer.lr"], line["seed"], line["state"], line["rounds"]) for line in lines] == [
        *(("1e+30", seed, "failed", "0") for seed in "01"),
        *((lr, seed, "complete", "2") for lr in ("0.5", "1e-05") for seed in "01"),
    ]
    assert [line["reason"] for line in lines] == ["diverged [/bold]"] * 2 + [""] * 4
    assert [float(line["global/acc"] or 0) for line in lines] == [0, 0, 0.5, 0.75, 1e-5, 0.25001]
    printed = table(outcome.out)
    assert [lr for lr in printed if lr[0].isdigit()] == ["0.5", "1e-05", "1e+30"]
    assert printed["0.5"][:2] == [f"0.6250 ± {stdev([0.5, 0.75]):.4f}", "2 of 2"]
    assert printed["1e+30"][:2] == ["", "0 of 2"]
    assert "trial 4 of 6, optimizer.lr=0.5 seed=1: 0.7500\n" in outcome.out
    assert "trial 1 of 6, optimizer.lr=1e+30 seed=0: failed: diverged [/bold]\n" in outcome.out
    best = (folder / "best.yaml").read_text()
    assert best.startswith("# The best of the sweep small: optimizer.lr=0.5 seed=0.\nwords:\n- --config\n")
    assert yaml.safe_load(best)["words"][-2:] == ["--optimizer.lr=0.5", "--seed=0"]

    before = contents(folder / "trials")
    repeated = run("sweep", file)
    assert table_of(repeated) == table_of(outcome)
    assert len(fake.ran) == 6
    changed = yaml.safe_load(file.read_text())
    changed["parameters"]["optimizer.lr"]["values"].pop()
    file.write_text(yaml.safe_dump(changed))
    refused = run("sweep", file, "--set", "rounds=3")
    assert refused.code == 2
    assert "runs/sweeps/small holds another study: command (fit --config" in refused.err
    assert "parameters.optimizer.lr.values ([1e+30, 0.5, 1e-05] -> [1e+30, 0.5])" in refused.err
    assert refused.err.count("\n") == 1
    assert "--out" in refused.err
    assert contents(folder / "trials") == before


def test_a_sweep_whose_trials_all_fail_has_exit_code_1_and_no_best_config(tmp_path, monkeypatch):
    file = write_sweep(tmp_path, {"x": {"values": [1, 2]}})
    monkeypatch.setattr(sweep_command, "run_jobs", FakeRuns(lambda _: "diverged"))
    outcome = run("sweep", file, "--out", tmp_path / "out")
    assert outcome.code == 1
    assert "best" not in outcome.out
    assert not (tmp_path / "out/best.yaml").exists()


@pytest.mark.thorough
def test_the_sweep_file_may_change_until_a_trial_has_begun(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_sweep(tmp_path, {"x": {"values": [1]}})
    seen = []

    def refusing(jobs, **_):
        for job in jobs:
            seen.append(job.words[-1])
            yield JobResult(job, 2, "no")

    monkeypatch.setattr(sweep_command, "run_jobs", refusing)
    assert run("sweep", file).err == "fl-lightning: error: no\n"
    file.write_text(file.read_text().replace("x:", "y:"))
    assert run("sweep", file).err == "fl-lightning: error: no\n"
    assert seen == ["--x=1", "--y=1"]
    monkeypatch.setattr(sweep_command, "run_jobs", FakeRuns(lambda _: [0.5]))
    assert run("sweep", file).code == 0
    (tmp_path / "tiny.yaml").write_text(TINY.replace("rounds: 3", "rounds: 4"))
    refused = run("sweep", file, "--seed", "2")
    assert f"configs.{tmp_path}/tiny.yaml.rounds (3 -> 4); seed (0 -> 2). Undo the change" in refused.err
    file.write_text(file.read_text() + "name: another\nrun_cap: 1\ndescription: new\n")
    (tmp_path / "tiny.yaml").write_text(TINY)
    assert run("sweep", file).code == 0


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """The folder of a finished sweep with three random trials."""
    monkeypatch.chdir(tmp_path)
    write_sweep(tmp_path, {"x": {"min": 0.0, "max": 1.0}}, method="random")
    monkeypatch.setattr(sweep_command, "run_jobs", FakeRuns(lambda values: [values["x"]]))
    assert run("sweep", "small.yaml", "--count", "3").code == 0
    return tmp_path / "runs/sweeps/small"


DAMAGE = {
    "no JSON": lambda text: text[: len(text) // 2],
    "no list": lambda text: "7",
    "no parameters": lambda text: text.replace('"params"', '"param"'),
    "outside of the range": lambda text: text.replace("0.", "12."),
    "no number": lambda text: text.replace('"rounds": 0', '"rounds": "0"'),
    "nested": lambda text: "[" * 10**5,
}


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_of_trials_is_reported_and_not_changed(damage, swept):
    path = swept / "trials.json"
    path.write_text(DAMAGE[damage](path.read_text()))
    before = contents(swept)
    outcome = run("sweep", "small.yaml", "--count", "3")
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert outcome.err.startswith("fl-lightning: error: runs/sweeps/small/trials.json: damaged (")
    assert "--out" in outcome.err
    after = contents(swept)
    assert {name for name in before | after if before.get(name) != after.get(name)} <= {".owner"}


@pytest.mark.parametrize("name", ["study.db", "trials.json", "trials.csv"])
def test_a_lost_file_is_written_again(name, swept):
    before = read_trials(swept)
    (swept / name).unlink()
    assert run("sweep", "small.yaml", "--count", "3").code == 0
    assert read_trials(swept) == before
    assert len(list(swept.glob("trials/*/run-*"))) == 3
    assert len(study_of(swept).trials) == 3


@pytest.mark.thorough
def test_the_folder_of_another_study_is_refused(swept):
    """So is one whose description is lost, as is that of an older version."""
    before = contents(swept)
    other = run("fit", "--config", "tiny.yaml", "--seeds", "0", "--out", "runs/sweeps/small")
    (swept / "study.yaml").unlink()
    lost = run("sweep", "small.yaml", "--count", "3")
    messages = ("another study: ", "runs, but no study.yaml. Put the file back, or give another --out\n")
    for outcome, message in zip((other, lost), messages, strict=True):
        assert outcome.code == 2
        assert outcome.err.splitlines()[-1].startswith(
            f"fl-lightning: error: runs/sweeps/small holds {message.strip()}"
        )
    after = contents(swept)
    assert {name for name in before | after if before.get(name) != after.get(name)} <= {".owner", "study.yaml"}


# --- A full disk ---


def test_a_sweep_with_a_full_disk_ends_and_can_continue(tmp_path, monkeypatch):
    write_sweep(tmp_path, {"x": {"values": [1]}})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep_command, "run_jobs", FakeRuns(lambda values: [values["x"]]))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        outcome = run("sweep", "small.yaml")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    gc.collect()
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert run("sweep", "small.yaml").code == 0


@pytest.mark.thorough
def test_a_second_sweep_in_one_folder_is_refused(tmp_path, monkeypatch):
    def start_second_sweep(jobs, **_):
        second = run("sweep", "digits_fedskc_tau", "--out", tmp_path / "out")
        assert (second.code, second.out) == (2, "")
        holder = f"process {os.getpid()} on {socket.gethostname()}"
        message = f"{tmp_path}/out: {holder} uses this folder. Wait for it, or stop it."
        assert second.err == f"fl-lightning: error: {message}\n"
        yield from FakeRuns(lambda v: [v["algorithm.tau"]])(jobs, None)

    monkeypatch.setattr(sweep_command, "run_jobs", start_second_sweep)
    assert run("sweep", "digits_fedskc_tau", "--out", tmp_path / "out").code == 0


# --- Killed sweeps ---


def kill_sweep(words, folder, delay):
    """Kill the main process of a sweep a while after its first trial began."""
    command = [sys.executable, "-m", "fl_lightning", "sweep", *map(str, words), "--out", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not any(folder.glob("trials/*/*/config.yaml")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    time.sleep(delay)
    process.kill()
    process.communicate(timeout=300)
    assert process.returncode == -signal.SIGKILL


def table_of(outcome):
    return outcome.out[outcome.out.index("┏") :].partition("sweep: ")[0]


@pytest.mark.thorough
def test_a_killed_sweep_gives_the_results_of_an_uninterrupted_one(tmp_path, monkeypatch):
    """The results equal those of `fit` with the same options, and of `fit` with the best config."""
    monkeypatch.setattr(sweep_command, "config_of", CONFIG_OF)
    file = write_sweep(tmp_path, {"algorithm.tau": {"values": [0.05, 0.2]}, "seed": {"values": [0, 1]}})
    words = [file, "--workers", "2", "--threads", "1"]
    whole = run("sweep", *words, "--out", tmp_path / "whole")
    assert whole.code == 0, whole.err
    kill_sweep(words, tmp_path / "killed", 0.3)
    rest = run("sweep", *words, "--out", tmp_path / "killed")
    assert rest.code == 0, rest.err
    assert table_of(rest) == table_of(whole)
    assert read_trials(tmp_path / "killed") == read_trials(tmp_path / "whole")
    assert (tmp_path / "killed/best.yaml").read_text() == (tmp_path / "whole/best.yaml").read_text()
    lines = {(line["algorithm.tau"], line["seed"]): line for line in read_trials(tmp_path / "whole")}
    tiny(tmp_path / "alone", "--rounds=2", "--algorithm.tau=0.2", "--seed=1")
    assert float(lines["0.2", "1"]["global/acc"]) == summary(tmp_path / "alone")["global/acc_last"]
    assert run("fit", "--config", tmp_path / "whole/best.yaml", "--run_dir", tmp_path / "best").code == 0
    best = (tmp_path / "whole/best.yaml").read_text().split("tau=")[1].split(" ")[0]
    assert summary(tmp_path / "best")["global/acc_last"] == float(lines[best, "0"]["global/acc"])
