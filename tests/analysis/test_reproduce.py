"""`fl-lightning reproduce`: the file of a table, its runs, and the comparison with the paper."""

import csv
import io
import json
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import yaml
from commands import run
from hypothesis import given
from hypothesis import strategies as st
from run_folders import write_run

from fl_lightning.analysis.baselines import expand_baseline
from fl_lightning.analysis.statistics import paired_difference
from fl_lightning.analysis.study.executor import Job, is_finished
from fl_lightning.analysis.study.paper_table import (
    PaperValue,
    Scale,
    read_table,
    scaled_options,
    settings_of,
    table_jobs,
)
from fl_lightning.analysis.study.reproduction import Cell, Reproduction, margin_needed, rank_correlations, read_cell
from fl_lightning.analysis.study.reproduction_table import (
    as_csv,
    as_markdown,
    claims_table,
    failures,
    format_cell,
    format_ours,
    verdict_line,
)
from fl_lightning.analysis.study.results import read_runs
from fl_lightning.cli.experiment import experiment_parser, plain_config
from fl_lightning.core.config_files import read_configs
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import Digits

PAPERS = Path(__file__).parents[2] / "papers"
CONFIG = """# tiny
rounds: 2
batch_size: 32
scenario: {dataset: Digits, partition: {class_path: Dirichlet, init_args: {alpha: 1, min_samples: 5}}, clients: 2}
model: {class_path: MLP, init_args: {hidden: [8]}}
algorithm: {class_path: FedSKC, init_args: {tau: 0.5}}
optimizer: {class_path: SGD, init_args: {lr: 0.5}}
trainer: {max_epochs: 1, accelerator: cpu}
evaluation: {target_accuracies: [0.05, 1.0]}
logger: null
baselines: baselines.yaml
"""
BASELINES = "Uniform: {algorithm: FedAvg, algorithm.weighting: uniform}\nFedProx: {algorithm.mu: 0.1}\n"
TABLE = """# Tiny, Table 1: two methods on the digits.
paper: tiny
title: "Tiny, Table 1"
metric: global/acc_last
unit: percent
seeds: [0, 3]
columns:
  "alpha 0.1": {scenario.partition.alpha: 0.1, config: tiny.yaml}
  "alpha 1": {config: tiny.yaml}
rows:
  Uniform: {algorithm: Uniform}
  FedSKC: {algorithm: FedSKC, algorithm.tau: 0.25, algorithm.gda: false}
paper_values:
  Uniform: [50, [60.5, 0.25]]
  FedSKC: [51.25, null]
claims:
- {better: FedSKC, than: Uniform}
- {better: Uniform, than: FedSKC, columns: ["alpha 1"]}
"""
ROUNDS = """# Tiny, Table 2: rounds.
paper: tiny
title: "Tiny, Table 2"
metric: R_0.5
unit: rounds
seeds: [0, 1, 2]
columns:
  "R_50": {config: tiny.yaml}
  "R_70": {config: tiny.yaml, metric: R_0.7}
  "odd": {config: tiny.yaml, metric: R_0.7}
rows:
  A: {algorithm: FedAvg}
  B: {algorithm: FedProx}
  C: {algorithm: FedSKC, metric: R_0.9}
paper_values: {A: [6, 30, null], B: [4, 20, null], C: [2, 10, null]}
claims:
- {better: B, than: A, columns: [R_50, R_70]}
- {better: C, than: A, columns: [R_50]}
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a folder with two tables, a config and its baselines."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(CONFIG)
    Path("baselines.yaml").write_text(BASELINES)
    Path("table.yaml").write_text(TABLE)
    Path("rounds.yaml").write_text(ROUNDS)
    return tmp_path


def leave_run(folder: Path, **summary):
    """Write the folder of a finished run with these figures."""
    write_run(folder, None, [{"round": round, "global/acc": 0.5} for round in range(1, 21)])
    (folder / "final" / "summary.json").write_text(json.dumps({"rounds": 20} | summary))


def leave_runs(name: str, figures: dict[tuple[str, str], list]) -> Reproduction:
    """Return a table whose runs have these figures, a list by seed for each cell; '-' stands for no run."""
    table = read_table(name)
    jobs = table_jobs(table, Path("out"))
    for (column, row), by_seed in figures.items():
        for seed, value in zip(table.seeds, by_seed, strict=True):
            if value != "-":
                folder = jobs[column, row, seed].folder
                leave_run(folder, **{table.figure(column, row): value})
    return Reproduction(table, jobs)


# --- The command lines -----------------------------------------------------------------------------------------------


def test_a_command_line_has_the_options_of_the_column_then_of_the_row(here):
    jobs = table_jobs(read_table("table.yaml"), Path("out"), overrides=["model.hidden=[4, 4]", "rounds=3"])
    last = ["--model.hidden=[4, 4]", "--rounds=3"]
    first = ["--config=tiny.yaml", "--scenario.partition.alpha=0.1"]
    skc = ["--algorithm=FedSKC", "--algorithm.tau=0.25", "--algorithm.gda=false"]
    assert {key: list(job.words) for key, job in jobs.items()} == {
        ("alpha 0.1", "Uniform", 0): [*first, "--algorithm=Uniform", "--seed=0", *last],
        ("alpha 0.1", "Uniform", 3): [*first, "--algorithm=Uniform", "--seed=3", *last],
        ("alpha 0.1", "FedSKC", 0): [*first, *skc, "--seed=0", *last],
        ("alpha 0.1", "FedSKC", 3): [*first, *skc, "--seed=3", *last],
        ("alpha 1", "Uniform", 0): [*first[:1], "--algorithm=Uniform", "--seed=0", *last],
        ("alpha 1", "Uniform", 3): [*first[:1], "--algorithm=Uniform", "--seed=3", *last],
        ("alpha 1", "FedSKC", 0): [*first[:1], *skc, "--seed=0", *last],
        ("alpha 1", "FedSKC", 3): [*first[:1], *skc, "--seed=3", *last],
    }


def test_a_row_may_keep_the_algorithm_of_the_config(here):
    Path("table.yaml").write_text(TABLE.replace("{algorithm: Uniform}", "{algorithm.tau: 0.1}"))
    assert read_table("table.yaml").words("alpha 1", "Uniform") == ["--config=tiny.yaml", "--algorithm.tau=0.1"]


# --- The folders -----------------------------------------------------------------------------------------------------


def folders(name="table.yaml", scale=Scale(), overrides=()):
    return {key: job.folder for key, job in table_jobs(read_table(name), Path("out"), scale, overrides).items()}


def test_names_of_run_folders(here):
    found = folders()
    assert len(set(found.values())) == 8
    folder = found["alpha 0.1", "FedSKC", 3]
    assert folder.parent == Path("out", "tiny-scenario.partition.alpha-0.1", "FedSKC")
    assert folder.name.startswith("seed_3-")
    assert found["alpha 1", "Uniform", 0].parent == Path("out", "tiny", "Uniform")


def test_names_of_run_folders_have_no_special_characters(here):
    table = yaml.safe_load(TABLE) | {"claims": []}
    for key in ("rows", "paper_values"):
        table[key]["../w/ Dist."] = table[key].pop("FedSKC")
    table["columns"]["alpha 0.1"]["scenario.partition.alpha"] = [1, {"a": "/b"}]
    Path("table.yaml").write_text(yaml.safe_dump(table))
    assert {folder.parent for folder in folders().values()} == {
        Path("out", scenario, row)
        for scenario in ("tiny", "tiny-scenario.partition.alpha-1-a-b")
        for row in ("Uniform", "w-Dist")
    }


def test_columns_that_differ_in_the_metric_share_their_runs(here):
    found = folders("rounds.yaml")
    assert len(found) == 27
    assert len(set(found.values())) == 9
    assert found["R_50", "A", 1] == found["R_70", "A", 1]


@pytest.mark.parametrize(
    "change",
    [
        {"scale": Scale(0.5)},
        {"scale": Scale(0.5, epochs=True)},
        {"overrides": ["rounds=2"], "same": True},  # the value in the config
        {"overrides": ["rounds=3"]},
        {"config": CONFIG.replace("lr: 0.5", "lr: 0.25")},
        {"config": "# other words\n" + CONFIG, "same": True},
        {"baselines": BASELINES.replace("uniform", "samples"), "changed": "Uniform"},
        {"baselines": BASELINES.replace("0.1", "0.2"), "same": True},
    ],
)
def test_other_settings_are_other_runs(here, change):
    before = folders()
    Path("tiny.yaml").write_text(change.get("config", CONFIG))
    Path("baselines.yaml").write_text(change.get("baselines", BASELINES))
    now = folders(scale=change.get("scale", Scale()), overrides=change.get("overrides", ()))
    changed = change.get("changed")
    for key, folder in before.items():
        same = change.get("same", False) or (changed is not None and key[1] != changed)
        assert (now[key] == folder) == same, key
    assert not set(now.values()) & {folder for key, folder in before.items() if now[key] != folder}


def test_settings_of_a_command_line_equal_those_of_fit(here):
    words = ["--config=tiny.yaml", "--algorithm=FedProx", "--model.hidden=[4]", "--rounds=7"]
    found = settings_of(words)
    parsed = experiment_parser().parse_args(expand_baseline(read_configs(words)).words)
    assert found["algorithm.mu"] == parsed.algorithm.init_args.mu == 0.1
    assert found["model.hidden"] == list(parsed.model.init_args.hidden) == [4]
    assert (found["rounds"], found["trainer.max_epochs"], found["algorithm"]) == (7, 1, "FedProx")
    assert found["scenario.partition.alpha"] == 1
    assert not [key for key in found if key.startswith("baselines")]
    assert settings_of(["--title=a: b: c"]) == {"title": "a: b: c"}


# --- The scale -------------------------------------------------------------------------------------------------------


def scaled(number, scale):
    """Return number times scale, rounded up, in exact arithmetic."""
    return max(1, math.ceil(Fraction(str(number)) * Fraction(str(scale))))


@given(st.integers(1, 2000), st.integers(1, 60), st.integers(1, 999))
def test_the_scale_is_exact(rounds, epochs, thousandths):
    scale = thousandths / 1000
    settings = {"rounds": rounds, "trainer.max_epochs": epochs}
    fewer, smaller = f"--rounds={scaled(rounds, scale)}", f"--scenario.train_samples={scale}"
    assert scaled_options(settings, Scale(scale)) == [fewer, smaller]
    shorter = f"--trainer.max_epochs={scaled(epochs, scale)}"
    assert scaled_options(settings, Scale(scale, epochs=True)) == [fewer, shorter, smaller]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"rounds": 10}, {"rounds": 3, "scenario.train_samples": 0.25}),
        ({"rounds": 8, "trainer.max_epochs": -1}, {"rounds": 2, "scenario.train_samples": 0.25}),
        ({"rounds": 8, "trainer.max_epochs": None}, {"rounds": 2, "scenario.train_samples": 0.25}),
        ({"rounds": 8, "scenario.train_samples": 1001}, {"rounds": 2, "scenario.train_samples": 251}),
        ({"rounds": 8, "scenario.train_samples": 0.5}, {"rounds": 2, "scenario.train_samples": 0.125}),
        ({"rounds": 8, "scenario.train_samples": None}, {"rounds": 2, "scenario.train_samples": 0.25}),
    ],
)
def test_scaled_settings(settings, expected):
    options = [f"--{key}={value}" for key, value in expected.items()]
    assert scaled_options(settings, Scale(0.25)) == scaled_options(settings, Scale(0.25, epochs=True)) == options
    assert scaled_options(settings, Scale(1.0, epochs=True)) == []


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "column", "row"),
    [
        ("fedskc_table1", "CIFAR-100, alpha 0.05", "MOON"),
        ("cwfedavg_table1", "AG News, practical", "IFCA"),
        ("ua_pdfl_table1", "VGG-11, SVHN", "DFedAvgM"),
    ],
)
def test_the_scale_changes_no_other_setting(name, column, row):
    table, parser = read_table(name).part([row], [column], [1]), experiment_parser()

    def config(scale):
        (job,) = table_jobs(table, Path("out"), scale).values()
        return plain_config(parser.parse_args(expand_baseline(read_configs(job.words)).words), parser)

    whole, small = config(Scale()), config(Scale(0.03))
    assert small["rounds"] == scaled(whole["rounds"], 0.03) < whole["rounds"]
    assert small["scenario"]["train_samples"] == 0.03
    for one in (whole, small):
        del one["rounds"], one["scenario"]["train_samples"]
    assert small == whole


# --- Parts of a table -------------------------------------------------------------------------------------------------


def test_parts_of_a_table():
    table = read_table("cwfedavg_table1")
    part = table.part(["W/ wdr", "FedAvg", "w/o"], ["AG", "MNIST, pr"], [5, 2])
    assert list(part.rows) == ["FedAvg", "cwFedAVG w/o WDR", "cwFedAVG w/ WDR"]
    assert list(part.columns) == ["MNIST, practical", "AG News, practical"]
    assert part.seeds == (5, 2)
    assert part.claims == tuple(
        claim._replace(columns=("MNIST, practical", "AG News, practical")) for claim in table.claims[:2]
    )
    assert table.part() == table
    assert len(table.part(columns=["CIFAR-100, prac"]).claims) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "nothing"], "--rows: row 'nothing' not found. Available: Uniform | FedSKC"),
        (["--columns", "alpha"], "--columns: 'alpha' is in alpha 0.1 | alpha 1. Give the whole name"),
        (["--seeds", "0", "-1"], "--seeds: -1 is below 0"),
        (["--scale", "0"], "--scale: 0 is not above 0 and at most 1"),
        (["--set", "rounds"], "--set: 'rounds' is not of the form KEY=VALUE"),
        (["--set", "seed=3"], "--set: seed is set by --seeds. Leave it out"),
        (["--set", "round=3"], "Uniform / alpha 0.1: the config has no key 'round'. Did you mean --rounds?"),
        (["--set", "algorithm.tau=3"], "Uniform / alpha 0.1: algorithm: FedAvg has no key 'tau'"),
        (["--set", "scenario.train_samples=1.0"], "Uniform / alpha 0.1: scenario.train_samples: 1.0 is neither"),
        (["--workers", "0"], "--workers: 0 is below 1"),
    ],
)
def test_a_wrong_option_is_one_line(here, words, message):
    code, out, err = run("reproduce", "table.yaml", *words)
    lines = [line for line in err.splitlines() if "runs to do" not in line]
    assert (code, out, len(lines)) == (2, "", 1)
    assert lines[0].startswith(f"fl-lightning: error: {message}")
    assert not list(Path().rglob("metrics.csv"))


BAD = [
    ("paper: tiny", "", "paper is missing"),
    ("paper: tiny", "[a, b", "is no readable YAML: "),
    ("paper: tiny", "paper: tiny\nnote: 1", "unknown key note"),
    ("unit: percent", "unit: metres", "unit: 'metres' is not percent or rounds"),
    ("[0, 3]", "[0, 1.5]", "seeds: [0, 1.5] is not a list of different numbers from 0, such as"),
    ("{config: tiny.yaml}", "{rounds: 3}", "columns: alpha 1 has no config"),
    ("{config: tiny.yaml}", "tiny.yaml", "columns: alpha 1 is not a mapping {key: value, ...}"),
    ("  Uniform: {algorithm: Uniform}", "  Uniform:", "rows: Uniform is not a mapping {key: value, ...}"),
    ("Uniform: [50,", "Other: [50,", "paper_values: "),
    ("[50, [60.5, 0.25]]", "[50]", "paper_values: Uniform needs 2 numbers, one per column. Use null"),
    ("[60.5, 0.25]]", "[1, 2, 3]]", "paper_values: Uniform: [1, 2, 3] is neither a number nor [mean, deviation]"),
    ("{better: FedSKC, than: Uniform}", "{better: A}", "claims: than is missing"),
    ("- {better: FedSKC, than: Uniform}", "- {better: FedSKC, than: MOON}", "claims: MOON is not a row"),
    ('columns: ["alpha 1"]', 'columns: ["alpha 2"]', "claims: alpha 2 is not a column"),
    (TABLE, "[]", "it needs lines `key: value`"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD, ids=[message for *_, message in BAD])
def test_a_bad_table_is_one_line(here, old, new, message):
    assert TABLE.count(old) == 1
    Path("bad.yaml").write_text(TABLE.replace(old, new))
    code, out, err = run("reproduce", "bad.yaml")
    assert (code, out, err.count("\n")) == (2, "", 1)
    joint = " " if "YAML" in message else ": "
    assert err.startswith(f"fl-lightning: error: bad.yaml{joint}{message}")


def test_the_tables_are_listed(here):
    message = "nowhere: neither a file nor a shipped table. See `fl-lightning list papers`."
    assert run("reproduce", "nowhere") == (2, "", f"fl-lightning: error: {message}\n")
    code, out, _ = run("list", "papers")
    assert code == 0
    listed = dict(line.strip().split("  ", 1) for line in out.splitlines()[1:])
    assert listed["fedskc_table1.yaml"].strip().startswith("FedSKC, Table I: ")
    for name in listed:
        assert read_table(name) == read_table(name.removesuffix(".yaml"))


# --- Comparison with the paper ------------------------------------------------------------------------------------


def cell(metric, unit="rounds"):
    """Return the cell of a table with one seed and this metric, whose run is in the folder `run`."""
    table = replace(read_table("table.yaml").part(["FedSKC"], ["alpha 1"], [0]), metric=metric, unit=unit)
    return read_cell(table, "alpha 1", "FedSKC", read_runs({0: Job(Path("run"), ())}))


def test_a_cell_is_read_from_its_runs(here):
    leave_run(Path("run"), **{"global/acc_last": 0.625, "R_0.5": 7, "R_0.9": None})
    assert cell("global/acc_last", "percent") == Cell(1, {0: 62.5}, set(), last10=50.0)
    assert cell("R_0.5") == Cell(1, {0: 7.0}, set())
    assert cell("R_0.9") == Cell(1, {0: 21.0}, {0})
    missing = cell("R_0.7")
    assert (missing.seeds, missing.values, missing.unreached) == (1, {}, set())
    assert re.search("R_0.7.* rounds, global/acc_last, R_0.5, R_0.9", missing.failures[0])
    Path("run/metrics.csv").write_text("nonsense")
    damaged = cell("R_0.5")
    assert (damaged.values, damaged.failures[0].startswith("run: ")) == ({}, True)
    Path("run/final/summary.json").unlink()
    assert cell("R_0.5") == Cell(1, {}, set())


def test_the_mean_of_the_last_ten_skips_rounds_without_an_evaluation(here):
    accuracies = [0.1, 0.1, 0.2, 0.3, 0.4, None, 0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.1]
    write_run(Path("run"), None, {"global/acc": accuracies})
    for entry, number in (("best", 90.0), ("last", 10.0), ("last10", 54.0)):
        found = cell(f"global/acc_{entry}", "percent")
        assert (found.values[0], found.last10) == pytest.approx((number, 54.0))


@pytest.mark.parametrize("metric", ["global/acc", "global/acc_final"])
def test_a_metric_in_percent_needs_a_suffix(here, metric):
    Path("table.yaml").write_text(TABLE.replace("global/acc_last", metric))
    with pytest.raises(ConfigError) as raised:
        read_table("table.yaml")
    assert re.match(rf"table.yaml: metric: {metric} .*_best, _last, _last10", str(raised.value))


def test_rank_correlations():
    order = rank_correlations([1.0, 2.0, 2.0, 4.0], [1.0, 3.0, 2.0, 4.0])
    assert (order.spearman, order.kendall, order.rows) == pytest.approx((math.sqrt(0.9), 5 / math.sqrt(30), 4))
    assert rank_correlations([], []) == (None, None, 0)
    assert rank_correlations([1.0, 1.0], [2.0, 3.0]) == (None, None, 2)


@pytest.mark.parametrize("seeds", [2, 5])
def test_margin_needed_for_p_005(seeds):
    margins = np.random.default_rng(seeds).normal(size=seeds)
    margins = (margins - margins.mean()) / margins.std(ddof=1) + margin_needed(seeds)
    assert paired_difference(margins, [0.0] * seeds).p == pytest.approx(0.05)


PERCENT = {
    ("alpha 0.1", "Uniform"): [0.5, 0.52],
    ("alpha 0.1", "FedSKC"): [0.53, 0.54],
    ("alpha 1", "Uniform"): [0.7, 0.75],
    ("alpha 1", "FedSKC"): [0.72, "-"],
}


def test_further_metrics_are_shown_beside_the_tables_metric(here):
    beside = "beside: {after training: trained_client/acc_mean_last}\n"
    Path("table.yaml").write_text(TABLE.replace("unit: percent\n", "unit: percent\n" + beside))
    table = read_table("table.yaml").part(["Uniform"])
    jobs = table_jobs(table, Path("out"))
    for column, values in {"alpha 0.1": (0.6, 0.7), "alpha 1": (0.25, None)}.items():
        for seed, value in zip(table.seeds, values, strict=True):
            further = {} if value is None else {"trained_client/acc_mean_last": value}
            leave_run(jobs[column, "Uniform", seed].folder, **{table.figure(column, "Uniform"): 0.5}, **further)
    results = Reproduction(table, jobs)
    row = next(line for line in as_markdown(results).splitlines() if line.startswith("| Uniform"))
    assert "ours, mean of last 10<br>ours, after training |" in row
    assert "<br>65.0 ± 7.1 |" in row
    assert row.endswith("<br>25.0 |")
    lines = csv.DictReader(io.StringIO(as_csv(results)))
    assert [line["after training"] for line in lines] == ["65.0", "25.0"]


def test_a_claim_is_judged_seed_by_seed(here):
    results = leave_runs("table.yaml", PERCENT)
    first, second, third = results.verdicts
    assert [verdict.column for verdict in results.verdicts] == ["alpha 0.1", "alpha 1", "alpha 1"]
    assert first.margins == pytest.approx({0: 3.0, 3: 2.0})
    assert (first.holds, first.ahead, first.paper) == (True, 2, 1.25)
    assert first.difference[:3] == pytest.approx((2, 2.5, math.sqrt(0.5)))
    assert first.difference.p == pytest.approx(scipy.stats.ttest_rel([53, 54], [50, 52]).pvalue)
    assert second.margins == pytest.approx({0: 2.0})  # the other seed has one side only
    assert (second.holds, second.ahead, second.paper) == (True, 1, None)
    assert (second.difference.std, second.difference.p) == (None, None)
    assert third.margins == pytest.approx({0: -2.0})
    assert (third.holds, third.ahead) == (False, 0)


def test_claims_without_runs_cannot_be_judged(here):
    results = leave_runs("table.yaml", {})
    assert [(verdict.holds, verdict.difference) for verdict in results.verdicts] == [(None, None)] * 3
    assert claims_table(results.verdicts).rows == []
    line = verdict_line(results.verdicts)
    assert re.findall(r"(\d) (?:hold|do|with|cannot)", line) == ["0", "0", "0", "0", "3"]
    assert "t-test" not in line
    assert results.order("alpha 1") == (None, None, 0)


def test_fewer_rounds_are_better(here):
    reached = {("R_50", "A"): [8, 9, 10], ("R_50", "B"): [5, 5, 9], ("R_50", "C"): [None, 3, 3]}
    results = leave_runs("rounds.yaml", reached)
    b_over_a, unreached, c_over_a = results.verdicts
    assert b_over_a.margins == {0: 3.0, 1: 4.0, 2: 1.0}
    assert (b_over_a.paper, b_over_a.holds) == (2.0, True)
    assert c_over_a.margins == {0: 8.0 - 21.0, 1: 6.0, 2: 7.0}
    assert (c_over_a.difference.mean, c_over_a.holds, c_over_a.ahead) == (0.0, False, 2)
    assert unreached.holds is None
    assert results.order("R_50") == rank_correlations([9, 19 / 3, 9], [6, 4, 2])
    assert format_ours(results.cells["R_50", "C"]) == "> 9.0 ± 10.4"
    assert format_ours(results.cells["R_50", "B"]) == "6.3 ± 2.3"


def test_two_runs_that_never_reach_the_target_are_not_compared(here):
    jobs = table_jobs(read_table("rounds.yaml"), Path("out"))
    for (_, row, seed), job in jobs.items():
        if not is_finished(job.folder):
            leave_run(job.folder, **{"R_0.5": 5, "R_0.7": None if seed or row == "A" else 9, "R_0.9": 3})
    results = Reproduction(read_table("rounds.yaml"), jobs)
    assert results.verdicts[1].margins == {0: 12.0}
    assert results.verdicts[0].margins == {0: 0.0, 1: 0.0, 2: 0.0}
    equal = results.verdicts[0]
    assert (equal.holds, equal.difference.p, equal.ahead) == (False, None, 0)


# --- Output -------------------------------------------------------------------------------------------------


def test_cells_as_text():
    two = {0: 70.0, 1: 72.0}
    assert format_ours(Cell(2, two)) == "71.0 ± 1.4"
    assert format_ours(Cell(1, {0: 70.0})) == "70.0"
    assert format_ours(Cell(3, two)) == "71.0 ± 1.4 (2 of 3)"
    assert format_ours(Cell(3, two, failures={2: "nan"})) == "71.0 ± 1.4 (2 of 3, 1 failed)"
    assert format_ours(Cell(2, failures={0: "nan"})) == "1 failed"
    assert format_ours(Cell(1)) == "-"
    assert format_cell(Cell(2, two, paper=PaperValue(70.25, 0.5))) == "71.0 ± 1.4\n70.25 ± 0.5 (+0.8)"
    assert format_cell(Cell(2, two, paper=PaperValue(73.1))) == "71.0 ± 1.4\n73.1 (-2.1)"
    assert format_cell(Cell(2, two)) == "71.0 ± 1.4\n-"
    assert format_cell(Cell(2, two, last10=68.5)) == "71.0 ± 1.4\n-\n68.5"
    assert format_cell(Cell(1, paper=PaperValue(99.0, 0.0))) == "-\n99 ± 0"


def test_the_whole_table_in_markdown(here):
    text = as_markdown(leave_runs("table.yaml", PERCENT), Scale(0.5), ["model=MLP", "rounds=3"])
    assert (
        text
        == """\
