"""Colours, line styles and markers of groups of runs. A method has the same colour in all figures, where possible."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Okabe and Ito's colours without yellow and black, as in the HTML report. In greyscale, the line styles and markers of
# curves differ, and the hatches of bars.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = "os^Dv*X"
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++")

RESERVED = {name: i for i, name in enumerate(("FedAvg", "FedSKC", "FedDW", "FedSiamDA", "CwFedAvg", "UAPDFL"))}
"""The colours of the methods that are compared most, by position in `COLOURS`."""


class Style(NamedTuple):
    """The style of a group of runs in figures, as positions in the lists of this module, which repeat at their end.

    Attributes:
        colour: Position of the colour.
        line: Position of the line style or of the hatch.
        marker: Position of the marker.
        dash: Position of the line style in the HTML report, which differs only among groups of one colour.
    """

    colour: int
    line: int
    marker: int
    dash: int


def numbered_styles(names: Iterable[str]) -> dict[str, Style]:
    """Return a style for each name, which differs from the others in colour, line style and marker."""
    return {name: Style(i, i, i, i // len(COLOURS)) for i, name in enumerate(names)}


def method_styles(groups: Sequence[tuple[str, str]]) -> list[Style]:
    """Return the style of each group of runs: the method determines the colour, the other settings the line style.

    Several groups of a single method differ in colour, too. The first one has the method's colour.

    Args:
        groups: The method and the other settings of each group.
    """
    methods, settings = (list(dict.fromkeys(each)) for each in zip(*groups, strict=True))
    colours = method_colours(methods)
    if len(methods) == 1:
        return [Style(colours[methods[0]] + i, i, i, i // len(COLOURS)) for i in range(len(groups))]
    styles = []
    for method, others in groups:
        number, line = methods.index(method), settings.index(others)
        marker = number + line // len(LINE_STYLES)
        same_colour = sum(colours[other] == colours[method] for other in methods[:number])
        dash = line + same_colour * len(settings)
        styles.append(Style(colours[method], line if len(settings) > 1 else number, marker, dash))
    return styles


def method_colours(methods: Iterable[str]) -> dict[str, int]:
    """Return the colour of each method, as a position in `COLOURS`.

    It depends only on the method's name, unless another method of the figure has this colour. A colour is not used
    twice while another is free, nor a third time while another is used once.
    """
    found: dict[str, int] = {}
    used = [0] * len(COLOURS)
    for method in sorted(methods, key=lambda name: (name not in RESERVED, name)):
        own = RESERVED.get(method, zlib.crc32(method.encode()))
        positions = [(own + i) % len(COLOURS) for i in range(len(COLOURS))]
        found[method] = min(positions, key=lambda place: used[place])
        used[found[method]] += 1
    return found
