"""`fl-lightning compare`: compare groups of runs in a table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.comparison import Comparison, across_values, comparable_runs, compare
from fl_lightning.analysis.comparison_cells import difference_note, format_difference, format_spread
from fl_lightning.analysis.result_table import ResultTable
from fl_lightning.analysis.run_groups import Group, Reach
from fl_lightning.analysis.statistics import Difference, Spread
from fl_lightning.core.errors import ConfigError
from fl_lightning.core.terminal import echo
from fl_lightning.evaluation.summary import ARCHITECTURE_COLUMN, architectures_of, human_bytes, label_of, model_metrics
from fl_lightning.runs.reader import Run
from fl_lightning.runs.search import conditions, open_runs


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Compare groups of runs, and print the comparison as a table."""
    runs = comparable_runs(open_runs(given.runs, given.where), given.unfinished)
    compare_by = partial(
        compare,
        runs,
        by=grouping_keys(given.by),
        lower=None if given.mode is None else given.mode == "min",
        reference=reference_settings(given.reference),
        targets=given.target,
        across=given.across,
    )
    if given.architectures:
        if given.across:
            raise ConfigError("--architectures: the columns are architectures, not values of --across. Leave one out.")
        found = {name: compare_by(metric=column) for name, column in architecture_columns(runs, given.metric).items()}
        print_table(architecture_table(found, given.percent), given.format)
    else:
        print_comparison(compare_by(metric=given.metric), given.format, given.percent)
    return 0


def grouping_keys(text: str) -> list[str]:
    """Return the keys that `--by` gives, separated by commas."""
    keys = text.split(",") if text else []
    if "" in keys:
        raise ConfigError(f"--by: {text!r} has an empty name. Give keys as a,b,c, or leave it out")
    return keys


