"""Widths, fonts and other settings of figures for papers, by the names of venues."""

from __future__ import annotations

import difflib
from typing import Any

from matplotlib import rcParams

from fl_lightning.core.errors import ConfigError, check_number

MILLIMETRE = 1 / 25.4

WIDTHS: dict[str, float] = {
    "column": 3.25,
    "text": 6.75,
    "neurips": 5.5,
    "icml-column": 3.25,
    "icml-text": 6.75,
    "ieee-column": 3.5,
    "ieee-text": 7.16,
    "nature-column": 89 * MILLIMETRE,
    "nature-text": 183 * MILLIMETRE,
}
"""Widths in inches of a column and of the text, from the venues' author guidelines. NeurIPS has one column."""

FONT_SIZE = 8
"""Default font size in points. Ticks and legends are one point smaller."""

FONTS = {"sans": ["DejaVu Sans"], "serif": ["STIXGeneral", "DejaVu Serif"]}
"""Fonts that come with Matplotlib, so that figures are the same on each machine. STIXGeneral is similar to Times."""

LEGEND_ROW = 1.75
"""Height of a row of the legend, in font sizes."""
LETTER = 0.68
"""Mean width of a letter, in font sizes."""

LINES: Any = {
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.4,
    **{f"{x}tick.major.width": 0.6 for x in "xy"},
    **{f"{x}tick.major.size": 2.5 for x in "xy"},
    "legend.frameon": False,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "hatch.linewidth": 0.5,
    "boxplot.patchartist": True,
    "boxplot.showfliers": False,
    "boxplot.medianprops.color": "black",
    **{f"boxplot.{part}props.linewidth": 0.8 for part in ("median", "whisker", "cap")},
    "text.parse_math": False,  # names of runs are text, not formulas
}

FILES: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "savefig.dpi": 300, "svg.hashsalt": "fl-lightning"}
"""Settings of saved files: TrueType fonts, 300 dpi, and reproducible ids inside SVG files."""


def figure_style(font: str = "sans", font_size: float = FONT_SIZE) -> Any:
    """Return Matplotlib's settings for a figure, to be used with `rc_context`.

    Args:
        font: `sans`, `serif`, or the name of an installed font, such as `Times New Roman`.
        font_size: Size of axis labels and titles in points; ticks and legends are one point smaller.

    Raises:
        ConfigError: The font is not installed, or the size is not between 4 and 24.
    """
    check_number("font_size", font_size, "[4, 24]")
    large = dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), font_size)
    small = dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), font_size - 1)
    return LINES | large | small | {"font.family": FONTS.get(font) or [_installed_font(font), "DejaVu Sans"]}


def _installed_font(name: str) -> str:
    from matplotlib.font_manager import fontManager

    names = fontManager.get_font_names()
    if name not in names:
        close = difflib.get_close_matches(name, names, 1, 0.7)
        hint = f"Did you mean {close[0]}?" if close else "Use sans, serif, or an installed font."
        raise ConfigError(f"font: {name!r} is not installed. {hint}")
    return name


def width_in_inches(width: float | str) -> float:
    """Return the width of a figure in inches, given a name in `WIDTHS` or a number of inches.

    Raises:
        ConfigError: The name is unknown, or the number is not between 1 and 50.
    """
    inches = WIDTHS.get(width) if isinstance(width, str) else width
    if inches is None:
        raise ConfigError(f"width: {width!r} is unknown. Use {', '.join(WIDTHS)}, or a number of inches.")
    check_number("width", inches, "[1, 50]")
    return inches


def legend_row() -> float:
    """Return the height of a row of a legend in inches, for the font size of the current settings."""
    return LEGEND_ROW * float(rcParams["legend.fontsize"]) / 72


def letter_width() -> float:
    """Return the mean width of a letter in inches, for the font size of the current settings."""
    return LETTER * float(rcParams["font.size"]) / 72
