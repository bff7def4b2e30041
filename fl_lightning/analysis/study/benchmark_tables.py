"""Format the results of a benchmark: tables of results, of differences and of the tuning, and a CSV file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from fl_lightning.analysis.result_table import ResultTable, format_number, mean_and_std, to_csv
from fl_lightning.analysis.statistics import Difference, Spread, percent, spread
from fl_lightning.analysis.study.benchmark import BenchmarkResult, EntryResult
from fl_lightning.analysis.study.benchmark_file import BenchmarkTable
from fl_lightning.analysis.study.sweep_results import used_seconds
from fl_lightning.evaluation.summary import human_bytes

MISSING = "-"
CSV_HEADER = ["table", "scenario", "method", "metric", "seed", "last", "last10", "best", "untuned_last"]
CSV_HEADER += ["bytes", "seconds", "processor_seconds", "tuning_processor_seconds"]


def tables(result: BenchmarkResult, in_percent: bool = False) -> Iterable[tuple[str, list[ResultTable]]]:
    """Yield a title and up to three formatted tables (results, differences, tuning) for each table of a benchmark.

    Args:
        result: The results.
        in_percent: Show metrics in percent.
    """
    for table in result.benchmark.tables:
        parts = [score_table(result, table, in_percent), difference_table(result, table, in_percent)]
        parts.append(tuning_table(result, table, in_percent))
        yield title(result, table, in_percent), [each for each in parts if each.rows]


def title(result: BenchmarkResult, table: BenchmarkTable, in_percent: bool) -> str:
    """Return the line above a table: the metric, and how the methods were tuned."""
    tuning, seeds = result.benchmark.tuning, ", ".join(map(str, result.benchmark.seeds))
    unit = " in percent" if in_percent else ""
    trials = f"{tuning.trials} trials"
    if tuning.processor_seconds < math.inf:
        trials = f"within {tuning.processor_seconds:g} s of processor time, at most {trials}"
    trials += f", seed{'s' * (len(tuning.seeds) > 1)} {', '.join(map(str, tuning.seeds))}"
    return (
        f"{table.name}: {table.metric}{unit} in the last round, seeds {seeds}; each method is tuned for this metric "
        f"in each scenario ({trials})"
    )


def score_table(result: BenchmarkResult, table: BenchmarkTable, in_percent: bool) -> ResultTable:
    """Return a table of each method's mean ± standard deviation in each scenario, sorted by mean rank.

    The best value of each scenario is in bold.
    """
    scenarios, ranks = list(result.benchmark.scenarios), result.ranks(table.name)
    methods = sorted(table.methods, key=lambda method: fmean(ranks[method]))
    spreads = [[result.result(table.name, scenario, method).spread() for scenario in scenarios] for method in methods]
    rows = [
        [method, *(format_metric(each, in_percent) for each in row), f"{fmean(ranks[method]):.2f}"]
        for method, row in zip(methods, spreads, strict=True)
    ]
    bold = {
        (i, j + 1)
        for j in range(len(scenarios))
        for i, method in enumerate(methods)
        if spreads[i][j] and ranks[method][j] == min(each[j] for each in ranks.values())
    }
    header = ["method", *(scenario or table.metric for scenario in scenarios), "rank"]
    notes = ["mean ± standard deviation over seeds (n - 1). rank: mean over scenarios of the rank by mean."]
    if result.benchmark.untuned:
        before = result.ranks(table.name, untuned=True)
        rows = [[*row, f"{fmean(before[method]):.2f}"] for method, row in zip(methods, rows, strict=True)]
        header.append("rank untuned")
        notes.append("rank untuned: the rank with the values of the configs, the same learning rate for all methods.")
    failed = (f"{one.entry.name}: {reason}" for one in result.of_table(table.name) for reason in one.failures)
    return ResultTable(header, rows, bold=bold, notes=[*notes, *failed])


def difference_table(result: BenchmarkResult, table: BenchmarkTable, in_percent: bool) -> ResultTable:
    """Return a table of each method's difference from the tuned reference method, by scenario.

    It has no rows if the reference is not a method of `table`.
    """
    scenarios, reference = list(result.benchmark.scenarios), result.benchmark.reference
    rows = []
    for method in table.methods if reference in table.methods else ():
        if method != reference:
            pairs = (
                (result.result(table.name, scenario, method), result.result(table.name, scenario, reference))
                for scenario in scenarios
            )
            rows.append([method, *(format_interval(ours.difference(base), in_percent) for ours, base in pairs)])
    note = f"difference from the tuned {reference} with the same seeds: mean [95 % confidence interval, paired t-test]."
    return ResultTable([f"minus {reference}", *(name or table.metric for name in scenarios)], rows, notes=[note])


def tuning_table(result: BenchmarkResult, table: BenchmarkTable, in_percent: bool) -> ResultTable:
    """Return a table of trials, tuned values, metrics, bytes and seconds: one row per scenario and method."""
    header = ["scenario", "method", "trials", "tuned values", "validation", "untuned", "last 10", "best"]
    rows, edges = [], False
    for one in result.of_table(table.name):
        best, edges = one.tuned.best, edges or bool(one.tuned.edges)
        readings = [one.spread(untuned=True), one.spread("last10"), one.spread("best")]
        rows.append(
            [
                one.entry.scenario,
                one.entry.method,
                format_trials(one),
                format_values(one),
                format_metric(spread([best.value] if best and best.value is not None else []), in_percent),
                *(format_metric(each, in_percent) for each in readings),
                MISSING if one.bytes is None else human_bytes(one.bytes),
                MISSING if one.processor_seconds is None else f"{one.processor_seconds:.1f}",
                f"{used_seconds(one.tuned.trials):.1f}",
            ]
        )
    notes = [
        "validation: mean of the best trial over the tuning's seeds, on the validation split. last 10 and best: mean "
        "of the last ten evaluated rounds, and the best round, on the test set. bytes and run s: bytes and processor "
        "seconds of one run. tuning s: processor seconds of all trials."
    ]
    if edges:
        notes.append("* at the edge of its range: a wider range may give better results.")
    return ResultTable([*header, "bytes", "run s", "tuning s"], rows, words=4, notes=notes)


def format_trials(one: EntryResult) -> str:
    """Return a method's number of tuning trials as text, such as `30 (2 failed)`.

    The parentheses count the trials that are not complete, by state.
    """
    states = [trial.state for trial in one.tuned.trials]
    others = [f"{states.count(state)} {state}" for state in dict.fromkeys(states) if state != "complete"]
    return f"{len(states)} ({', '.join(others)})" if others else str(len(states))


def format_values(one: EntryResult) -> str:
    """Return the tuned values of a method's options as text. A star marks a value at the edge of its range."""
    best = one.tuned.best
    if best is None:
        return MISSING
    return ", ".join(
        f"{key.removeprefix('algorithm.')}={_short(value)}{'*' * (key in one.tuned.edges)}"
        for key, value in best.settings.items()
    )


