"""`fl-lightning compare`: groups of runs, their statistics and costs, and the printed tables."""

import csv
import io
import math
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from commands import run
from hypothesis import given
from hypothesis import strategies as st
from run_folders import CONFIG, changed, write_run
from scipy import stats

from fl_lightning.analysis.comparison import comparable_runs, compare
from fl_lightning.analysis.result_table import ResultTable, mean_and_std
from fl_lightning.analysis.run_settings import format_setting
from fl_lightning.analysis.statistics import holm, paired_difference, spread
from fl_lightning.cli.commands.compare import shorten_keys
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.summary import is_lower_better
from fl_lightning.runs.search import open_runs

PATHS = "fl_lightning.algorithms"


def rounds_of(accs, name="global/acc", every=1, up=10, seconds=0.5):
    """Return rounds with an accuracy in every `every`-th round. Each round costs more than the one before."""
    rows = []
    for i, acc in enumerate(accs, 1):
        row = {"round": i, "comm/up_bytes": up + i, "comm/down_bytes": 2 * up, "time/round_s": seconds * i}
        rows.append(row | ({name: acc} if i % every == 0 else {}))
    return rows


def write(folder, algorithm="FedAvg", seed=0, accs=(0.25, 0.5, 0.75), name="global/acc", finished=True, **values):
    values.setdefault("arguments", {})
    config = changed(algorithm=f"{PATHS}.{algorithm}", seed=seed, **values)
    parts = "-".join([algorithm, *(str(value) for value in values.values()), str(seed), f"{time.monotonic_ns()}"])
    return write_run(folder / re.sub(r"[^\w.-]", "", parts), config, rounds_of(accs, name), finished)


def compare_folder(folder, *by, **options):
    return compare(comparable_runs(open_runs(folder)), by=by, **options)


def group_names(comparison):
    return [" ".join(group.names.values()) for group in comparison.groups]


@pytest.fixture
def study(tmp_path, rng):
    """Return a folder of three methods with two alphas and four seeds, one missing; and their accuracies."""
    ends = {}
    for algorithm, gain in (("FedSKC", 0.05), ("FedAvg", 0.0), ("FedDW", 0.01)):
        for alpha in (0.5, 0.1):
            for seed in range(4):
                if (algorithm, alpha, seed) == ("FedDW", 0.1, 3):
                    continue
                accs = np.sort(rng.uniform(0.4, 0.6, 5)) + gain
                accs[3] += 0.2  # the best round is not the last one
                write(tmp_path, algorithm, seed, accs.tolist(), alpha=alpha)
                ends[algorithm, alpha, seed] = accs
    return tmp_path, ends


@pytest.fixture
def rng(request):
    return np.random.default_rng(np.random.randint(2**31))


# --- Statistics ---


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=9))
def test_a_spread_has_the_mean_and_the_sample_standard_deviation(values):
    result = spread(values)
    assert result.n == len(values)
    assert result.mean == pytest.approx(statistics.fmean(values), rel=1e-12, abs=1e-12)
    if len(values) == 1:
        assert result.std is None
    else:
        assert result.std == pytest.approx(statistics.stdev(values), rel=1e-9, abs=1e-9)
    assert spread([]) is None


@pytest.mark.parametrize("n", [2, 8])
def test_a_paired_difference_equals_scipys_paired_t_test(n, rng):
    ours, theirs = rng.normal(0.5, 0.1, n), rng.normal(0.45, 0.1, n)
    difference = paired_difference(list(ours), list(theirs))
    assert difference.pairs == n
    assert difference.p == pytest.approx(stats.ttest_rel(ours, theirs).pvalue, rel=1e-10)
    assert difference.mean == pytest.approx(np.mean(ours - theirs), rel=1e-12)
    assert difference.std == pytest.approx(statistics.stdev(ours - theirs), rel=1e-12)
    assert difference.effect == pytest.approx(difference.mean / difference.std, rel=1e-12)
    opposite = paired_difference(list(theirs), list(ours))
    assert (opposite.p, opposite.mean) == pytest.approx((difference.p, -difference.mean), rel=1e-12)


def test_differences_that_do_not_vary_are_not_tested():
    """With a small test set, all seeds often differ by the same number of samples. p would be 0 then."""
    for ours, theirs, mean in (([0.9, 0.8], [0.8, 0.7], 0.1), ([0.5, 0.6], [0.5, 0.6], 0.0), ([0.7], [0.5], 0.2)):
        difference = paired_difference(ours, theirs)
        assert (difference.p, difference.effect, difference.stars) == (None, None, "")
        assert difference.mean == pytest.approx(mean, abs=1e-12)
    assert paired_difference([], []) is None


def test_rounding_errors_become_zero():
    assert spread([0.9] * 3).std == 0
    assert spread([0.1, 0.2, -0.3]).mean == 0
    assert spread([1e-13, 1e-13]).mean == 1e-13
    assert spread([1e-13, 3e-13]).std > 0
    difference = paired_difference([0.9, 0.3], [0.8, 0.2])
    assert (difference.std, difference.effect) == (0, None)
    assert paired_difference([0.3, 0.1], [0.1 + 0.2, 0.1]).mean == 0


