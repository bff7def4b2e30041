"""`fl-lightning benchmark`: the file, equal-budget tuning, and the tables and ranks of its results."""

import contextlib
import csv
import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import killed_runs
import numpy as np
import pytest
import yaml
from commands import TINY, rows, run
from fake_runs import FakeRuns, Killed
from scipy import stats

from fl_lightning.analysis.rank_figure import critical_difference, rank_figure
from fl_lightning.analysis.statistics import paired_difference
from fl_lightning.analysis.study import benchmark as benchmarks
from fl_lightning.analysis.study.benchmark import (
    BenchmarkResult,
    Defaults,
    EntryResult,
    TunedEntry,
    entry_jobs,
    entry_sweep,
    first_half,
    moved_ranges,
    start_value,
    tune,
)
from fl_lightning.analysis.study.benchmark_file import (
    Benchmark,
    Tuning,
    benchmark_path,
    parse_overrides,
    read_benchmark,
)
from fl_lightning.analysis.study.benchmark_tables import as_csv, as_markdown, tables
from fl_lightning.analysis.study.results import SeedRuns
from fl_lightning.analysis.study.sweep_file import parse_sweep
from fl_lightning.analysis.study.sweep_results import TrialResult
from fl_lightning.core.errors import ConfigError
from fl_lightning.runs.reader import Run

LOG = {"distribution": "log_uniform_values", "min": 0.01, "max": 1.0}
CONTENT = {
    "config": "digits_fedavg",
    "settings": {"rounds": 4},
    "scenarios": {"skewed": {"scenario.partition.alpha": 0.1}, "even": {"scenario.partition": "IID"}},
    "tables": {
        "global": {"metric": "global/acc", "methods": ["FedAvg", "Prox"], "settings": {"batch_size": 8}},
        "worst": {"metric": "client/loss_mean", "methods": ["FedAvg"]},
    },
    "methods": {"Prox": {"settings": {"algorithm": "FedProx", "loss": 1}, "search": {"algorithm.mu": LOG}}},
    "search": {"optimizer.lr": LOG},
    "tuning": {"trials": 6, "seeds": [7, 8], "settings": {"rounds": 2}},
    "seeds": [0, 1],
}


def benchmark(tmp_path: Path, **more) -> Benchmark:
    (tmp_path / "b.yaml").write_text(yaml.safe_dump({**CONTENT, **more}, sort_keys=False))
    return read_benchmark(tmp_path / "b.yaml")


# --- The file ---


def test_entries_are_all_methods_in_all_scenarios_of_all_tables(tmp_path):
    entries = list(benchmark(tmp_path).entries())
    assert [entry.name for entry in entries] == [
        "global, skewed, FedAvg",
        "global, skewed, Prox",
        "global, even, FedAvg",
        "global, even, Prox",
        "worst, skewed, FedAvg",
        "worst, even, FedAvg",
    ]
    assert [entry.table.maximize for entry in entries] == [True] * 4 + [False] * 2
    assert entries[1].folder == Path("global/skewed/Prox")


def test_later_parts_of_a_command_line_override_earlier_ones(tmp_path):
    _, prox, *_ = benchmark(tmp_path).entries()
    settings = ["--algorithm=FedProx", "--rounds=4", "--scenario.partition.alpha=0.1", "--batch_size=8", "--loss=1"]
    assert prox.words() == ("--config=digits_fedavg", *settings)
    trial = ("--scenario.validation_share=0.2", "--logger=false", "--rounds=2")
    assert prox.tuning_words() == (*prox.words(), *trial)


