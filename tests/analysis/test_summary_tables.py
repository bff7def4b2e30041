"""Tables of results, tests and partitions for the terminal, and the figure of a partition."""

import csv
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from fl_lightning.analysis import summary_tables as tables
from fl_lightning.cli.commands.partition import write_figure
from fl_lightning.core.names import Names
from fl_lightning.data import FederatedData, LoadedData, Shard
from fl_lightning.data.transforms import Normalize
from fl_lightning.runs.partition import write_counts


def cells(table: Table) -> list[list[str]]:
    return [list(map(str, row)) for row in zip(*(column.cells for column in table.columns), strict=True)]


def rendered(table: Table, width: int = 400) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


SUMMARY: dict[str, Any] = {
    "rounds": 7,
    "global/acc_last": 0.61234,
    "global/acc_best": 0.7,
    "global/acc_best_round": 5,
    "client/acc_weighted_last": 0.375,
    "client/acc_weighted_best": 0.4375,
    "client/acc_weighted_best_round": 4,
    "personal_on_global/acc_mean_last": 0.25,
    "personal_on_global/acc_mean_best": 0.5,
    "personal_on_global/acc_mean_best_round": 2,
    "R_0.5": 3,
    "R_0.9": None,
    "comm/total_up_bytes": 12_345_678,
    "comm/total_down_bytes": 999,
}


# --- Tables ---


def test_summary_table() -> None:
    table = tables.summary_table(SUMMARY)
    assert cells(table) == [
        ["global acc", "0.6123", "0.7000", "5"],
        ["client acc, weighted", "0.3750", "0.4375", "4"],
        ["personal on global acc", "0.2500", "0.5000", "2"],
        ["R_0.5 (global)", "round 3", "", ""],
        ["R_0.9 (global)", "not reached", "", ""],
        ["bytes up", "12.3 MB", "", ""],
        ["bytes down", "999 B", "", ""],
    ]
    assert table.title == "7 rounds"
    assert re.search("last +┃ best +┃ best round ┃", rendered(table, width=80))


def test_table_of_a_test() -> None:
    table = tables.test_table(
        {"round": 4, "global/acc": 0.5, "client/acc_mean": 0.25, "client_3/acc": 0.1}, server=True, validation=False
    )
    assert table.title == "after round 4"
    assert cells(table) == [["global/acc", "0.5000"], ["client/acc_mean", "0.2500"]]


def test_partition_table() -> None:
    counts = np.array([[8, 0, 1], [2, 4, 6]])
    table = tables.partition_table(counts, np.array([[3, 0, 0], [1, 2, 2]]))
    assert [str(column.header) for column in table.columns] == ["client", "0", "1", "2", " train", " test"]
    assert cells(table) == [["0", "8█", " ", "1░", "9", "3"], ["1", "2░", "4▒", "6▓", "12", "5"]]
    named = tables.partition_table(counts, counts, Names(["north", "[b]south"], ["ill", "x" * 13, "[i]ok"]))
    headers = ["client", "ill", "x" * 11 + "…", "[i]ok", " train", " test", " name"]
    assert [str(column.header) for column in named.columns] == headers
    assert [str(cell) for cell in named.columns[-1].cells] == [" north", " [b]south"]


def test_shades_are_quarters_of_the_largest_cell_rounded_up() -> None:
    counts = np.array([[0, 1, 25, 26, 50, 51, 75, 76, 100]])
    (row,) = cells(tables.partition_table(counts, counts))
    assert [cell.lstrip("0123456789") for cell in row[1:-2]] == [" ", "░", "░", "▒", "▒", "▓", "▓", "█", "█"]


@pytest.mark.parametrize(("classes", "wide"), [(20, False), (21, True), (100, True)])
def test_many_classes_are_shown_as_shades_only(classes: int, wide: bool) -> None:
    counts = np.tile(np.arange(classes), (2, 1))
    table = tables.partition_table(counts, counts)
    (first, _) = cells(table)
    assert [bool(cell.strip("░▒▓█ ")) for cell in first[2:-2]] == [not wide] * (classes - 1)
    assert [str(column.header) for column in table.columns][1:-2] == ["" if wide else str(j) for j in range(classes)]
    assert first[-2:] == [str(sum(range(classes)))] * 2
    assert first[classes].endswith("█")


@pytest.mark.parametrize("clients", [100, 101, 1000])
def test_only_the_first_and_last_of_many_clients_are_shown(clients: int) -> None:
    counts = np.arange(2 * clients).reshape(clients, 2) + 1
    shown = cells(tables.partition_table(counts, counts))
    if clients == 100:
        assert [row[0] for row in shown] == [str(k) for k in range(100)]
        return
    assert [row[0] for row in shown[:20] + shown[21:]] == [str(k) for k in [*range(20), *range(clients - 20, clients)]]
    assert shown[20][0] == f"... {clients - 40:,} more"
    assert [row[-1] for row in shown[21:]] == [str(row.sum()) for row in counts[-20:]]


