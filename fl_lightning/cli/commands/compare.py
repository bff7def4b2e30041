"""`fl-lightning compare`: groups of runs side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from fl_lightning.analysis.comparison import (
    LEVELS,
    Comparison,
    Difference,
    Group,
    Reach,
    Spread,
    comparable,
    compare,
    rank,
)
from fl_lightning.analysis.result_table import ResultTable
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.metrics import human_bytes
from fl_lightning.runs.reader import conditions, open_runs


def main(given: Namespace, parser: ArgumentParser) -> int:
    """Print the groups."""
    runs = comparable(open_runs(given.runs, given.where), given.unfinished)
    words = given.reference and [word if "=" in word else f"algorithm={word}" for word in given.reference]
    found = compare(
        runs,
        by=[key for key in given.by.split(",") if key],
        metric=given.metric,
        lower=None if given.mode is None else given.mode == "min",
        reference=conditions(words) if words else None,
        targets=given.target,
    )
    csv = given.format == "csv"
    sheet = pivot(found, given.across) if given.across else records(found) if csv else listing(found)
    print({"table": sheet.plain, "csv": sheet.csv, "latex": sheet.latex, "markdown": sheet.markdown}[given.format]())
    if csv:
        print(*sheet.notes, sep="\n", end="\n" if sheet.notes else "", file=sys.stderr)
    return 0


def listing(found: Comparison) -> ResultTable:
    """A row a group, to be read."""
    heads = short(found.columns) or ["group"]
    header = [*heads, "seeds", "last", "best", *([f"to {found.reference}"] if found.reference else []), "bytes"]
    for target in found.targets:
        header += [f"R_{target:g}", f"bytes to {target:g}", f"s to {target:g}"]
    rows = []
    for group in found.groups:
        names = [group.names[key] for key in found.columns] or ["all runs"]
        row = [*names, told_seeds(group, found), told_spread(group.last), told_spread(group.best)]
        row += [told_difference(group)] if found.reference else []
        row.append(human_bytes(group.bytes.mean) if group.bytes else "-")
        rows.append(row + [cell for target in found.targets for cell in told_reach(group.reach[target])])
    last, best = ([getattr(group, name) for group in found.groups] for name in ("last", "best"))
    bold = {(i, len(heads) + 1) for i in leading(last, found)} | {(i, len(heads) + 2) for i in leading(best, found)}
    return ResultTable(
        header, rows, len(heads), bold, notes(found, "in the last evaluated round and where best", found.targets)
    )


def pivot(found: Comparison, across: str) -> ResultTable:
    """The last figures: a column for each value of one setting, a row for each of the others'."""
    fits = [key for key in found.columns if key == across or key.endswith(f".{across}")]
    if len(fits) != 1:
        keys = ", ".join(found.columns) or "nothing does"
        raise ConfigError(f"--across: {across} is no key that tells these groups apart: {keys}")
    others = [key for key in found.columns if key != fits[0]]
    cells = {(tuple(group.names[key] for key in others), group.names[fits[0]]): group for group in found.groups}
    lines = list(dict.fromkeys(line for line, _ in cells))
    inner = sorted(found.groups, key=lambda group: rank(group.values.get(fits[0])))
    columns = list(dict.fromkeys(group.names[fits[0]] for group in inner))
    width = max(len(others), 1)
    table = [[cells.get((line, column)) for column in columns] for line in lines]
    last = [[group and group.last for group in row] for row in table]
    bold = {(i, width + j) for j, column in enumerate(zip(*last, strict=True)) for i in leading(column, found)}
    rows = [
        [*(line or ["all runs"]), *(told_cell(group, found) for group in row)]
        for line, row in zip(lines, table, strict=True)
    ]
    head = short([fits[0]])[0]
    header = [*(short(others) or ["group"]), *(f"{head}={column}" for column in columns)]
    return ResultTable(header, rows, width, bold, notes(found, "in the last evaluated round", []))


def records(found: Comparison) -> ResultTable:
    """A row a group, to be computed with: whole keys, nothing rounded, empty where there is nothing."""
    rows = []
    for group in found.groups:
        missing = [seed for seed in found.seeds if seed not in group.seeds]
        row: dict[str, Any] = {key: group.values.get(key, "") for key in found.keys}
        row |= {
            "runs": len(group.runs),
            "unfinished": sum(not run.finished for run in group.runs),
            "seeds": " ".join(map(str, group.seeds)),
            "missing_seeds": " ".join(map(str, missing)),
            **flat("last", group.last),
            **flat("best", group.best),
            "bytes": group.bytes and group.bytes.mean,
        }
        for target, reach in group.reach.items():
            row[f"R_{target:g}_reached"] = f"{reach.reached} of {reach.of}"
            row |= flat(f"R_{target:g}", reach.rounds)
            row[f"bytes_to_{target:g}"] = reach.bytes and reach.bytes.mean
            row[f"seconds_to_{target:g}"] = reach.seconds and reach.seconds.mean
        if found.reference:
            row["reference"] = group.reference
            told = group.difference._asdict() if group.difference else dict.fromkeys(Difference._fields)
            row |= {name if name in ("pairs", "p", "p_holm") else f"difference_{name}": told[name] for name in told}
        rows.append(row)
    cells = [["" if value is None else str(value) for value in row.values()] for row in rows]
    return ResultTable(list(rows[0]), cells, notes=found.remarks)