def reference_settings(words: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the settings that `--reference` gives, as `KEY=VALUE` or as the name of an algorithm."""
    names = [word for word in words or () if "=" not in word]
    if len(names) > 1:
        raise ConfigError(f"--reference: {' and '.join(names)} cannot both be the reference. Name one algorithm")
    return conditions([word if "=" in word else f"algorithm={word}" for word in words]) if words else None


def print_comparison(comparison: Comparison, form: str, percent: bool = False) -> None:
    """Print a comparison as a table.

    Args:
        comparison: The comparison.
        form: The format: `table`, `csv`, `latex` or `markdown`.
        percent: Show the metric in percent.
    """
    comparison = comparison.in_percent() if percent else comparison
    build = pivot_table if comparison.across else data_table if form == "csv" else group_table
    print_table(build(comparison), form)


def print_table(result: ResultTable, form: str) -> None:
    """Print a table. In the format `csv`, its notes go to stderr."""
    writers = {"table": result.plain, "csv": result.csv, "latex": result.latex, "markdown": result.markdown}
    echo(writers[form]())
    if form == "csv":
        echo("".join(f"{note}\n" for note in result.notes), end="", to_stderr=True)


def group_table(comparison: Comparison) -> ResultTable:
    """Return a comparison as a table for human readers: one row per group of runs, with rounded values."""
    heads = shorten_keys(comparison.columns) or ["group"]
    difference = [f"to {comparison.reference}"] if comparison.reference else []
    epsilons = epsilon_columns(comparison)
    header = [*heads, "seeds", "last", "best", *difference, *map(label_of, epsilons), "bytes"]
    for target in comparison.targets:
        header += [f"R_{target:g}", f"bytes to {target:g}", f"s to {target:g}"]
    rows = []
    for group in comparison.groups:
        names = [group.names[key] for key in comparison.columns] or ["all runs"]
        spreads = [format_spread(spread, comparison.digits) for spread in (group.last, group.best)]
        row = [*names, format_seeds(group, comparison), *spreads]
        row += [format_difference(group, comparison.digits)] if comparison.reference else []
        row += [f"{group.epsilons[name]:.4g}" if name in group.epsilons else "-" for name in epsilons]
        row.append(human_bytes(group.bytes.mean) if group.bytes else "-")
        rows.append(row + [cell for target in comparison.targets for cell in format_reach(group.reach[target])])
    last, best = ([getattr(group, name) for group in comparison.groups] for name in ("last", "best"))
    bold = {(i, len(heads) + 1) for i in best_rows(last, comparison)}
    bold |= {(i, len(heads) + 2) for i in best_rows(best, comparison)}
    lines = notes(comparison, "in the last evaluated and in the best round", comparison.targets)
    lines += ["privacy epsilon: the largest of a group's runs, after their last round."] * bool(epsilons)
    return ResultTable(header, rows, len(heads), bold, lines)


def pivot_table(comparison: Comparison) -> ResultTable:
    """Return a comparison as a pivot table of the metric, with one column for each value of a chosen setting.

    The setting is `comparison.across`, and the metric is that of the last evaluated round.
    """
    key, columns = comparison.across, across_values(comparison)
    others = [other for other in comparison.columns if other != key]
    cells = {(tuple(group.names[other] for other in others), group.names[key]): group for group in comparison.groups}
    lines = list(dict.fromkeys(line for line, _ in cells))
    width = max(len(others), 1)
    table = [[cells.get((line, column)) for column in columns] for line in lines]
    last = [[group and group.last for group in row] for row in table]
    bold = {(i, width + j) for j, column in enumerate(zip(*last, strict=True)) for i in best_rows(column, comparison)}
    rows = [
        [*(line or ["all runs"]), *(format_cell(group, comparison) for group in row)]
        for line, row in zip(lines, table, strict=True)
    ]
    head = shorten_keys([key])[0]
    titles = [f"{head}={column}" if column else f"no {head}" for column in columns]
    header = [*(shorten_keys(others) or ["group"]), *titles]
    return ResultTable(header, rows, width, bold, notes(comparison, "in the last evaluated round", []))


def epsilon_columns(comparison: Comparison) -> list[str]:
    """Return the columns of `metrics.csv` with an epsilon that a run of a comparison has."""
    return [*dict.fromkeys(name for group in comparison.groups for name in group.epsilons)]


def architecture_columns(runs: Sequence[Run], metric: str | None) -> dict[str, str]:
    """Return the columns of `metrics.csv` with a metric of the clients with each architecture, by the name of it.

    Args:
        runs: The runs.
        metric: A metric of the clients, such as `acc` or `client/acc_mean`; by default the main metric.

    Raises:
        ConfigError: The clients of no run have different networks.
    """
    rows = [row for run in runs for row in run.rounds]
    if not (names := architectures_of(rows)):
        raise ConfigError("--architectures: the clients of no run have different networks. Leave it out.")
    chosen = re.sub(r"^client/|_mean$", "", metric) if metric else model_metrics(rows)[0]
    return {name: ARCHITECTURE_COLUMN.format(name, chosen) for name in names}


def architecture_table(found: Mapping[str, Comparison], percent: bool = False) -> ResultTable:
    """Return a table of a metric of the last evaluated round, with a column for each architecture of the clients.

    Args:
        found: The comparison by the metric of each architecture.
        percent: Show the metric in percent.
    """
    found = {name: each.in_percent() if percent else each for name, each in found.items()}
    first = next(iter(found.values()))
    cells = {name: {tuple(group.names.items()): group for group in each.groups} for name, each in found.items()}
    lines = [tuple(group.names.items()) for group in first.groups]
    width = max(len(first.columns), 1)
    bold = {
        (row, width + column)
        for column, each in enumerate(cells.values())
        for row in best_rows([each[line].last for line in lines], first)
    }
    rows = [
        [
            *([text for key, text in line if key in first.columns] or ["all runs"]),
            *(format_cell(each[line], first) for each in cells.values()),
        ]
        for line in lines
    ]
    header = [*(shorten_keys(first.columns) or ["group"]), *found]
    of_all = replace(first, metric=re.sub("(?<=architecture/)[^/]+", "*", first.metric))
    return ResultTable(header, rows, width, bold, notes(of_all, "in the last evaluated round", []))


def data_table(comparison: Comparison) -> ResultTable:
    """Return a comparison as a table for CSV: one row per group of runs, with full keys and unrounded values."""
    rows = []
    for group in comparison.groups:
        missing = [seed for seed in comparison.seeds if seed not in group.seeds]
        row: dict[str, Any] = {key: group.values.get(key, "") for key in comparison.keys}
        row |= {
            "runs": len(group.runs),
            "unfinished": sum(not run.finished for run in group.runs),
            "seeds": " ".join(map(str, group.seeds)),
            "missing_seeds": " ".join(map(str, missing)),
            **spread_columns("last", group.last),
            **spread_columns("best", group.best),
            **{name: group.epsilons.get(name) for name in epsilon_columns(comparison)},
            "bytes": group.bytes and group.bytes.mean,
        }
        for target, reach in group.reach.items():
            row[f"R_{target:g}_reached"] = f"{reach.reached} of {reach.of}"
            row |= spread_columns(f"R_{target:g}", reach.rounds)
            row[f"bytes_to_{target:g}"] = reach.bytes and reach.bytes.mean
            row[f"seconds_to_{target:g}"] = reach.seconds and reach.seconds.mean
        if comparison.reference:
            row["reference"] = group.reference
            values = group.difference._asdict() if group.difference else dict.fromkeys(Difference._fields)
            row |= {name if name in ("pairs", "p", "p_holm") else f"difference_{name}": values[name] for name in values}
        rows.append(row)
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    return ResultTable(list(rows[0]), cells, notes=comparison.remarks)


def spread_columns(name: str, spread: Spread | None) -> dict[str, float | None]:
    """Return the two cells `<name>_mean` and `<name>_std` of a row: the mean and standard deviation over seeds."""
    return {f"{name}_mean": spread and spread.mean, f"{name}_std": spread and spread.std}


# --- Cells ---


def is_complete(group: Group, comparison: Comparison) -> bool:
    """Return whether a group has one run for each of the comparison's seeds, and all its runs are finished."""
    return len(group.runs) == len(group.seeds) == len(comparison.seeds) and all(run.finished for run in group.runs)


def format_seeds(group: Group, comparison: Comparison) -> str:
    """Format the number of seeds of a group of runs, and how many runs are missing, repeated or unfinished."""
    seeds, all_seeds = len(group.seeds), len(comparison.seeds)
    cell = f"{seeds} of {all_seeds}" if seeds < all_seeds else str(seeds)
    cell += f", {len(group.runs)} runs" if len(group.runs) > seeds else ""
    unfinished = sum(not run.finished for run in group.runs)
    return cell + (f", {unfinished} unfinished" if unfinished else "")


def format_reach(reach: Reach) -> list[str]:
    """Format the mean round, bytes and seconds at which a group's runs reached a target accuracy, as three cells."""
    if not reach.of:
        return ["-"] * 3
    if reach.rounds is None:
        return ["not reached", "-", "-"]
    some = f" ({reach.reached} of {reach.of})" if reach.reached < reach.of else ""
    crossed = human_bytes(reach.bytes.mean) if reach.bytes else "-"
    return [f"{reach.rounds.mean:.1f}{some}", crossed, f"{reach.seconds.mean:.1f}" if reach.seconds else "-"]


def format_cell(group: Group | None, comparison: Comparison) -> str:
    """Format a group of runs as a pivot table cell: metric, significance stars, and `(2 of 3)` if seeds are missing.

    The metric is that of the last evaluated round. Repeated and unfinished runs are in the parentheses, too.
    """
    if group is None:
        return "missing"
    stars = group.difference.stars if group.difference else ""
    seeds = "" if is_complete(group, comparison) else f"({format_seeds(group, comparison)})"
    return " ".join(filter(None, [format_spread(group.last, comparison.digits), stars, seeds]))


def best_rows(figures: Sequence[Spread | None], comparison: Comparison) -> list[int]:
    """Return the indices of the groups with the best mean: the highest, or the lowest for a metric such as a loss."""
    means = [spread.mean for spread in figures if spread and spread.mean == spread.mean]
    if not means:
        return []
    best = min(means) if comparison.lower else max(means)
    return [i for i, spread in enumerate(figures) if spread and spread.mean == best]


def shorten_keys(keys: list[str]) -> list[str]:
    """Shorten dotted config keys to the shortest unique endings, such as `algorithm.tau` to `tau`."""
    ends = [[".".join(key.split(".")[-n:]) for n in range(1, key.count(".") + 2)] for key in keys]
    return [next(end for end in ends[i] if sum(end in other for other in ends) == 1) for i in range(len(keys))]


def notes(comparison: Comparison, when: str, targets: list[float]) -> list[str]:
    """Return the lines below a comparison table that explain its values, significance stars and targets."""
    metric = f"{comparison.metric} in percent," if comparison.percent else comparison.metric
    lines = [f"{metric} {when}: mean ± standard deviation over seeds (n - 1).", *comparison.missing_seeds]
    if comparison.reference:
        lines.append(difference_note(comparison.reference))
    if targets:
        lines.append(
            "R_x: the first evaluated round in which a run reached x. R_x, bytes and seconds are means over the runs "
            "that reached x; (2 of 3) means that one of three runs did not."
        )
    return [*lines, *(f"{remark}." for remark in comparison.remarks)]