@pytest.mark.parametrize(
    ("mean", "std", "form", "text"),
    [
        (-0.00003, 0.00004, "+.4f", "+0.0000 ± 0.0000"),
        (-0.004, None, ".1f", "0.0"),
        (-0.06, 0.2, "+.1f", "-0.1 ± 0.2"),
        (0.5, 1.25, ".2f", "0.50 ± 1.25"),
        (math.nan, math.inf, ".1f", "nan ± inf"),
    ],
)
def test_a_number_that_rounds_to_zero_has_no_minus_sign(mean, std, form, text):
    assert mean_and_std(mean, std, form) == text


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_give_no_p_value_and_no_warning(bad):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for theirs in ([0.4, 0.5, 0.5], [0.4, bad, 0.5]):
            difference = paired_difference([0.5, bad, 0.7], theirs)
            assert (difference.pairs, difference.p) == (3, None)
        assert not math.isfinite(spread([bad, 1.0]).mean)


def brute_force_holm(p_values):
    """Correct p values by the definition: the k-th smallest is rejected at a level if all smaller ones are."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected = {}
    for rank, i in enumerate(order):
        corrected[i] = min(1, max((len(order) - k) * p_values[order[k]] for k in range(rank + 1)))
    return [corrected[i] for i in range(len(p_values))]


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holms_correction_follows_its_definition(p_values):
    assert holm(p_values) == pytest.approx(brute_force_holm(p_values), abs=1e-15)


# --- Groups ---


def test_default_groups(tmp_path):
    for seed in (0, 1):
        evaluation = {"client_model": "trained", "target_accuracies": [seed]}
        write(tmp_path, "FedAvg", seed, engine="sequential", data_dir="here")
        write(tmp_path, "FedSKC", seed, engine="stacked", data_dir="there", arguments={"tau": 0.08})
        callbacks = [*CONFIG["callbacks"], {"class_path": "fl_lightning.callbacks.RowNorms"}]
        write(tmp_path, "FedSKC", seed, callbacks=callbacks, arguments={"tau": 0.1}, evaluation=evaluation)
        write(tmp_path, "FedDW", seed, arguments={"mu": 1}, lr=0.5)
    comparison = compare_folder(tmp_path)
    assert comparison.keys == ["algorithm", "algorithm.tau", "optimizer.lr"]  # all runs of FedDW have the same mu
    assert comparison.columns == ["algorithm", "optimizer.lr"]
    assert group_names(comparison) == ["FedAvg 0.1", "FedDW 0.5", "FedSKC tau=0.08 0.1", "FedSKC tau=0.1 0.1"]
    assert [group.seeds for group in comparison.groups] == [[0, 1]] * 4
    assert comparison.groups[2].values == {"algorithm": "FedSKC", "algorithm.tau": 0.08, "optimizer.lr": 0.1}
    assert comparison.remarks == []


def test_callbacks_that_may_stop_a_run_separate_groups(tmp_path):
    stopper = {"class_path": "fl_lightning.callbacks.EarlyStopping", "init_args": {"patience": 3}}
    for number, watcher in enumerate(["fl_lightning.callbacks.RowNorms", "fl_lightning.callbacks.Checkpointing"]):
        for callbacks in (
            [stopper, {"class_path": watcher}],
            [{"class_path": watcher}],
            None,
            [{"class_path": "m.My"}],
        ):
            write(tmp_path, ["FedAvg", "FedDW"][number], seed=0, callbacks=callbacks)
    with pytest.warns(UserWarning, match="^2 runs, .* the same settings and seed"):
        comparison = compare_folder(tmp_path)
    rows = ["", "[EarlyStopping patience=3]", "[My]"]
    assert group_names(comparison) == [f"{name} {row}" for name in ("FedAvg", "FedDW") for row in rows]
    assert [bool(group.difference) for group in comparison.groups] == [False] * 3 + [True] * 3


@pytest.mark.parametrize("callbacks", [5, "EarlyStopping", [None, 5, {}], {"class_path": "EarlyStopping"}])
def test_callbacks_that_an_edited_config_lists_wrongly_are_no_error(callbacks, tmp_path):
    write(tmp_path, callbacks=callbacks)
    assert len(compare_folder(tmp_path).groups) == 1


@pytest.mark.parametrize(
    ("algorithms", "names"),
    [
        (["FedAvg", "mine.Method"], ["FedAvg", "Method"]),
        (["a.Method", "b.Method", "b.Other"], ["a.Method", "b.Method", "Other"]),
        (["FedAvg", "mine.FedAvg"], ["FedAvg", "mine.FedAvg"]),
    ],
)
def test_a_method_of_your_own_is_named_by_its_class_if_that_is_unique(algorithms, names, tmp_path):
    for number, algorithm in enumerate(algorithms):
        write_run(tmp_path / f"{number}", changed(algorithm=algorithm, seed=0, arguments={}), rounds_of([0.5]))
    assert group_names(compare_folder(tmp_path)) == names


def test_runs_with_equal_settings_are_one_group(tmp_path):
    write(tmp_path, seed=0)
    write(tmp_path, seed=1)
    comparison = compare_folder(tmp_path)
    assert (comparison.keys, comparison.columns, len(comparison.groups)) == ([], [], 1)
    assert re.search(r"^all runs +2 +0.7500 ± 0.0000", run("compare", tmp_path).out, re.M)


def test_a_null_option_that_an_older_version_lacks_is_no_difference(tmp_path):
    write(tmp_path, seed=0)
    write(tmp_path, seed=1, held_out_clients=None)
    assert len(compare_folder(tmp_path).groups) == 1


def test_groups_are_sorted_by_value_and_nan_equals_nan(tmp_path):
    for tau in (0.5, 0.08, 10, None, float("nan"), "auto"):
        for seed in (0, 1):
            write(tmp_path, "FedSKC", seed, arguments={"tau": tau})
    comparison = compare_folder(tmp_path)
    assert group_names(comparison)[0] == "null"
    assert [name for name in group_names(comparison) if name != "nan"] == ["null", "0.08", "0.5", "10", "auto"]
    assert [len(group.runs) for group in comparison.groups] == [2] * 6


def test_last_and_best_values_of_groups(study):
    folder, ends = study
    comparison = compare_folder(folder, "algorithm", "alpha")
    for group in comparison.groups:
        key = group.values["algorithm"], group.values["scenario.partition.alpha"]
        series = [accs for (algorithm, alpha, _), accs in ends.items() if (algorithm, alpha) == key]
        last, best = [accs[-1] for accs in series], [max(accs) for accs in series]
        assert group.last[:2] == pytest.approx((statistics.fmean(last), statistics.stdev(last)), rel=1e-9)
        assert group.best[:2] == pytest.approx((statistics.fmean(best), statistics.stdev(best)), rel=1e-9)
        assert group.last.n == len(series)
        assert group.bytes[:2] == (5 * 30 + 15, 0)


def test_the_best_of_a_loss_is_the_lowest(tmp_path):
    write(tmp_path, accs=[0.5, 0.25, 0.375], name="global/loss")
    comparison = compare_folder(tmp_path, metric="global/loss", targets=[0.4])
    assert (comparison.groups[0].best.mean, comparison.groups[0].last.mean) == (0.25, 0.375)
    assert comparison.groups[0].reach[0.4].rounds.mean == 2
    assert compare_folder(tmp_path, metric="global/loss", lower=False).groups[0].best.mean == 0.5


@pytest.mark.parametrize(
    ("metric", "best"),
    [("client/r2_score_mean", 0.5), ("global/mean_absolute_error", 0.25), ("client/tweedie_deviance_score_mean", 0.25)],
)
def test_the_best_is_the_lowest_of_errors_and_the_highest_of_scores(tmp_path, metric, best):
    write(tmp_path, accs=[0.5, 0.25, 0.375], name=metric)
    comparison = compare_folder(tmp_path, metric=metric)
    assert (comparison.lower, comparison.groups[0].best.mean) == (best == 0.25, best)
    errors = ("global/mae", "client/mae_mean", "client/mean_squared_error_weighted", "client/acc_std")
    assert all(map(is_lower_better, (*errors, "client/calibration_error_worst_decile", "client_3/train_loss")))


def test_the_cost_of_reaching_a_target(tmp_path, rng):
    series = [rng.uniform(0.3, 0.8, 12) for _ in range(5)]
    for seed, accs in enumerate(series):
        rows = rounds_of(accs.tolist(), every=3, up=100 + seed, seconds=0.25 + seed)
        write_run(tmp_path / str(seed), changed(seed=seed), rows)
    for target in (0.35, 0.6, 0.7, 0.79, 0.9):
        reach = compare_folder(tmp_path, targets=[target]).groups[0].reach[target]
        ends, sent, seconds = [], [], []
        for seed, accs in enumerate(series):
            for round in range(3, 13, 3):
                if accs[round - 1] >= target:
                    ends.append(round)
                    sent.append(sum(100 + seed + i + 2 * (100 + seed) for i in range(1, round + 1)))
                    seconds.append(sum((0.25 + seed) * i for i in range(1, round + 1)))
                    break
        assert (reach.reached, reach.of) == (len(ends), 5)
        for figure, expected in ((reach.rounds, ends), (reach.bytes, sent), (reach.seconds, seconds)):
            assert (figure and figure.mean) == (pytest.approx(statistics.fmean(expected)) if expected else None)


def test_the_newest_finished_one_of_equal_runs_is_kept(tmp_path):
    old, new, newest = (write(tmp_path, accs=[acc]) for acc in (0.1, 0.2, 0.3))
    for age, folder in ((30, old), (10, new)):
        os.utime(folder / "metrics.csv", (time.time() - age,) * 2)
    (newest / "final" / "summary.json").unlink()
    other = write(tmp_path, seed=1, accs=[0.4])
    with pytest.warns(UserWarning, match="left out") as caught:
        kept = comparable_runs(open_runs(tmp_path))
    assert {item.run_dir for item in kept} == {new, other}
    unfinished, repeated = (str(each.message) for each in caught)
    assert unfinished.startswith(f"1 run, {newest}: not finished")
    assert "--unfinished" in unfinished
    assert repeated.startswith(f"1 run, {old}: the same settings")
    with pytest.warns(UserWarning, match="2 runs, .*: the same settings and seed"):
        assert {item.run_dir for item in comparable_runs(open_runs(tmp_path), unfinished=True)} == {new, other}


def test_runs_without_a_config_are_left_out(tmp_path):
    write_run(tmp_path / "a", config=None)
    warning = pytest.warns(UserWarning, match=r"1 run, \S+/a: no config.yaml, left out")
    with warning, pytest.raises(ConfigError, match="no run is left to compare"):
        comparable_runs(open_runs(tmp_path))


# --- Differences ---


def test_groups_are_compared_with_fedavg_at_equal_other_settings(study):
    folder, ends = study
    comparison = compare_folder(folder, "algorithm", "alpha")
    assert comparison.reference == "FedAvg"
    assert group_names(comparison)[:2] == ["FedAvg 0.1", "FedAvg 0.5"]
    tested = {}
    for group in comparison.groups:
        algorithm, alpha = group.values.values()
        assert group.reference == (algorithm == "FedAvg")
        if algorithm == "FedAvg":
            assert group.difference is None
            continue
        seeds = [seed for seed in range(4) if (algorithm, alpha, seed) in ends]
        ours = [ends[algorithm, alpha, seed][-1] for seed in seeds]
        theirs = [ends["FedAvg", alpha, seed][-1] for seed in seeds]
        assert group.difference.pairs == len(seeds)
        assert group.difference.mean == pytest.approx(np.mean(ours) - np.mean(theirs), rel=1e-9)
        tested[algorithm, alpha] = group.difference, stats.ttest_rel(ours, theirs).pvalue
    expected = brute_force_holm([p for _, p in tested.values()])
    assert [comparison.p for comparison, _ in tested.values()] == pytest.approx(
        [p for _, p in tested.values()], rel=1e-9
    )
    assert [comparison.p_holm for comparison, _ in tested.values()] == pytest.approx(expected, rel=1e-9)
    assert sorted(comparison.pairs for comparison, _ in tested.values()) == [3, 4, 4, 4]


def test_stars_depend_on_the_corrected_p_value(tmp_path):
    for seed in range(6):
        write(tmp_path, "FedAvg", seed, [0.5])
        write(tmp_path, "FedDW", seed, [0.6 + 0.001 * seed])
        write(tmp_path, "FedSKC", seed, [0.5 + (-1) ** seed * 0.01 * seed])
    found = {str(group.values["algorithm"]): group.difference for group in compare_folder(tmp_path).groups}
    assert found["FedDW"].stars == "***"
    assert found["FedSKC"].stars == ""
    for p, stars in ((0.06, ""), (0.05, ""), (0.049, "*"), (0.009, "**"), (0.0009, "***")):
        assert found["FedDW"]._replace(p=0.0, p_holm=p).stars == stars


@pytest.mark.parametrize(("many", "one", "mean"), [("FedDW", "FedAvg", 0.1), ("FedAvg", "FedDW", -0.1)])
def test_runs_are_paired_by_settings_that_vary_in_one_group(many, one, mean, tmp_path):
    """Runs are compared at equal alphas; a run without a partner is not used."""
    write(tmp_path, many, 0, [0.6], alpha=0.1)
    write(tmp_path, many, 0, [0.9], alpha=0.5)
    write(tmp_path, one, 0, [0.5], alpha=0.1)
    difference = compare_folder(tmp_path, "algorithm").groups[1].difference
    assert (difference.pairs, difference.mean) == (1, pytest.approx(mean))


def test_runs_that_differ_in_an_argument_of_the_algorithm_are_paired_by_their_mean(tmp_path):
    write(tmp_path, "FedAvg", 0, [0.5])
    for mu, acc in ((1, 0.6), (10, 0.8)):
        write(tmp_path, "FedDW", 0, [acc], arguments={"mu": mu})
    comparison = compare_folder(tmp_path, "algorithm")
    assert (comparison.groups[1].difference.pairs, comparison.groups[1].difference.mean) == (1, pytest.approx(0.2))
    assert "algorithm.mu" in comparison.remarks[0]


def test_a_setting_that_was_tuned_for_each_method_is_reported_and_does_not_prevent_pairs(tmp_path):
    for seed in (0, 1):
        write(tmp_path, "FedAvg", seed, [0.5], lr=0.1)
        write(tmp_path, "FedDW", seed, [0.5 + seed / 10], lr=0.2)
    comparison = compare_folder(tmp_path, "algorithm")
    assert comparison.groups[1].difference.pairs == 2
    assert comparison.remarks == ["groups differ in optimizer.lr, too"]
    assert compare_folder(tmp_path).groups[1].difference is None  # grouped by lr, too, no FedAvg run has FedDW's lr


def test_the_reference_may_be_any_group(tmp_path):
    for tau in (0.08, 0.1):
        for seed in (0, 1):
            write(tmp_path, "FedSKC", seed, [tau + seed * tau], arguments={"tau": tau})
    assert compare_folder(tmp_path).reference == ""
    comparison = compare_folder(tmp_path, reference={"tau": 0.1})
    assert (comparison.reference, group_names(comparison)) == ("tau=0.1", ["0.1", "0.08"])
    assert comparison.groups[1].difference.mean == pytest.approx(0.12 - 0.15)
    same = compare_folder(tmp_path, reference={"algorithm": "FedSKC", "tau": 0.1})  # all groups have this algorithm
    assert (same.reference, group_names(same)) == ("tau=0.1", ["0.1", "0.08"])
    with pytest.raises(ConfigError, match=r"^--reference: algorithm "):
        compare_folder(tmp_path, reference={"algorithm": "FedDW", "tau": 0.1})
    with pytest.raises(ConfigError, match=r"--reference: no group has tau=0.2. Available: 0.08, 0.1"):
        compare_folder(tmp_path, reference={"tau": 0.2})
    with pytest.raises(ConfigError, match=r"^--reference: optimizer.lr "):
        compare_folder(tmp_path, reference={"lr": 0.1})
    with pytest.raises(ConfigError, match=r"^--reference: .*'ta'.* tau"):
        compare_folder(tmp_path, reference={"ta": 0.1})


def test_the_reference_must_be_chosen_among_several_groups_of_fedavg(tmp_path):
    for weighting in ("samples", "uniform"):
        write(tmp_path, "FedAvg", 0, [0.5], arguments={"weighting": weighting})
    write(tmp_path, "FedDW", 0, [0.75])
    comparison = compare_folder(tmp_path)
    assert comparison.reference == ""
    reason = "FedAvg matches 2 groups with otherwise equal settings"
    assert comparison.remarks[0].startswith(f"no comparison with FedAvg: {reason}")
    with pytest.raises(ConfigError, match=r"--reference: FedAvg matches 2 groups .* weighting=samples, FedAvg wei"):
        compare_folder(tmp_path, reference={"algorithm": "FedAvg"})
    chosen = compare_folder(tmp_path, reference={"algorithm": "FedAvg", "weighting": "uniform"})
    assert [bool(group.difference) for group in chosen.groups] == [False, True, True]
    assert chosen.groups[0].values["algorithm.weighting"] == "uniform"
    assert chosen.groups[0].reference


# --- The printed tables ---


def test_the_table_has_one_row_per_group_and_explains_its_marks(study):
    folder, _ = study
    code, out, err = run("compare", folder, "--by", "algorithm,alpha", "--target", "0.6", "0.99")
    assert (code, err) == (0, "")
    header, _, *lines = out.splitlines()
    assert re.split(r"  +", header) == [
        *("algorithm", "alpha", "seeds", "last", "best", "to FedAvg", "bytes"),
        *("R_0.6", "bytes to 0.6", "s to 0.6", "R_0.99", "bytes to 0.99", "s to 0.99"),
    ]
    comparison = compare_folder(folder, "algorithm", "alpha", targets=[0.6, 0.99])
    cells = {tuple(re.split(r"  +", line)[:2]): re.split(r"  +", line) for line in lines[:6]}
    for group in comparison.groups:
        row = cells[group.values["algorithm"], str(group.values["scenario.partition.alpha"])]
        assert row[2] == ("3 of 4" if len(group.runs) == 3 else "4")
        assert row[3] == f"{group.last.mean:.4f} ± {group.last.std:.4f}"
        assert row[4] == f"{group.best.mean:.4f} ± {group.best.std:.4f}"
        assert row[-7:] == ["165 B", *row[-6:-3], "not reached", "-", "-"]
        if group.difference:
            assert row[5].startswith(f"{group.difference.mean:+.4f} ± {group.difference.std:.4f}")
    assert "* p < 0.05, ** p < 0.01, *** p < 0.001: paired t-test" in out
    assert "seeds: 0, 1, 2, 3; some groups lack some." in out


def test_the_number_of_runs_that_reach_a_target_is_shown(tmp_path):
    for seed, acc in enumerate((0.7, 0.75, 0.65)):
        write(tmp_path, seed=seed, accs=[0.1, acc])
    out = run("compare", tmp_path, "--target", "0.7").out
    assert re.search(r"2\.0 \(2 of 3\) +63 B +1\.5$", out, re.M)


def test_private_groups_have_their_largest_epsilon_in_a_column(tmp_path):
    for seed, epsilons in ((0, (2.5, 4.0)), (1, (1.5, 3.0))):
        private = [row | {"privacy/epsilon": each} for row, each in zip(rounds_of([0.5, 0.6]), epsilons, strict=True)]
        write_run(tmp_path / f"private-{seed}", changed(seed=seed, dp=1), private)
        record = [row | {"privacy/record_epsilon": math.inf} for row in rounds_of([0.5, 0.6])]
        write_run(tmp_path / f"record-{seed}", changed(seed=seed, dp=2), record)
        write_run(tmp_path / f"open-{seed}", changed(seed=seed, dp=0), rounds_of([0.7, 0.8]))
    shown = run("compare", str(tmp_path), "--by", "dp").out.splitlines()
    assert re.split("  +", shown[0])[-3:] == ["privacy epsilon", "privacy record_epsilon", "bytes"]
    assert [line.split()[-4:-2] for line in shown[2:5]] == [["-", "-"], ["4", "-"], ["-", "inf"]]
    assert any(line.startswith("privacy epsilon: ") for line in shown)
    (tmp_path / "table.csv").write_text(run("compare", str(tmp_path), "--by", "dp", "--format", "csv").out)
    with (tmp_path / "table.csv").open() as file:
        assert [row["privacy/epsilon"] for row in csv.DictReader(file)] == ["", "4.0", ""]


def test_methods_without_the_metric_get_a_dash_and_a_remark(tmp_path):
    write(tmp_path, "FedAvg", accs=[0.5])
    write(tmp_path, "Local", accs=[0.75], name="client/acc_mean")
    out = run("compare", tmp_path, "--target", "0.5").out
    assert re.search(r"^Local +1 +- +- +- +31 B +- +- +-$", out, re.M)
    assert re.search("^no global/acc in Local: .* client/acc_mean ", out, re.M)
    out = run("compare", tmp_path, "--metric", "client/acc_mean").out
    assert re.search(r"^Local +1 +0.7500 ", out, re.M)
    assert "no client/acc_mean in FedAvg." in out


def test_a_group_in_which_some_runs_lack_the_metric_gets_a_remark(tmp_path):
    write(tmp_path, seed=0, accs=[0.5])
    write(tmp_path, seed=1, accs=[0.75], name="client/acc_mean")
    comparison = compare_folder(tmp_path)
    assert comparison.groups[0].last == (0.5, None, 1)
    (remark,) = comparison.remarks
    assert "global/acc" in remark


@pytest.mark.filterwarnings("always")
def test_unfinished_runs_are_included_on_request(tmp_path):
    write(tmp_path, "FedAvg", 0, [0.5])
    write(tmp_path, "FedAvg", 1, [0.75], finished=False)
    code, out, err = run("compare", tmp_path)
    assert code == 0
    assert re.search(r"^all runs +1 +0.5000 ", out, re.M)
    assert "1 run, " in err
    assert "not finished, left out (--unfinished" in err
    code, out, err = run("compare", tmp_path, "--unfinished")
    assert (code, err) == (0, "")
    assert re.search(r"^all runs +2, 1 unfinished +0.6250 ± 0.1768 ", out, re.M)


def test_across_shows_the_values_of_a_setting_as_columns(study):
    folder, _ = study
    for run_folder in folder.glob("FedDW*-0.5-*"):
        shutil.rmtree(run_folder)
    comparison = compare_folder(folder)
    out = run("compare", folder, "--across", "alpha").out
    header, _, *lines = out.splitlines()
    assert re.split(r"  +", header) == ["algorithm", "alpha=0.1", "alpha=0.5"]
    cells = {line.split()[0]: re.split(r"  +", line)[1:] for line in lines[:3]}
    for group in comparison.groups:
        cell = cells[group.values["algorithm"]][0 if group.values["scenario.partition.alpha"] == 0.1 else 1]
        assert cell.startswith(f"{group.last.mean:.4f} ± {group.last.std:.4f}")
        assert cell.endswith("(3 of 4)") == (len(group.runs) == 3)
    assert cells["FedDW"][1] == "missing"
    by_method = run("compare", folder, "--across", "algorithm", "--format", "csv").out
    assert by_method.splitlines()[0] == "alpha,algorithm=FedAvg,algorithm=FedDW,algorithm=FedSKC"


def test_across_adds_its_key_to_by(tmp_path):
    """Also an argument of a method, which `--by algorithm` shows in the column of the algorithm otherwise."""
    write(tmp_path, accs=[0.5])
    for mu, acc in ((0.1, 0.25), (1, 0.75)):
        write(tmp_path, "FedDW", arguments={"mu": mu}, accs=[acc])
    for by in ("algorithm", "algorithm,mu"):
        out = run("compare", tmp_path, "--by", by, "--across", "mu").out
        header, _, first, second = (re.split("  +", line) for line in out.splitlines()[:4])
        assert header == ["algorithm", "no mu", "mu=0.1", "mu=1"]
        assert (first, second) == (["FedAvg", "0.5000", "missing", "missing"], ["FedDW", "missing", "0.2500", "0.7500"])
    error = "fl-lightning: error: --across: {}"
    unknown = run("compare", tmp_path, "--by", "algorithm", "--across", "lamb")
    assert unknown.err == error.format("no run has a setting 'lamb'\n")
    assert "--across: seed cannot group runs" in run("compare", tmp_path, "--by", "mu", "--across", "seed").err


def test_columns_are_sorted_and_keys_shortened(tmp_path):
    for algorithm, alpha in (("FedAvg", 0.5), ("FedDW", 0.1), ("FedDW", 0.5)):
        write(tmp_path, algorithm, alpha=alpha)
    assert run("compare", tmp_path, "--across", "alpha").out.split()[:3] == ["algorithm", "alpha=0.1", "alpha=0.5"]
    write(tmp_path, "FedDW", alpha=10)
    write(tmp_path, "FedDW", alpha=2)
    heads = run("compare", tmp_path, "--across", "alpha").out.split()[1:5]
    assert heads == ["alpha=0.1", "alpha=0.5", "alpha=2", "alpha=10"]
    assert shorten_keys(["algorithm.alpha", "scenario.partition.alpha", "seed"]) == [
        "algorithm.alpha",
        "partition.alpha",
        "seed",
    ]


def test_across_refuses_an_ambiguous_key(tmp_path):
    for own, alpha in ((1, 0.1), (2, 0.5)):
        write(tmp_path, "FedAMP", alpha=alpha, arguments={"alpha": own})
    code, out, err = run("compare", tmp_path, "--across", "alpha")
    assert (code, out) == (2, "")
    assert re.search("--across: alpha .*: algorithm.alpha, scenario.partition.alpha", err)


def test_csv_has_full_keys_and_unrounded_values(study):
    folder, _ = study
    code, out, err = run("compare", folder, "--format", "csv", "--target", "0.6")
    assert (code, err) == (0, "")
    rows = list(csv.DictReader(io.StringIO(out)))
    comparison = compare_folder(folder, targets=[0.6])
    assert len(rows) == 6
    for row, group in zip(rows, comparison.groups, strict=True):
        assert row["algorithm"] == group.values["algorithm"]
        assert float(row["scenario.partition.alpha"]) == group.values["scenario.partition.alpha"]
        figures = {"last_mean": group.last.mean, "last_std": group.last.std, "best_mean": group.best.mean}
        figures |= {"best_std": group.best.std, "bytes": 165.0, "runs": len(group.runs), "unfinished": 0}
        reach = group.reach[0.6]
        figures |= {"R_0.6_mean": reach.rounds and reach.rounds.mean, "bytes_to_0.6": reach.bytes and reach.bytes.mean}
        figures |= {"seconds_to_0.6": reach.seconds and reach.seconds.mean}
        difference = group.difference
        for name, column in (("mean", "difference_mean"), ("effect", "difference_effect"), ("p", "p")):
            figures[column] = difference and getattr(difference, name)
        figures |= {"p_holm": difference and difference.p_holm, "pairs": difference and difference.pairs}
        for column, figure in figures.items():
            assert row[column] == ("" if figure is None else str(figure)), column
        assert row["R_0.6_reached"] == f"{reach.reached} of {reach.of}"
        assert row["missing_seeds"] == ("3" if len(group.runs) == 3 else "")
        assert row["seeds"] == " ".join(map(str, group.seeds))
        assert row["reference"] == str(group.reference)


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("-8.33 ± 1.00 **", r"$-$8.33 $\pm$ 1.00 **"),
        ("-.5", "$-$.5"),
        ("-inf", "$-$inf"),
        ("[-0.1, -0.05]", "[$-$0.1, $-$0.05]"),
        ("mu=-1e-05", "mu=$-$1e$-$05"),
        ("+0.5", "+0.5"),
        ("-", "-"),
        *((word, word) for word in ("FedAvg-2", "2026-11-25", "R-50", "non-IID", "-info", "CIFAR-10-LT")),
    ],
)
def test_in_latex_a_negative_number_has_a_minus_sign_and_a_word_its_hyphen(cell, expected):
    header, row = (line for line in ResultTable([cell], [[cell]]).latex().splitlines() if line.endswith(r"\\"))
    assert header == row == rf"  {expected} \\"


def test_latex(tmp_path):
    write(tmp_path, "FedAvg", 0, [0.5], arguments={"note": "50%_of & {all} #1 $x$ a~b^c\\d <|>"})
    write(tmp_path, "FedAvg", 0, [0.75], arguments={"note": "b"})
    out = run("compare", tmp_path, "--format", "latex").out
    lines = out.splitlines()
    assert lines[0].startswith(r"\begin{tabular}{lrrrr}")
    assert [line.strip() for line in lines if "rule" in line] == [r"\toprule", r"\midrule", r"\bottomrule"]
    escaped = (
        r"50\%\_of \& \{all\} \#1 \$x\$ a\textasciitilde{}b\textasciicircum{}c\textbackslash{}d "
        r"\textless{}\textbar{}\textgreater{}"
    )
    assert rf"  {escaped} & 1 & 0.5000 & 0.5000 & 31 B \\" in lines
    assert r"  b & 1 & \textbf{0.7500} & \textbf{0.7500} & 31 B \\" in lines
    assert all(line.startswith("% ") for line in lines[lines.index(r"\end{tabular}") + 1 :])


@pytest.mark.parametrize("form", ["table", "latex", "markdown", "csv"])
def test_percent_multiplies_the_metric_and_its_differences_by_100(form, tmp_path):
    for seed, (ours, theirs) in enumerate([(0.5, 0.25), (0.75, 0.25)]):
        write(tmp_path, "FedAvg", seed, [theirs, theirs / 2])
        write(tmp_path, "FedSKC", seed, [ours])
    out = run("compare", tmp_path, "--percent", "--format", form, "--target", "0.5").out
    if form == "csv":
        fedavg, fedskc = csv.DictReader(io.StringIO(out))
        names = [f"{name}_{what}" for name in ("last", "best", "difference") for what in ("mean", "std")]
        assert [float(fedskc[name]) for name in names] == pytest.approx([62.5, 312.5**0.5] * 2 + [50, 312.5**0.5])
        assert [float(fedavg[name]) for name in names[:4]] == [12.5, 0, 25, 0]
        assert float(fedskc["R_0.5_mean"]) == 1
    else:
        text = out.replace("*", "").replace(r"\textbf{", "").replace("}", "").replace("$\\pm$", "±")
        assert re.search(r"12.50 ± 0.00\W+25.00 ± 0.00\W+(?=[a-z\d]|41)", text)
        assert re.search(r"62.50 ± 17.68\W+62.50 ± 17.68\W+\+50.00 ± 17.68", text)
        assert "global/acc in percent" in out
    across = run("compare", tmp_path, "--percent", "--across", "algorithm").out
    assert re.search(r"12.50 ± 0.00 +62.50 ± 17.68", across)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--percent", "--metric", "global/loss"],
            "percent: global/loss is no fraction: one value is 2. Leave it out.",
        ),
        (["--target", "0.5", "30"], "--target: 30 is above 1, but global/acc is a fraction. For 30 %, set it to 0.3"),
    ],
)
def test_percentages_of_what_is_no_fraction_are_refused(options, message, tmp_path):
    write(tmp_path, "FedAvg", 0, [0.5])
    write(tmp_path, "FedSKC", 0, [2.0], name="global/loss")
    outcome = run("compare", tmp_path, *options)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.splitlines()[-1] == f"fl-lightning: error: {message}"
    assert run("compare", tmp_path, "--metric", "global/loss", "--target", "1.5").code == 0


def test_the_lowest_loss_is_bold(tmp_path):
    write(tmp_path, "FedAvg", 0, [0.5], name="global/loss")
    write(tmp_path, "FedDW", 0, [0.75], name="global/loss")
    out = run("compare", tmp_path, "--metric", "global/loss", "--format", "markdown").out
    assert "| FedAvg | 1 | **0.5000** | **0.5000** |" in out
    out = run("compare", tmp_path, "--metric", "global/loss", "--mode", "max", "--format", "markdown").out
    assert "| FedDW | 1 | **0.7500** | **0.7500** |" in out


def test_markdown_and_plain_text_are_escaped():
    name = "a|b *c* `d` <e>\n[f](g)\x1b[31m\udcff"
    table = ResultTable(["name", "x"], [[name, "1 ± 2"]], bold={(0, 1)}, notes=["a|b"])
    line = "a|b *c* `d` <e> [f](g)\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}"
    escaped = re.sub(r"([|*`<\[])", r"\\\1", line).replace("> ", "><br>")
    assert table.markdown() == f"| name | x |\n| --- | --: |\n| {escaped} | **1 ± 2** |\n\na\\|b"
    assert table.plain().splitlines()[2] == f"{line}  1 ± 2"
    assert ResultTable(["n", "figure"], [["a", "1"]]).plain().splitlines()[2] == "a       1"
    assert list(csv.reader(io.StringIO(table.csv())))[1] == [line, "1 ± 2"]


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "-1e5x", "'=1\n=2", "-1 ± =2"]
PLAIN = ["", "-", "FedAvg", "a=b", "-1.5", "+2", "-1e-05", "-.5", "-inf", "nan", "-0.5 ± 0.25", "-0.5 ± 0.25 **"]


def test_csv_has_no_formulas():
    table = ResultTable(["=head", "x"], [[cell, "1"] for cell in FORMULAS + PLAIN])
    header, *rows = csv.reader(io.StringIO(table.csv()))
    assert header[0] == "'=head"
    cells = [row[0] for row in rows]
    assert not any(re.match(r"[=+\-@\t\r]", cell) for cell in cells[: len(FORMULAS)])
    assert not any(re.search(r"[\t\r\n]", cell) for cell in cells)
    assert cells[len(FORMULAS) :] == PLAIN


def test_text_of_settings():
    term = {"class_path": f"{PATHS}.Proximal", "init_args": {"mu": 0.01}}
    assert format_setting([term, {"class_path": "mine.Term"}]) == "[Proximal mu=0.01, Term]"
    assert [format_setting(value) for value in (None, True, False, 1e-05, 3, "a", [1, [2]])] == [
        *("null", "true", "false", "1e-05", "3", "a", "[1, [2]]")
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--by", "algoritm"], "--by: no run has a setting 'algoritm'. Did you mean algorithm?"),
        (["--by", "seed"], "--by: seed cannot group runs"),
        (["--by", "data_dir"], "--by: scenario.dataset.data_dir cannot group runs"),
        (["--metric", "globl/acc"], "--metric: no run has 'globl/acc'. Available: comm/down_bytes, comm/up_bytes"),
        (["--across", "seed"], "--across: seed is no key in which these groups differ. Available: algorithm"),
        (["--reference", "FedSCK"], "--reference: no group has FedSCK. Available: FedAvg, FedSKC"),
        (["--format", "html"], "format: got 'html', expected table | csv | latex | markdown"),
        (["--mode", "up"], "mode: got 'up', expected max | min"),
        (["--where", "seed=7"], "none of 2 runs has seed=7"),
    ],
)
def test_a_wrong_option_is_one_line(words, message, tmp_path):
    write(tmp_path, "FedAvg")
    write(tmp_path, "FedSKC")
    code, out, err = run("compare", tmp_path, *words)
    assert (code, out) == (2, "")
    assert err.startswith("fl-lightning: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_runs_and_a_second_group_are_required(tmp_path):
    message = "runs: not given. Write it after the command; `fl-lightning compare --help` shows how"
    assert run("compare") == (2, "", f"fl-lightning: error: {message}\n")
    write(tmp_path, "FedAvg")
    message = "--reference: all runs have the same settings, so there is only one group. Add other runs"
    assert run("compare", tmp_path, "--reference", "Foo") == (2, "", f"fl-lightning: error: {message}\n")


def test_huge_and_non_finite_numbers_are_shown(tmp_path):
    for seed, acc in enumerate(["nan", "inf", "-inf", "9" * 290]):
        folder = write(tmp_path, "FedAvg" if seed < 2 else "FedDW", seed % 2)
        (folder / "metrics.csv").write_text(f"round,global/acc,comm/up_bytes\n1,{acc},{2**70}\n2,0.5,1\n3,{acc},1\n")
    for form in ("table", "csv", "latex", "markdown"):
        code, out, err = run("compare", tmp_path, "--format", form, "--target", "0.5")
        assert (code, err) == (0, "")
        assert "nan" in out


def test_twenty_long_runs_are_compared_in_two_seconds_without_torch(tmp_path):
    for seed in range(5):
        for algorithm in ("FedAvg", "FedDW", "FedSKC", "MOON"):
            write(tmp_path, algorithm, seed, np.linspace(0.1, 0.9 - seed / 100, 200).tolist())
    code = (
        "import sys, time; from fl_lightning.cli.main import main; code = main(sys.argv[1:]);"
        "imported = {'torch', 'lightning', 'pandas', 'wandb', 'scipy.stats'} & set(sys.modules);"
        "print(code, *imported, time.process_time())"
    )
    words = ["compare", str(tmp_path), "--target", "0.5"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    *_, line = done.stdout.splitlines()
    returned, *modules, seconds = line.split()
    assert (returned, modules, done.stderr) == ("0", [], "")
    assert float(seconds) < 2
