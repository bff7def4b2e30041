"""Colours of methods: the same in all figures, with contrast, and distinct for colour-blind readers."""

from itertools import combinations

import numpy as np
import pytest

import fl_lightning
from fl_lightning.runs.styles import COLOURS, DARK_COLOURS, KNOWN_COLOURS, method_colours, method_styles

# Machado, Oliveira and Fernandes 2009, severity 1, in linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour):
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(colour, ground):
    """Return the contrast ratio of WCAG 2."""
    low, high = sorted(float(TO_XYZ[1] @ linear(each)) for each in (colour, ground))
    return (high + 0.05) / (low + 0.05)


def lab(rgb):
    xyz = TO_XYZ @ rgb / TO_XYZ.sum(axis=1)
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize(("colours", "ground", "distance"), [(COLOURS, "#ffffff", 18), (DARK_COLOURS, "#15181c", 16)])
def test_eight_colours_have_contrast_and_differ_for_colour_blind_readers(colours, ground, distance):
    assert len(colours) == 8
    assert min(contrast(colour, ground) for colour in colours) >= 3
    for matrix in BLINDNESS.values():
        seen = [lab(np.clip(np.array(matrix) @ linear(colour), 0, 1)) for colour in colours]
        assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) >= distance


FIRST_ROW = list(KNOWN_COLOURS)[:8]


def test_known_colours_are_of_methods_of_the_package():
    assert [name for name in KNOWN_COLOURS if not hasattr(fl_lightning, name)] == []
    assert [KNOWN_COLOURS[name] for name in FIRST_ROW] == list(range(8))


@pytest.mark.parametrize("seed", range(20))
def test_up_to_eight_methods_have_different_colours_and_the_first_row_always_the_same(seed):
    random = np.random.default_rng(seed)
    names = random.choice([*KNOWN_COLOURS, "Mine", "Other", "Third"], 8, replace=False).tolist()
    colours = method_colours(names)
    assert len({*colours.values()}) == 8
    assert all(colours[name] == KNOWN_COLOURS[name] for name in names if name in FIRST_ROW)
    assert method_colours(reversed(names)) == colours


def test_a_method_alone_has_its_own_colour_and_only_fedavg_has_the_first():
    assert all(method_colours([name]) == {name: place} for name, place in KNOWN_COLOURS.items())
    assert method_colours(["FedAvg", "Ditto"]) == {"FedAvg": 0, "Ditto": 1}
    assert all(method_colours([f"Mine{i}"])[f"Mine{i}"] > 0 for i in range(50))


def test_many_methods_share_colours_evenly():
    colours = list(method_colours([f"Mine{i}" for i in range(20)]).values())
    assert {colours.count(place) for place in range(8)} == {2, 3}


def test_methods_of_one_colour_differ_in_line_style_and_dash():
    styles = method_styles([(f"Mine{i}", "") for i in range(9)])
    last = styles[-1]
    (first,) = [style for style in styles[:-1] if style.colour == last.colour]
    assert first.line != last.line
    assert first.marker != last.marker
    assert (first.dash, last.dash) == (0, 1)