**Tiny, Table 1.** Percent; mean ± standard deviation over seeds 0, 3. At scale 0.5: only rounds and \
training samples are multiplied by 0.5 and rounded up. With model=MLP, rounds=3.

|  |  | alpha 0.1 | alpha 1 |
| --- | --- | --- | --- |
| Uniform | ours<br>paper (difference)<br>ours, mean of last 10 | 51.0 ± 1.4<br>50 (+1.0)<br>50.0 | \
72.5 ± 3.5<br>60.5 ± 0.25 (+12.0)<br>50.0 |
| FedSKC | ours<br>paper (difference)<br>ours, mean of last 10 | 53.5 ± 0.7<br>51.25 (+2.2)<br>50.0 | \
72.0 (1 of 2)<br>-<br>50.0 |
| order of rows | Spearman<br>Kendall<br>of rows | 1.00<br>1.00<br>2 | -<br>-<br>1 |

| claim | column | paper | ours | seeds ahead | p |  |
| --- | --- | --- | --- | --- | --- | --- |
| FedSKC > Uniform | alpha 0.1 | +1.25 | +2.5 ± 0.7 | 2 of 2 | 0.126 | holds |
| FedSKC > Uniform | alpha 1 | - | +2.0 | 1 of 1 | - | holds |
| Uniform > FedSKC | alpha 1 | - | -2.0 | 0 of 1 | - | does not hold |

