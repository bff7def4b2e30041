"""Text of a comparison's values: spreads over seeds, and differences with their significance."""

from __future__ import annotations

from fl_lightning.analysis.result_table import mean_and_std
from fl_lightning.analysis.run_groups import Group
from fl_lightning.analysis.statistics import LEVELS, Difference, Spread


def format_spread(figures: Spread | Difference | None, digits: int = 4, sign: str = "") -> str:
    """Format a mean ± standard deviation with a number of decimal places; from 1000 on, with four significant digits.

    Args:
        figures: The mean and the standard deviation of a metric over seeds.
        digits: Number of decimal places.
        sign: `+` to write the sign of a positive mean, too.
    """
    if figures is None:
        return "-"
    return mean_and_std(figures.mean, figures.std, sign + (".4g" if abs(figures.mean) >= 1000 else f".{digits}f"))


def format_difference(group: Group, digits: int = 4) -> str:
    """Format a group's difference to the reference group as mean ± standard deviation with significance stars."""
    if group.difference is None:
        return "" if group.reference else "-"
    values = format_spread(group.difference, digits, "+")
    pairs = f"({group.difference.pairs} of {len(group.seeds)})" if group.difference.pairs < len(group.seeds) else ""
    return " ".join(filter(None, [values, group.difference.stars, pairs]))


def difference_note(reference: str) -> str:
    """Return the line below a table that explains the differences to a reference and their significance stars."""
    levels = ", ".join(f"{'*' * i} p < {level:g}" for i, level in enumerate(LEVELS, 1))
    return (
        f"to {reference}: difference in the last round to its run with the same seed; {levels}: "
        f"paired t-test, two-sided, with Holm's correction over all groups that were tested."
    )
