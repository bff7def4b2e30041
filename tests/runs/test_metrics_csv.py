import math
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.core.errors import CheckpointError, Damaged
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.evaluation.summary import Row
from fl_lightning.runs.metrics_csv import MetricsCsv


def write(path: Path, rows: Sequence[Row]) -> MetricsCsv:
    """Write rows of metrics; those of single clients are in rows that are `RoundMetrics`."""
    path.unlink(missing_ok=True)
    metrics = MetricsCsv(path)
    metrics.rewind(0)
    for row in rows:
        metrics.append(row if isinstance(row, RoundMetrics) else RoundMetrics(row))
    return metrics


def rewind(path: Path, round: int) -> MetricsCsv:
    metrics = MetricsCsv(path)
    metrics.rewind(round)
    return metrics


def clients_file(path: Path) -> bytes | None:
    """Return the content of the clients.csv beside a metrics.csv."""
    file = path.with_name("clients.csv")
    return file.read_bytes() if file.exists() else None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


THREE: list[Row] = [
    {"round": 1, "global/acc": 0.1234},
    {"round": 2, "global/acc": 0.5, "client/acc_mean": 1.0},
    {"round": 3, "comm/up_bytes": 2**60, "client/acc_mean": 0.75},
]


def test_a_round_is_a_row_and_missing_values_are_blank(path: Path) -> None:
    metrics = write(path, THREE)
    assert path.read_bytes().decode() == (
        "round,global/acc,client/acc_mean,comm/up_bytes\n"
        "1,0.1234,,\n"
        "2,0.5,1.0,\n"
        "3,,0.75,1152921504606846976\n"
    )  # fmt: skip
    assert metrics.rows == THREE


def test_a_row_is_on_disk_when_append_returns(path: Path) -> None:
    metrics = write(path, [])
    for n, row in enumerate(THREE, 1):
        metrics.append(RoundMetrics(row))
        assert len(path.read_text().splitlines()) == n + 1
        assert rewind(path, n).rows == THREE[:n]


def test_a_row_without_new_columns_is_only_added_at_the_end(path: Path) -> None:
    metrics = write(path, [{"round": 1, "global/acc": 0.5, "global/loss": 2.0}])
    before, node = path.read_bytes(), path.stat().st_ino
    metrics.append(RoundMetrics({"global/loss": 1.0, "round": 2}))
    assert path.read_bytes() == before + b"2,,1.0\n"
    assert path.stat().st_ino == node


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv"])
def test_a_file_that_was_moved_during_the_run_is_not_begun_again(name: str, path: Path) -> None:
    metrics = write(path, [])
    metrics.append(RoundMetrics({"round": 1, "global/acc": 0.5}, {0: {"acc": 1.0}}))
    path.with_name(name).unlink()
    with pytest.raises(CheckpointError, match=f"cannot write round 2 to .*{name}"):
        metrics.append(RoundMetrics({"round": 2, "global/acc": 0.5}, {0: {"acc": 1.0}}))
    assert not path.with_name(name).exists()


def test_columns_are_grouped_and_sorted_by_number(path: Path) -> None:
    expected = ["round", "global/acc", "global/loss", "personal_on_global/acc_mean", "client/acc_mean"]
    expected += ["client/acc_std", "comm/up_bytes", "time/fit_s", "entropy/class_9", "entropy/class_11"]
    for order in (expected, expected[::-1], sorted(expected)):
        write(path, [dict.fromkeys(order, 1)])
        assert path.read_text().splitlines()[0].split(",") == expected


def test_the_order_of_columns_does_not_depend_on_their_first_round(path: Path) -> None:
    later = [{"round": 1, "class_10/acc": 1.0}, {"round": 2, "class_9/acc": 1.0}, {"round": 3, "global/acc": 1.0}]
    write(path, later)
    assert path.read_text().splitlines()[0] == "round,global/acc,class_9/acc,class_10/acc"


# --- Rewinding ---

numbers = st.floats() | st.integers(-(2**80), 2**80)


def bits(value: float) -> tuple[type, bytes | int]:
    if isinstance(value, float):
        return float, struct.pack("d", math.nan if math.isnan(value) else value)
    return int, value


@given(st.lists(st.dictionaries(st.sampled_from(["global/acc", "client/acc_mean", "x"]), numbers), max_size=5))
def test_numbers_are_read_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, contents: list[Row]) -> None:
    path = tmp_path_factory.mktemp("csv") / "metrics.csv"
    rows: list[Row] = [{"round": n, **content} for n, content in enumerate(contents, 1)]
    write(path, rows)
    back = rewind(path, len(rows)).rows
    assert [{name: bits(value) for name, value in row.items()} for row in back] == [
        {name: bits(value) for name, value in row.items()} for row in rows
    ]


values = st.floats(allow_nan=False)
shared = st.dictionaries(st.sampled_from(["global/acc", "client/acc_mean", "zeta", "µ"]), values)
own = st.dictionaries(st.sampled_from(["acc", "loss", "µ"]), values)


@given(
    contents=st.lists(st.tuples(shared, st.dictionaries(st.sampled_from([2, 10, 11]), own)), min_size=1, max_size=6),
    done=st.integers(0, 6),
    data=st.data(),
)
def test_rewinding_and_replaying_gives_the_uninterrupted_file(
    tmp_path_factory: pytest.TempPathFactory, contents: list[tuple[Row, dict[int, Row]]], done: int, data: st.DataObject
) -> None:
    rows = [RoundMetrics({"round": n, **shared}, clients) for n, (shared, clients) in enumerate(contents, 1)]
    folder = tmp_path_factory.mktemp("csv")
    uninterrupted, path = folder / "a" / "metrics.csv", folder / "b" / "metrics.csv"
    for file in (uninterrupted, path):
        file.parent.mkdir()
    write(uninterrupted, rows)
    write(path, rows[:done])
    back = data.draw(st.integers(0, min(done, len(rows))))
    metrics = rewind(path, back)
    assert metrics.rows == rows[:back]
    for row in rows[back:]:
        metrics.append(row)
    assert path.read_bytes() == uninterrupted.read_bytes()
    assert metrics.rows == rows
    assert clients_file(path) == clients_file(uninterrupted)