Claims: 2 hold (0 with p < 0.05), 1 do not (0 with p < 0.05), 0 cannot be judged yet. A claim holds if its \
better row is also better in our runs, on average over seeds. p is from a two-sided paired t-test over seeds, for each \
claim separately. With 2 seeds, p < 0.05 needs a mean difference of 9.0 standard deviations."""
    )


def test_titles_and_names_are_escaped(here):
    text = TABLE.replace("Tiny, Table 1", "<b>T</b> [x](y) *z*").replace('alpha 1"', '<i>"')
    text = text.replace("Uniform", "'U|[red]x'").replace("algorithm: 'U|[red]x'", "algorithm: FedAvg")
    Path("table.yaml").write_text(text)
    out = run("reproduce", "table.yaml", "--show", "--format", "markdown").out
    assert "**\\<b>T\\</b> \\[x](y) \\*z\\*.**" in out
    assert not re.search(r"(?<!\\)<(?!br>)", out)
    assert out.count("| U\\|\\[red]x |") == 1
    assert "U|[red]x" in run("reproduce", "table.yaml", "--show").out


@pytest.mark.parametrize("words", [(), ("--show",)])
def test_a_file_is_not_taken_for_the_folder_of_runs(here, words):
    Path("results").write_text("mine")
    done = run("reproduce", "table.yaml", "--out", "results", *words)
    assert (done.code, done.out) == (2, "")
    assert "results" in done.err
    assert Path("results").read_text() == "mine"


def test_significant_claims_are_counted(here):
    figures = {("alpha 0.1", "Uniform"): [0.5, 0.6], ("alpha 0.1", "FedSKC"): [0.6, 0.7001]}
    figures |= {("alpha 1", "Uniform"): [0.5, 0.6], ("alpha 1", "FedSKC"): [0.6, 0.7001]}
    line = verdict_line(leave_runs("table.yaml", figures).verdicts)
    assert re.findall(r"(\d) (?:hold|do|with|cannot)", line) == ["2", "2", "1", "1", "0"]


def test_csv_has_a_line_for_each_cell(here):
    results = leave_runs("rounds.yaml", {("R_50", "A"): [8, 9, 11], ("R_50", "C"): [None, 3, "-"]})
    lines = list(csv.DictReader(io.StringIO(as_csv(results))))
    assert [(line["column"], line["row"]) for line in lines] == list(results.cells)
    first, _, third, *_ = lines
    assert first == {
        "column": "R_50", "row": "A", "metric": "R_0.5", "unit": "rounds", "seeds": "3", "missing": "0",
        "mean": repr(28 / 3), "std": repr(float(np.std([8, 9, 11], ddof=1))), "bound": "", "paper": "6",
        "paper_std": "", "difference": repr(28 / 3 - 6), "last10": "",
    }  # fmt: skip
    assert (third["metric"], third["seeds"], third["missing"], third["mean"], third["bound"]) == (
        "R_0.9", "2", "1", "12.0", "lower",
    )  # fmt: skip
    unread = next(line for line in lines if (line["column"], line["row"]) == ("odd", "B"))
    assert (unread["seeds"], unread["missing"], unread["mean"], unread["paper"]) == ("0", "3", "", "")


# --- The command -----------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_only_missing_runs_are_started(here, started):
    words = ["reproduce", "table.yaml", "--rows", "Uni", "--columns", "alpha 1", "--threads", "1"]
    code, out, err = run(*words, "--seeds", "3", "--workers", "2")
    assert code == 0
    ((job, workers, threads),) = started
    assert (job.folder.parent, workers, threads) == (Path("runs/reproduce/table/tiny/Uniform"), 2, 1)
    assert err.splitlines()[0] == "1 of 1 runs to do, in runs/reproduce/table"
    assert err.splitlines()[1].startswith(f"1 of 1, {job.folder.relative_to('runs/reproduce/table')}: done, ")
    started.clear()
    code, out, err = run(*words)
    assert [p.words[-1] for p, *_ in started] == ["--seed=0"]
    assert err.splitlines()[0] == "1 of 2 runs to do, in runs/reproduce/table"
    started.clear()
    assert (run(*words).out, started) == (out, [])
    shown = run(*words, "--show", "--format", "csv")
    (line,) = csv.DictReader(io.StringIO(shown.out))
    summaries = [json.loads(path.read_text()) for path in Path("runs").rglob("summary.json")]
    assert float(line["mean"]) == pytest.approx(50 * sum(summary["global/acc_last"] for summary in summaries))
    assert len(summaries) == 2


@pytest.mark.parametrize(
    ("option", "epochs", "scaled_numbers"),
    [((), 3, "rounds"), (("--scale_epochs",), 1, "rounds, local epochs (trainer.max_epochs)")],
)
def test_a_scaled_run_has_fewer_rounds_and_samples(here, started, option, epochs, scaled_numbers):
    Path("tiny.yaml").write_text(CONFIG.replace("rounds: 2", "rounds: 12").replace("max_epochs: 1", "max_epochs: 3"))
    words = ["--rows", "FedSKC", "--columns", "0.1", "--seeds", "0", "--out", "here"]
    code, out, _ = run("reproduce", "table.yaml", *words, "--scale", "0.1", *option, "--set", "batch_size=8")
    assert code == 0
    rule = f"only {scaled_numbers} and training samples are multiplied by 0.1 and rounded up"
    assert f"At scale 0.1: {rule}." in out
    assert "With batch_size=8." in out
    (folder,) = (path.parent for path in Path("here").rglob("config.yaml"))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (config["rounds"], config["trainer"]["max_epochs"], config["batch_size"], config["seed"]) == (
        2,
        epochs,
        8,
        0,
    )
    assert config["algorithm"]["init_args"]["tau"] == 0.25
    assert config["algorithm"]["init_args"]["gda"] is False
    assert config["scenario"]["partition"]["init_args"]["alpha"] == 0.1
    with (folder / "partition.csv").open() as file:
        held = sum(int(n) for line in csv.DictReader(file) for name, n in line.items() if name.startswith("class_"))
    assert held == math.ceil(0.1 * len(Digits().load().y_train))


def test_failed_runs_are_reported(here, started):
    words = ["reproduce", "table.yaml", "--rows", "FedSKC", "--columns", "alpha 1", "--seeds", "0"]
    words += ["--set", "optimizer.lr=1e30"]
    code, out, err = run(*words)
    assert (code, len(started)) == (1, 1)
    assert "failed: " in err
    assert "1 failed" in out
    assert out.splitlines()[-1].startswith("failed: FedSKC / alpha 1 / seed 0: ")
    started.clear()
    shown = run(*words, "--show")
    assert (shown.code, shown.out, started) == (0, out, [])


def test_each_reason_is_reported_once(here):
    table = read_table("table.yaml").part(seeds=[0])
    jobs = table_jobs(table, Path("out"))
    results = Reproduction(table, jobs, {job.folder: "no data" for job in jobs.values()})
    cells = [f"{row} / {column} / seed 0" for column in ("alpha 0.1", "alpha 1") for row in ("Uniform", "FedSKC")]
    assert failures(results) == [f"failed: {'; '.join(cells)}: no data"]