def test_without_classes_only_the_totals_are_shown() -> None:
    table = tables.partition_table(np.array([[8], [3]]), np.array([[2], [1]]), Names(["north", "south"]))
    assert [str(column.header) for column in table.columns] == ["client", " train", " test", " name"]
    assert [row[:3] for row in cells(table)] == [["0", "8", "2"], ["1", "3", "1"]]


def test_clients_without_samples_are_blank() -> None:
    assert cells(tables.partition_table(np.zeros((1, 2), int), np.zeros((1, 2), int))) == [["0", " ", " ", "0", "0"]]


def test_partition_as_csv(tmp_path: Path) -> None:
    y = torch.tensor([0, 2, 2, 1, 0, 2])
    loaded = LoadedData(torch.zeros(6, 1), y, torch.zeros(1, 1), y[:1], 4, Normalize())
    shards = [Shard(torch.tensor([1, 2, 3]), torch.tensor([5])), Shard(torch.tensor([0]), torch.tensor([4]))]
    path = tmp_path / "made" / "partition.csv"
    write_counts(path, FederatedData(loaded, shards))
    assert list(csv.reader(path.read_text().splitlines())) == [
        ["client", "split", "class_0", "class_1", "class_2", "class_3"],
        ["0", "train", "0", "1", "2", "0"],
        ["1", "train", "1", "0", "0", "0"],
        ["0", "test", "0", "0", "1", "0"],
        ["1", "test", "1", "0", "0", "0"],
    ]


def test_bytes_are_shown_in_decimal_units() -> None:
    counts = (0, 999, 1234, 999_600, 6_653_480, 5 * 10**12)
    assert list(map(tables.human_bytes, counts)) == ["0 B", "999 B", "1.23 kB", "1 MB", "6.65 MB", "5 TB"]


# --- Figures ---


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Return the figures that the test saves."""
    saved: list[Figure] = []
    save = Figure.savefig

    def record(figure: Figure, *args: Any, **options: Any) -> None:
        saved.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", record)
    return saved


def test_the_area_of_a_bubble_is_proportional_to_its_samples(figures: list[Figure], tmp_path: Path) -> None:
    counts = np.array([[8, 0, 1, 3], [2, 4, 0, 0], [0, 0, 0, 16]])
    path = tmp_path / "figures" / "partition.png"
    write_figure(path, counts)
    assert path.read_bytes().startswith(b"\x89PNG")
    (axes,) = figures[0].axes
    (bubbles,) = axes.collections
    areas = {
        tuple(map(int, place)): area for place, area in zip(bubbles.get_offsets(), bubbles.get_sizes(), strict=True)
    }
    expected = {(k, j): counts[k, j] for k in range(3) for j in range(4) if counts[k, j]}
    assert areas.keys() == expected.keys()
    per_sample = areas[2, 3] / 16
    assert per_sample > 0
    for place, n in expected.items():
        assert areas[place] == pytest.approx(n * per_sample)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Client", "Class")
    assert axes.get_title() == "34 training samples"
    assert figures[0].legends[0].texts[0].get_text() == "16"
    assert axes.get_xlim() == pytest.approx((-0.7, 2.7))
    assert axes.get_ylim() == pytest.approx((-0.7, 3.7))


def test_named_ticks_of_a_partition(figures: list[Figure], tmp_path: Path) -> None:
    names = Names(["$a$ north", "_b"], ["c" * 20, "yes"])
    write_figure(tmp_path / "partition.png", np.ones((2, 2), int), names)
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["$a$ north", "_b"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["c" * 15 + "…", "yes"]
    assert not any(text.get_parse_math() for text in axes.get_xticklabels())


def test_many_clients_are_drawn_as_a_heat_map(figures: list[Figure], tmp_path: Path) -> None:
    counts = np.zeros((1000, 3), int)
    counts[np.arange(1000), np.arange(1000) % 2] = np.random.default_rng(0).permutation(1000) + 1
    write_figure(tmp_path / "partition.png", counts)
    axes, _ = figures[0].axes
    (image,) = axes.images
    shown = np.asarray(image.get_array())
    assert shown.shape == (3, 200)
    expected = [sorted(counts[counts[:, j] > 0, j], reverse=True) for j in range(2)]
    np.testing.assert_allclose(shown[0, :100], np.mean(np.reshape(expected[0], (100, 5)), axis=1))
    np.testing.assert_allclose(shown[1, 100:], np.mean(np.reshape(expected[1], (100, 5)), axis=1))
    assert shown.sum() * 5 == pytest.approx(counts.sum())
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Clients, sorted", "Class")


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (200, 2), (3, 300)])
def test_size_and_ticks_of_the_figure(clients: int, classes: int, figures: list[Figure], tmp_path: Path) -> None:
    write_figure(tmp_path / "partition.png", np.ones((clients, classes), int))
    assert max(figures[0].get_size_inches()) <= 24
    (axes,) = figures[0].axes
    assert axes.get_title() == f"{clients * classes:,} training samples"
    assert [text.get_text() for text in figures[0].legends[0].texts] == ["1 samples"]
    for ticks, size in ((axes.get_xticks(), clients), (axes.get_yticks(), classes)):
        assert ticks[0] == 0
        assert ticks[-1] < size
        assert len(ticks) <= 40
        assert (ticks == ticks.astype(int)).all()