def test_rewinding_drops_columns_that_only_later_rounds_had(path: Path) -> None:
    write(path, THREE)
    rewind(path, 1)
    assert path.read_text() == "round,global/acc\n1,0.1234\n"


def test_before_round_1_no_file_is_needed(path: Path) -> None:
    assert rewind(path, 0).rows == []
    assert rewind(path, 0).rows == []


def test_a_truncated_last_line_is_ignored(path: Path) -> None:
    write(path, THREE)
    whole = path.read_bytes()
    for missing in range(1, len(b"3,,0.75,1152921504606846976\n") + 1):
        path.write_bytes(whole[:-missing])
        with pytest.raises(Damaged, match="does not hold rounds 1 to 3"):
            rewind(path, 3)
        path.write_bytes(whole[:-missing])
        assert rewind(path, 2).rows == THREE[:2]


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"round,global/acc\n1,0.5\n",
        b"round,global/acc\n1,0.5\n3,0.5\n",
        b"round,global/acc\n2,0.5\n",
        b"round,global/acc\n1,0.5\n1,0.5\n2,0.5\n",
        b"round,global/acc\n1,0.5\n2,zero\n",
        b"round,global/acc\n1,0.5\n2,0.5,7\n",
        b"global/acc\n0.5\n0.5\n",
        b"\xff\xfe\x00",
    ],
    ids=["no file", "empty", "too short", "a gap", "no start", "twice", "no number", "too wide", "no round", "no text"],
)
def test_a_file_without_every_round_is_refused_and_not_changed(content: bytes | None, path: Path) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(Damaged, match=r"metrics.csv .* 1 to 2"):
        rewind(path, 2)
    assert (path.read_bytes() if path.exists() else None) == content


# --- Single clients ---

CLIENTS = [
    RoundMetrics({"round": 1, "global/acc": 0.5}, {10: {"acc": 0.25}, 9: {"acc": 1.0, "train_loss": 2.5}}),
    RoundMetrics({"round": 2, "global/acc": 0.5}, {3: {}}),
    RoundMetrics({"round": 3, "global/acc": 0.5}, {0: {"acc": 0.0, "weight": 0.125}, 9: {"drift": 3}}),
    RoundMetrics({"round": 12, "global/acc": 0.5}, {7: {"acc": 1.0}}),
]
TWO = b"round,client,acc,train_loss\n1,9,1.0,2.5\n1,10,0.25,\n"


def test_a_client_has_a_line_for_each_round_in_clients_csv(path: Path) -> None:
    metrics = write(path, CLIENTS)
    assert path.read_text() == "round,global/acc\n1,0.5\n2,0.5\n3,0.5\n12,0.5\n"
    assert metrics.rows == [{"round": row["round"], "global/acc": 0.5} for row in CLIENTS]
    assert clients_file(path) == (
        b"round,client,acc,train_loss,drift,weight\n"
        b"1,9,1.0,2.5,,\n"
        b"1,10,0.25,,,\n"
        b"3,0,0.0,,,0.125\n"
        b"3,9,,,3,\n"
        b"12,7,1.0,,,\n"
    )


def test_new_clients_only_add_lines(path: Path) -> None:
    metrics = write(path, CLIENTS[:1])
    node, before = path.with_name("clients.csv").stat().st_ino, clients_file(path)
    metrics.append(RoundMetrics({"round": 2, "global/acc": 1.0}, {k: {"acc": 0.5} for k in range(100, 200)}))
    assert path.with_name("clients.csv").stat().st_ino == node
    assert clients_file(path) == before + b"".join(b"2,%d,0.5,\n" % k for k in range(100, 200))


def test_metrics_of_the_run_may_be_named_like_those_of_a_client(path: Path) -> None:
    row = {"round": 1, "client_1/acc": 1.0, "client_1": 2.0, "client/acc_mean": 4.0}
    assert write(path, [row]).rows == [row]
    assert clients_file(path) is None


@pytest.mark.parametrize(("round", "left"), [(0, None), (1, TWO), (2, TWO)])
def test_rewinding_also_truncates_clients_csv(path: Path, round: int, left: bytes | None) -> None:
    write(path, CLIENTS)
    rewind(path, round)
    assert clients_file(path) == left


def test_a_run_killed_while_it_writes_clients_csv_resumes_to_the_same_bytes(path: Path) -> None:
    write(path, CLIENTS[:2])
    metrics_before = path.read_bytes()
    write(path, CLIENTS[:3])
    metrics_after, series = path.read_bytes(), clients_file(path)
    for cut in range(series.index(b"3,0"), len(series) + 1):
        path.write_bytes(metrics_before)
        path.with_name("clients.csv").write_bytes(series[:cut])
        rewind(path, 2).append(CLIENTS[2])
        assert (path.read_bytes(), clients_file(path)) == (metrics_after, series)
    assert [file.name for file in path.parent.iterdir() if file.name.startswith(".")] == []


def test_a_truncated_round_number_is_not_read_as_an_earlier_round(path: Path) -> None:
    write(path, CLIENTS)
    whole = clients_file(path)
    before = whole[: whole.index(b"12,7")]
    path.with_name("clients.csv").write_bytes(before + b"1")
    rewind(path, 3)
    assert clients_file(path) == before
