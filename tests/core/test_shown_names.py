"""Names of clients and classes, as they are shown."""

import pytest

from fl_lightning.core.names import MOST_LETTERS, Names, labels, shorten_name, shown_names


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (None, ()),
        ([0, 1, 2], ()),
        (("0", "1"), ()),
        ([1, 0], ["1", "0"]),
        (["north", "south"], ["north", "south"]),
        (["a\nb", "c", "a\tb"], ["a b #0", "c", "a b #2"]),
        (["\x1b[31mred"], ["\ufffd[31mred"]),
        (["x" * 99 + "1", "x" * 99 + "2"], ["x" * 39 + "… #0", "x" * 39 + "… #1"]),
    ],
)
def test_shown_names_are_short_lines_that_differ(values, shown):
    assert shown_names(values) == shown


def test_a_client_or_class_without_a_name_is_shown_by_its_index():
    names = Names(clients=["north", "south"])
    assert [names.client(1), names.client(2), Names().client(0)] == ["client 1 (south)", "client 2", "client 0"]
    assert labels(names.clients, [1, 5]) == ["south", "5"]
    assert labels(names.classes, range(2)) == ["0", "1"]


@pytest.mark.parametrize("length", [MOST_LETTERS, MOST_LETTERS + 1])
def test_only_long_names_are_shortened(length):
    name = shorten_name("x" * length)
    assert len(name) == MOST_LETTERS
    assert name.endswith("…") == (length > MOST_LETTERS)
