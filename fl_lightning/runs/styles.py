"""Colours, line styles and markers of groups of runs. A method has the same colour in all figures, where possible."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

COLOURS = ("#076aaa", "#d55e00", "#00a860", "#cc79a7", "#8e5c28", "#4f91fa", "#7a1f50", "#222222")
"""Colours on white: blue, vermilion, green, pink, brown, light blue, wine, black.

Each has a contrast of at least 3 to white. Any two differ by at least 18 in CIELAB, also in simulations of
deuteranopia, protanopia and tritanopia (Machado et al. 2009). `tests/runs/test_styles.py` computes both.
"""
DARK_COLOURS = (*COLOURS[:6], "#a8447a", "#e6e6e6")
"""The same colours on a dark background, with the last two lighter, by the same measures (16 in CIELAB)."""

LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = "os^Dv*X"
HATCHES = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++")

# The colour of a method is the place in its row. Methods of a row are often compared: general ones, then personalised.
KNOWN_COLOURS = {
    name: place
    for row in (
        ("FedAvg", "FedSKC", "FedDW", "FedSiamDA", "CwFedAvg", "UAPDFL", "FedProx", "SCAFFOLD"),
        (None, "FedNova", "FedDyn", "MOON", "FedAvgM", "FedAdam", "FedYogi", "FedAdagrad"),
        (None, "Ditto", "FedPer", "FedRep", "FedBN", "APFL", "PerFedAvg", "PFedMe"),
        (None, "FedALA", "FedFomo", "FedProto", "FedROD", "FedBABU", "LGFedAvg", "Local"),
    )
    for place, name in enumerate(row)
    if name
}
"""The colours of known methods by class name, as positions in `COLOURS`, those with precedence first. The first eight
have different colours. The colour of FedAvg is given to others only if all colours are used."""


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
        colour = colours[methods[0]]
        return [Style(colour + i, line=i, marker=i, dash=i // len(COLOURS)) for i in range(len(groups))]
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

    It is that of `KNOWN_COLOURS`; for any other class it depends on the name. If a method with precedence has this
    colour in the same figure, it is the next colour that is used least. So the eight methods of the first row of
    `KNOWN_COLOURS` have the same colours in all figures, and up to eight methods of a figure have different colours.
    """
    precedence = list(KNOWN_COLOURS)
    others = len(COLOURS) - 1  # without the colour of FedAvg, which comes last
    found: dict[str, int] = {}
    used = [0] * len(COLOURS)
    for method in sorted(methods, key=lambda name: (precedence.index(name) if name in precedence else math.inf, name)):
        own = KNOWN_COLOURS.get(method, 1 + zlib.crc32(method.encode()) % others)
        following = [1 + (own - 1 + i) % others for i in range(others)]
        positions = [*following, 0] if own else [0, *following]
        found[method] = min(positions, key=lambda place: used[place])
        used[found[method]] += 1
    return found