def _short(word: str) -> str:
    """Return a number with three significant digits, and other text as it is."""
    try:
        return f"{float(word):.3g}"
    except ValueError:
        return word


def format_metric(figures: Spread | None, in_percent: bool) -> str:
    """Return mean ± standard deviation as text; a dash if missing."""
    shown = percent(figures) if in_percent else figures
    return mean_and_std(shown.mean, shown.std, ".2f" if in_percent else ".4f") if shown else MISSING


def format_interval(difference: Difference | None, in_percent: bool) -> str:
    """Return a difference as text, with its 95 % confidence interval if there is one."""
    shown = percent(difference) if in_percent else difference
    if shown is None:
        return MISSING
    form = "+.2f" if in_percent else "+.4f"
    interval = shown.interval()
    ends = f" [{', '.join(format_number(end, form) for end in interval)}]" if interval else ""
    return format_number(shown.mean, form) + ends


def as_markdown(result: BenchmarkResult, in_percent: bool = False) -> str:
    """Return all tables of a benchmark as Markdown."""
    parts = []
    for heading, found in tables(result, in_percent):
        parts += [f"**{heading}.**", *(each.markdown() for each in found)]
    return "\n\n".join(parts) + "\n"


def as_csv(result: BenchmarkResult) -> str:
    """Return a benchmark's results as CSV with all digits: one line per table, scenario, method and seed."""
    lines: list[Sequence[object]] = [CSV_HEADER]
    for table in result.benchmark.tables:
        for one in result.of_table(table.name):
            readings = [one.values(what) for what in ("last", "last10", "best")] + [one.values(untuned=True)]
            for seed in result.benchmark.seeds:
                entry = one.entry
                figures = [values.get(seed) for values in readings]
                costs = [one.bytes, one.seconds, one.processor_seconds, used_seconds(one.tuned.trials)]
                lines.append([table.name, entry.scenario, entry.method, table.metric, seed, *figures, *costs])
    return to_csv(lines)