def test_set_overrides_all_other_settings(tmp_path):
    changed = replace(benchmark(tmp_path), overrides=parse_overrides(["rounds=9", "scenario.dataset.path=a=b.csv"]))
    _, prox, *_ = changed.entries()
    assert prox.words()[-2:] == ("--rounds=9", "--scenario.dataset.path=a=b.csv")
    for word, message in (
        ("rounds", "--set: 'rounds' is not of the form KEY=VALUE"),
        ("seed=1", "--set: seed is set by"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_overrides([word])


def test_ranges_are_those_of_the_class_of_the_file_and_of_the_method(tmp_path):
    _, prox, *_ = benchmark(tmp_path).entries()
    of_class = {"mu": {"values": [1]}, "tau": {"values": [2]}}
    assert prox.ranges(of_class) == {"algorithm.mu": LOG, "algorithm.tau": {"values": [2]}, "optimizer.lr": LOG}
    methods = {"Prox": {"settings": {"algorithm": "FedProx"}, "search": {"optimizer.lr": None}}}
    _, prox, *_ = benchmark(tmp_path, methods=methods).entries()
    assert prox.ranges({}) == {}


TABLE = {"metric": "global/acc", "methods": ["FedAvg"]}
WRONG = [
    ({"zzz": 3}, "unknown key zzz. Available: config, "),
    ({"config": []}, "config: [] is not the name of a config, or a list of names"),
    ({"settings": {"seed": 1}}, "settings: seed is set by seeds. Leave it out"),
    ({"settings": [1]}, "settings: it needs {key: value, ...} with options of fit ([1])"),
    ({"scenarios": {}}, "scenarios: it needs lines `NAME: {key: value, ...}`"),
    ({"scenarios": {"a b": {}, "a-b": {}}}, "scenarios: a b and a-b would share the folder a-b. Rename one"),
    ({"scenarios": {"a": {"algorithm": "FedAvg"}}}, "scenarios: a: algorithm is set by methods. Leave it out"),
    ({"tables": {}}, "tables: it needs lines `NAME: {metric: global/acc, methods: [FedAvg, ...]}`"),
    ({"tables": {"a": {"metric": "global/acc"}}}, "tables: a: methods is missing"),
    ({"tables": {"a": TABLE | {"metrics": 1}}}, "tables: a: unknown key metrics. Did you mean metric?"),
    ({"tables": {"a": TABLE | {"methods": ["A", "A"]}}}, "tables: a: methods: A is given twice. Leave one out"),
    ({"tables": {"a": TABLE | {"methods": "A"}}}, "tables: a: methods: 'A' is not a list of names, such as"),
    ({"tables": {"a": TABLE | {"metric": "train/x"}}}, "tables: a: goal: which values of train/x are better is not"),
    ({"tables": {"a": TABLE | {"goal": "up"}}}, "tables: a: goal: 'up' is unknown. Set maximize or minimize."),
    ({"tables": {"a": TABLE | {"goal": ""}}}, "tables: a: goal: '' is unknown"),
    ({"tables": {"a": TABLE | {"goal": False}}}, "tables: a: goal: False is unknown"),
    ({"tables": {"a": TABLE | {"goal": ["maximize"]}}}, "tables: a: goal: ['maximize'] is unknown"),
    ({"methods": {"MOON": {}}}, "methods: unknown key MOON. Available: FedAvg, Prox."),
    ({"methods": {"Prox": {"search": 1}}}, "methods: Prox: search: it needs lines `KEY: {min: ..., max: ...}`"),
    ({"tuning": {"trials": 3}}, "tuning: seeds is missing"),
    ({"tuning": {"trials": 0, "seeds": [9]}}, "tuning: trials: 0 is not a number of at least 1"),
    ({"tuning": {"trials": True, "seeds": [9]}}, "tuning: trials: True is not a number of at least 1"),
    (
        {"tuning": {"trials": 3, "seeds": [9], "processor_seconds": 0}},
        "tuning: processor_seconds: 0 is not a number above 0",
    ),
    ({"seeds": [1, 1]}, "seeds: [1, 1] is not a list of different numbers from 0, such as [0, 1, 2]"),
    ({"seeds": [0, 7]}, "seeds: 7 is a seed of the tuning, too. Test with other seeds"),
    ({"reference": "Local"}, "reference: Local is in no table. Available: FedAvg, Prox."),
    ({"untuned": 1}, "untuned: 1 is neither true nor false"),
]


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(("more", "message"), WRONG)
def test_a_wrong_file_is_refused(more, message, tmp_path):
    with pytest.raises(ConfigError) as refused:
        benchmark(tmp_path, **more)
    assert str(refused.value).startswith(f"{tmp_path / 'b.yaml'}: {message}")


def test_a_missing_file_is_refused_with_the_included_ones():
    assert benchmark_path("digits").name == "digits.yaml"
    with pytest.raises(ConfigError, match=r"^benchmark: digit .*Did you"):
        benchmark_path("digit")


# --- Tuning ---


def trial(number=0, state="complete", value: float | None = 0.5, **settings: str) -> TrialResult:
    return TrialResult(number, Path(), settings, state, value, 2, "")


@pytest.mark.parametrize(
    ("distribution", "default", "value"),
    [
        (LOG, 0.3, 0.3),
        (LOG, 5, 1.0),
        (LOG, None, 0.1),  # the middle of the logarithms
        ({"min": 0.0, "max": 1.0}, "x", 0.5),
        ({"min": 0.0, "max": 1.0}, True, 0.5),
        ({"min": 2, "max": 5}, 4, 4),
        ({"values": ["a", "b"]}, "b", "b"),
        ({"values": [0.1, 0.5]}, 0.5, 0.5),
        ({"values": [1, 2]}, None, 1),
    ],
)
def test_the_first_trial_has_the_values_of_the_configs(distribution, default, value, tmp_path):
    _, prox, *_ = benchmark(tmp_path).entries()
    sweep = entry_sweep(prox, {"k": distribution}, Defaults({}, {"k": default}))
    assert sweep.start == {"k": pytest.approx(value) if isinstance(value, float) else value}
    assert start_value(sweep.parameters["k"], default) == sweep.start["k"]


def test_a_range_is_moved_by_half_its_length_if_its_best_value_is_at_the_edge(tmp_path):
    entry = next(benchmark(tmp_path).entries())
    ranges = {"a": LOG, "b": LOG, "c": LOG, "d": {"min": 0.0, "max": 1.0}}
    sweep = entry_sweep(entry, ranges)
    best = trial(a="0.8", b="0.1", c="0.011", d="0.99")
    edges = benchmarks.edge_keys(sweep, best)
    assert edges == {"a": True, "c": False, "d": True}
    moved = moved_ranges(entry, ranges, edges, best, lambda words: True)
    assert moved.keys() == {"a", "c"}
    assert [moved["a"]["min"], moved["a"]["max"]] == pytest.approx([0.1, 10])
    assert [moved["c"]["min"], moved["c"]["max"]] == pytest.approx([0.001, 0.1])
    asked = []
    assert not moved_ranges(entry, ranges, {"a": True}, best, lambda words: bool(asked.append(words)))
    assert float(next(word for word in asked[0] if word.startswith("--a=")).removeprefix("--a=")) == pytest.approx(10)


def test_the_edge_is_the_tenth_at_each_end(tmp_path):
    sweep = parse_sweep(
        yaml.safe_load(
            "{program: fl-lightning, command: ['${program}', fit, '${args}'], method: bayes, "
            "metric: {name: global/acc, goal: maximize}, parameters: {a: {min: 0.0, max: 1.0}}}"
        ),
        Path("x.yaml"),
    )
    at_edge = [bool(benchmarks.edge_keys(sweep, trial(a=str(place)))) for place in (0.09, 0.11, 0.5, 0.89, 0.91)]
    assert at_edge == [True, False, False, False, True]


def at(best: float):
    """Return a function whose maximum over the learning rate is at `best`."""
    return lambda values: [0.0, -abs(math.log(values["optimizer.lr"] / best))]


def tuned(entry, folder, fake, first=0.1, **options) -> TunedEntry:
    return tune(entry, Defaults({}, {"optimizer.lr": first}), folder, fake, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(("best", "first", "is_moved"), [(0.1, 0.1, False), (30, 1.0, True)])
def test_every_method_has_the_same_number_of_trials(best, first, is_moved, tmp_path):
    entry = next(benchmark(tmp_path).entries())
    fake, shown = FakeRuns(at(best)), []
    found = tuned(entry, tmp_path, fake, first, show=lambda result, of: shown.append((result.number, of)))
    assert len(found.trials) == 6
    assert shown == [(number, 6) for number in range(6)]
    assert len(fake.ran) == 6 * 2  # two seeds each
    assert fake.ran[0][-2:] == (f"--optimizer.lr={first}", "--seed=7")
    folder = tmp_path / "tuning/global/skewed/FedAvg"
    assert (folder / "moved").is_dir() == is_moved
    assert found.best == max(found.trials, key=lambda one: one.value)
    again = FakeRuns(at(best))
    repeated = tuned(entry, tmp_path, again, first)
    assert [one.settings for one in repeated.trials] == [one.settings for one in found.trials]
    assert not again.ran
    lines = list(csv.DictReader((folder / "trials.csv").read_text().splitlines()))
    assert len(lines) == (3 if is_moved else 6)


@pytest.mark.thorough
@pytest.mark.parametrize(("best", "first", "is_moved"), [(0.1, 0.1, False), (30, 1.0, True)])
def test_a_budget_of_processor_time_ends_the_tuning(best, first, is_moved, tmp_path):
    tuning = {"trials": 50, "processor_seconds": 90, "seeds": [7, 8]}
    entry = next(benchmark(tmp_path, tuning=tuning).entries())
    found = tuned(entry, tmp_path, FakeRuns(at(best), seconds=5), first)  # a trial takes 20 s
    assert [one.processor_seconds for one in found.trials] == [20] * 5
    folders = [one.folder.parent.parent.name == "moved" for one in found.trials]
    assert folders == [False, False, False, is_moved, is_moved]
    again = FakeRuns(at(best))
    assert tuned(entry, tmp_path, again, first).trials == found.trials
    assert not again.ran


def test_the_first_half_of_a_budget_has_the_trials_that_began_in_it():
    tuning = Tuning(8, (0,), processor_seconds=90)
    for seconds, number in (([20] * 8, 3), ([45, 1, 1], 1), ([44, 1, 1], 2), ([1] * 8, 4)):
        results = [replace(trial(i), processor_seconds=each) for i, each in enumerate(seconds)]
        assert first_half(results, tuning) == results[:number]


def test_a_range_that_the_method_refuses_is_not_moved_and_the_best_is_marked(tmp_path):
    entry = next(benchmark(tmp_path).entries())
    found = tuned(entry, tmp_path, FakeRuns(at(30)), first=1.0, allows=lambda words: False)
    assert not (tmp_path / "tuning/global/skewed/FedAvg/moved").exists()
    assert found.edges == ["optimizer.lr"]


@pytest.mark.thorough
@pytest.mark.parametrize("step", range(1, 26))
def test_a_killed_tuning_continues_with_the_same_trials(step, tmp_path):
    entry = next(benchmark(tmp_path).entries())
    whole = tuned(entry, tmp_path / "whole", FakeRuns(at(30)))
    with contextlib.suppress(Killed):
        tuned(entry, tmp_path / "killed", FakeRuns(at(30), kill=step))
    found = tuned(entry, tmp_path / "killed", FakeRuns(at(30)))
    assert [(one.settings, one.value) for one in found.trials] == [(one.settings, one.value) for one in whole.trials]


def test_failed_trials_count_and_an_entry_without_a_complete_one_has_no_runs(tmp_path):
    entry = next(benchmark(tmp_path).entries())
    found = tuned(entry, tmp_path, FakeRuns(lambda values: "loss is NaN"))
    assert [one.state for one in found.trials] == ["failed"] * 6
    assert found.best is None
    assert found.jobs(tmp_path) == {}


def test_nothing_to_tune_is_refused(tmp_path):
    entry = next(benchmark(tmp_path, search={}).entries())
    with pytest.raises(ConfigError, match=r"^global, skewed, FedAvg: .* search: "):
        tuned(entry, tmp_path, FakeRuns(at(0.1)))


# --- Results ---

ROWS = {"comm/up_bytes": 10.0, "comm/down_bytes": 20.0, "time/round_s": 0.5, "time/processor_s": 0.75}


def finished(*values: float) -> Run:
    rows = [
        {"round": float(i), "global/acc": value, "client/loss_mean": value, **ROWS} for i, value in enumerate(values, 1)
    ]
    return Run(Path(), {}, rows, {})


def results_of(tmp_path, scores: dict[tuple[str, str], list[list[float]]], **more) -> BenchmarkResult:
    """Return results, given one list of values by round per seed, by scenario and method; untuned runs have half."""
    tables = {"global": {"metric": "global/acc", "methods": list(dict.fromkeys(method for _, method in scores))}}
    found = benchmark(tmp_path, tables=tables, methods={}, **more)
    entries = []
    for entry in found.entries():
        values = dict(enumerate(scores[entry.scenario, entry.method]))
        runs = {seed: finished(*each) for seed, each in values.items()}
        untuned = {seed: finished(*np.array(each) / 2) for seed, each in values.items()}
        trials = [trial(0, value=0.7, **{"optimizer.lr": "0.12345"}), trial(1, "failed", None, **{"optimizer.lr": "1"})]
        trials[0] = replace(trials[0], processor_seconds=12.5)
        entries.append(EntryResult(TunedEntry(entry, trials, ["optimizer.lr"]), SeedRuns(runs), SeedRuns(untuned)))
    return BenchmarkResult(found, entries)


@pytest.fixture
def result(tmp_path) -> BenchmarkResult:
    return results_of(
        tmp_path,
        {
            ("skewed", "FedAvg"): [[0.1, 0.5], [0.2, 0.6]],
            ("skewed", "Prox"): [[0.9, 0.7], [0.1, 0.7]],
            ("skewed", "Local"): [],
            ("even", "FedAvg"): [[0.1, 0.8], [0.2, 0.8]],
            ("even", "Prox"): [[0.1, 0.8], [0.2, 0.8]],
            ("even", "Local"): [[0.1, 0.9], [0.2, 0.9]],
        },
    )


def test_ranks_share_ties_and_a_missing_result_is_last(result):
    assert result.ranks("global") == {"FedAvg": [2, 2.5], "Prox": [1, 2.5], "Local": [3, 1]}
    values = [[0.55, 0.8], [0.7, 0.8], [-math.inf, 0.9]]
    expected = [stats.rankdata([-row[j] for row in values]).tolist() for j in range(2)]
    assert [[ranks[j] for ranks in result.ranks("global").values()] for j in range(2)] == expected


def test_lower_values_rank_first_if_they_are_better(tmp_path):
    scores = {("skewed", "A"): [[2.0]], ("skewed", "B"): [[1.0]], ("even", "A"): [[1.0]], ("even", "B"): [[2.0]]}
    found = results_of(tmp_path, scores)
    found.benchmark = replace(
        found.benchmark, tables=(replace(found.benchmark.tables[0], maximize=False, metric="client/loss_mean"),)
    )
    assert found.ranks("global") == {"A": [2, 1], "B": [1, 2]}


def test_readings_bytes_and_seconds(result):
    one = result.result("global", "skewed", "Prox")
    assert one.values() == {0: 0.7, 1: 0.7}
    assert one.values("best") == {0: 0.9, 1: 0.7}
    assert one.values("last10") == {0: pytest.approx(0.8), 1: pytest.approx(0.4)}
    assert one.values(untuned=True) == {0: 0.35, 1: 0.35}
    assert (one.bytes, one.seconds, one.processor_seconds) == (60, 1, 1.5)


def test_differences_are_paired_by_seed_with_a_confidence_interval(result):
    base, prox = (result.result("global", "skewed", name) for name in ("FedAvg", "Prox"))
    difference = prox.difference(base)
    assert difference.mean == pytest.approx(0.15)
    expected = stats.ttest_rel([0.7, 0.7], [0.5, 0.6]).confidence_interval(0.95)
    assert difference.interval() == pytest.approx((expected.low, expected.high))
    assert paired_difference([0.1], [0.2]).interval() is None


def test_the_tables_show_results_differences_and_the_tuning(result):
    [(title, [scores, differences, tuning])] = tables(result, in_percent=True)
    assert title == (
        "global: global/acc in percent in the last round, seeds 0, 1; each method is tuned for this metric in each "
        "scenario (6 trials, seeds 7, 8)"
    )
    assert scores.header == ["method", "skewed", "even", "rank", "rank untuned"]
    assert scores.rows[0] == ["Prox", "70.00 ± 0.00", "80.00 ± 0.00", "1.75", "1.75"]
    assert scores.rows[1] == ["Local", "-", "90.00 ± 0.00", "2.00", "2.00"]
    assert scores.bold == {(0, 1), (1, 2)}
    assert differences.rows[0][0] == "Prox"
    assert differences.rows[0][1].startswith("+15.00 [")
    assert tuning.rows[0][:6] == ["skewed", "FedAvg", "2 (1 failed)", "optimizer.lr=0.123*", "70.00", "27.50 ± 3.54"]
    assert tuning.header[-2:] == ["run s", "tuning s"]
    assert tuning.rows[0][-2:] == ["1.5", "12.5"]
    assert tuning.notes[-1].startswith("* at the edge")
    assert as_markdown(result).count("|") > 20
    lines = list(csv.DictReader(as_csv(result).splitlines()))
    assert len(lines) == 6 * 2
    assert lines[0] | {"last": "0.5", "untuned_last": "0.25", "bytes": "60.0", "method": "FedAvg"} == lines[0]


def test_without_the_reference_there_is_no_table_of_differences(tmp_path):
    scores = {(scenario, name): [[0.5]] for scenario in ("skewed", "even") for name in ("A", "B")}
    [(_, parts)] = tables(results_of(tmp_path, scores, untuned=False))
    assert [part.header[0] for part in parts] == ["method", "scenario"]
    assert parts[0].header[-1] == "rank"


@pytest.mark.parametrize(("methods", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])  # Demšar 2006, Table 5(a)
def test_the_critical_difference_is_demsars(methods, q):
    expected = q * math.sqrt(methods * (methods + 1) / (6 * 14))
    assert critical_difference(methods, 14) == pytest.approx(expected, abs=1e-3)


def test_the_figure_shows_mean_ranks_and_the_critical_difference():
    figure = rank_figure({"A": [1, 2], "B": [2, 1], "C": [3, 3]}, {"A": [3, 3], "B": [1, 1], "C": [2, 2]})
    old, new = figure.axes[0].lines
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["C", "A", "B"]
    assert new.get_xdata().tolist() == [3, 1.5, 1.5]
    assert old.get_xdata().tolist() == [2, 3, 1]
    assert f"critical difference {critical_difference(3, 2):.2f}" in figure.notes[1]
    assert len(rank_figure({"A": [1], "B": [2]}).notes) == 1


# --- The command ---


@pytest.mark.thorough
def test_the_command_tunes_runs_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    content = {
        "config": "tiny.yaml",
        "tables": {"global": {"metric": "global/acc", "methods": ["FedAvg", "FedSAM"]}},
        "search": {"optimizer.lr": LOG},
        "tuning": {"trials": 2, "seeds": [9]},
        "seeds": [0, 1],
    }
    Path("b.yaml").write_text(yaml.safe_dump(content))
    first = run("benchmark", "b.yaml", "--workers", "2", "--format", "markdown")
    assert first.code == 0, first.err
    assert first.out.count("| FedSAM |") >= 2
    folder = Path("runs/benchmarks/b")
    assert {path.name for path in folder.iterdir()} >= {
        "results.md",
        "results.csv",
        "ranks-global.svg",
        "tuning",
        "runs",
    }
    config = yaml.safe_load(next(folder.glob("tuning/global/FedSAM/trials/*/seed_9-*/config.yaml")).read_text())
    assert config["scenario"]["validation_share"] == 0.2
    again = run("benchmark", "b.yaml", "--format", "markdown")
    assert (again.code, again.out) == (0, first.out)
    assert "0 of 8 runs to do" in again.err
    best = json.loads(next(folder.glob("runs/global/FedSAM/seed_0-*/final/summary.json")).read_text())
    assert f"{best['global/acc_last']:.4f}"[:4] in (folder / "results.csv").read_text()


def small_benchmark(name, scenario, metric, methods):
    """Write a benchmark with a trial and a seed for each method, in one scenario."""
    Path("tiny.yaml").write_text(TINY)
    content = {
        "config": "tiny.yaml",
        "scenarios": {"one": scenario},
        "tables": {"table": {"metric": metric, "methods": [*methods]}},
        "methods": {method: {"settings": {"algorithm": "FedAvg", **more}} for method, more in methods.items()},
        "search": {"optimizer.lr": LOG},
        "tuning": {"trials": 1, "seeds": [9]},
        "seeds": [0],
    }
    Path(f"{name}.yaml").write_text(yaml.safe_dump(content))
    return Path(f"{name}.yaml")


@pytest.mark.thorough
def test_methods_are_ranked_by_the_success_rate_of_an_attack(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    backdoor = {"class_path": "Backdoor", "init_args": {"clients": [0], "size": 2}}
    defended = {"algorithm.aggregator": "Median", "compression": "TopK", "compression.keep": 0.1}
    file = small_benchmark("b", {"adversary": backdoor}, "attack/success_rate", {"FedAvg": {}, "Defended": defended})
    assert read_benchmark(file).tables[0].maximize is False
    done = run("benchmark", file)
    assert done.code == 0, done.err
    with Path("runs/benchmarks/b/results.csv").open() as results:
        found = {row["method"]: row for row in csv.DictReader(results)}
    for method, row in found.items():
        (folder,) = Path("runs/benchmarks/b/runs").glob(f"*/*/{method}/seed_0-*")
        measured = rows(folder)
        assert float(row["last"]) == float(measured[-1]["attack/success_rate"])
        assert float(row["best"]) == min(float(one["attack/success_rate"]) for one in measured)
        assert float(row["bytes"]) == float(measured[-1]["comm/total_bytes"])
    assert float(found["Defended"]["bytes"]) < float(found["FedAvg"]["bytes"])


@pytest.mark.thorough
def test_private_methods_are_tuned_and_their_epsilon_needs_a_goal(tmp_path, monkeypatch):
    pytest.importorskip("opacus")
    monkeypatch.chdir(tmp_path)
    private = {"algorithm.aggregator": {"class_path": "PrivateMean", "init_args": {"noise": 1, "delta": 0.01}}}
    done = run("benchmark", small_benchmark("p", {}, "global/acc", {"Private": private}))
    assert done.code == 0, done.err
    (folder,) = Path("runs/benchmarks/p/runs").glob("*/*/Private/seed_0-*")
    assert float(rows(folder)[-1]["privacy/epsilon"]) > 0
    with pytest.raises(ConfigError, match=r"table: goal: .*privacy/epsilon"):
        read_benchmark(small_benchmark("e", {}, "privacy/epsilon", {"Private": private}))


def results_below(folder: Path) -> dict[str, dict[str, bytes | list[bytes]]]:
    """Return the results of all runs of a benchmark by the run's folder."""
    runs = [path.parent for path in folder.rglob("config.yaml")]
    return {str(one.relative_to(folder)): killed_runs.results_of(one) for one in runs}


@pytest.mark.thorough
def test_a_killed_benchmark_gives_the_bytes_of_an_uninterrupted_one(tmp_path, monkeypatch):
    """The command is killed in the middle of a trial."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    table = {"metric": "global/acc", "methods": ["FedAvg"]}
    content = {"config": "tiny.yaml", "tables": {"global": table}, "search": {"optimizer.lr": LOG}}
    content |= {"tuning": {"trials": 2, "seeds": [9]}, "seeds": [0]}
    Path("b.yaml").write_text(yaml.safe_dump(content))
    words = ["benchmark", "b.yaml", "--threads", "1", "--out"]
    assert run(*words, "whole").code == 0
    process = subprocess.Popen([sys.executable, "-m", "fl_lightning", *words, "killed"], stdout=subprocess.DEVNULL)
    while not any(Path("killed").glob("tuning/**/seed_9-*/config.yaml")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert run(*words, "killed").code == 0
    assert results_below(Path("killed")) == results_below(Path("whole"))
    assert {Path(name).name.partition("-")[0] for name in results_below(Path("whole"))} == {"seed_0", "seed_9"}


@pytest.mark.thorough
def test_unknown_methods_settings_and_metrics_are_refused_before_the_first_trial(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = {"metric": "global/acc", "methods": ["FedAvg", "FedSMA"]}
    content = {"config": "digits_fedavg", "tables": {"t": table}, "tuning": {"trials": 1, "seeds": [9]}, "seeds": [0]}
    content["search"] = {"optimizer.lr": LOG}
    Path("b.yaml").write_text(yaml.safe_dump(content))
    assert "t, FedSMA: " in (refused := run("benchmark", "b.yaml")).err
    assert refused.code == 2
    table["methods"], table["metric"], table["goal"] = ["FedAvg"], "global/acx", "maximize"
    Path("b.yaml").write_text(yaml.safe_dump(content))
    assert "t, FedAvg: metric: no run has global/acx." in run("benchmark", "b.yaml").err
    assert not Path("runs").exists()


def test_runs_with_other_values_have_other_folders(tmp_path):
    entry = next(benchmark(tmp_path).entries())
    one, same, other = (entry_jobs(entry, tmp_path, "runs", [f"--optimizer.lr={lr}"]) for lr in ("0.1", "0.1", "0.2"))
    assert one == same
    assert one[0].folder != other[0].folder
    assert one[1].words[-2:] == ("--optimizer.lr=0.1", "--seed=1")