def flat(name: str, spread: Spread | None) -> dict[str, float | None]:
    """A spread as two columns."""
    return {f"{name}_mean": spread and spread.mean, f"{name}_std": spread and spread.std}


# --- Cells ---


def number(value: float) -> str:
    """A figure to be read: four places, or four digits where it is large."""
    return f"{value:.4f}" if not abs(value) >= 1000 else f"{value:.4g}"


def told_spread(spread: Spread | None) -> str:
    """Mean ± standard deviation."""
    if spread is None:
        return "-"
    return number(spread.mean) if spread.std is None else f"{number(spread.mean)} ± {number(spread.std)}"


def told_seeds(group: Group, found: Comparison) -> str:
    """How many seeds a group has, of how many, and what else is to be known of its runs."""
    cell = f"{len(group.seeds)} of {len(found.seeds)}" if len(group.seeds) < len(found.seeds) else str(len(group.seeds))
    cell += f", {len(group.runs)} runs" if len(group.runs) > len(group.seeds) else ""
    unfinished = sum(not run.finished for run in group.runs)
    return cell + (f", {unfinished} unfinished" if unfinished else "")


def told_difference(group: Group) -> str:
    """Mean ± standard deviation of the differences, the stars, and how many pairs there are if not one a seed."""
    if group.difference is None:
        return "" if group.reference else "-"
    mean, std = group.difference.mean, group.difference.std
    told = f"{mean:+.4f}" if std is None else f"{mean:+.4f} ± {number(std)}"
    pairs = f"({group.difference.pairs} of {len(group.seeds)})" if group.difference.pairs < len(group.seeds) else ""
    return " ".join(filter(None, [told, group.difference.stars, pairs]))


def told_reach(reach: Reach) -> list[str]:
    """The round, the bytes and the seconds in which a target was reached, and by how many runs if not by all."""
    if not reach.of:
        return ["-"] * 3
    if reach.rounds is None:
        return ["not reached", "-", "-"]
    some = f" ({reach.reached} of {reach.of})" if reach.reached < reach.of else ""
    crossed = human_bytes(reach.bytes.mean) if reach.bytes else "-"
    return [f"{reach.rounds.mean:.1f}{some}", crossed, f"{reach.seconds.mean:.1f}" if reach.seconds else "-"]


def told_cell(group: Group | None, found: Comparison) -> str:
    """A group's last figures and stars, and how many seeds it has if not all."""
    if group is None:
        return "missing"
    few = f"({told_seeds(group, found)})" if told_seeds(group, found) != str(len(found.seeds)) else ""
    return " ".join(filter(None, [told_spread(group.last), group.difference.stars if group.difference else "", few]))


def leading(figures: Sequence[Spread | None], found: Comparison) -> list[int]:
    """Where the best of several figures stand."""
    means = [spread.mean for spread in figures if spread and spread.mean == spread.mean]
    if not means:
        return []
    best = min(means) if found.lower else max(means)
    return [i for i, spread in enumerate(figures) if spread and spread.mean == best]


def short(keys: list[str]) -> list[str]:
    """Keys by their shortest ends that tell them apart."""
    ends = [[".".join(key.split(".")[-n:]) for n in range(1, key.count(".") + 2)] for key in keys]
    return [next(end for end in ends[i] if sum(end in other for other in ends) == 1) for i in range(len(keys))]


def notes(found: Comparison, when: str, targets: list[float]) -> list[str]:
    """What the figures are, and what is to be known of these groups."""
    lines = [f"{found.metric} {when}: mean ± standard deviation over seeds (n - 1)."]
    if len(found.seeds) > 1 and any(len(group.seeds) < len(found.seeds) for group in found.groups):
        lines.append(f"seeds: {', '.join(map(str, found.seeds))}; some groups lack some.")
    if found.reference:
        levels = ", ".join(f"{'*' * i} p < {level:g}" for i, level in enumerate(LEVELS, 1))
        lines.append(
            f"to {found.reference}: differences in the last round between runs with the same seed; {levels}: "
            f"paired t-test, two-sided, with Holm's correction for all groups that were tested."
        )
    if targets:
        lines.append("R: the first evaluated round that reached it: mean over the runs that did (so many of so many).")
    return [*lines, *(f"{remark}." for remark in found.remarks)]
