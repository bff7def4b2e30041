import math
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fl_lightning.errors import CheckpointError
from fl_lightning.evaluation import Row
from fl_lightning.loggers import MetricsCsv


def written(path: Path, rows: list[Row]) -> MetricsCsv:
    path.unlink(missing_ok=True)
    metrics = MetricsCsv(path)
    metrics.rewind(0)
    for row in rows:
        metrics.append(dict(row))
    return metrics


def rewound(path: Path, round: int) -> MetricsCsv:
    metrics = MetricsCsv(path)
    metrics.rewind(round)
    return metrics


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


THREE: list[Row] = [
    {"round": 1, "global/acc": 0.1234},
    {"round": 2, "global/acc": 0.5, "client_2/acc": 1.0},
    {"round": 3, "comm/up_bytes": 2**60, "client_2/acc": 0.75},
]


def test_one_row_a_round_and_blanks_where_there_is_no_value(path: Path) -> None:
    metrics = written(path, THREE)
    assert path.read_bytes().decode() == (
        "round,global/acc,comm/up_bytes,client_2/acc\n"
        "1,0.1234,,\n"
        "2,0.5,,1.0\n"
        "3,,1152921504606846976,0.75\n"
    )  # fmt: skip
    assert metrics.rows == THREE


def test_a_row_is_on_disk_when_append_returns(path: Path) -> None:
    metrics = written(path, [])
    for n, row in enumerate(THREE, 1):
        metrics.append(row)
        assert len(path.read_text().splitlines()) == n + 1
        assert rewound(path, n).rows == THREE[:n]


def test_a_row_without_new_columns_is_only_added_at_the_end(path: Path) -> None:
    metrics = written(path, [{"round": 1, "global/acc": 0.5, "global/loss": 2.0}])
    before, node = path.read_bytes(), path.stat().st_ino
    metrics.append({"global/loss": 1.0, "round": 2})
    assert path.read_bytes() == before + b"2,,1.0\n"
    assert path.stat().st_ino == node


def test_columns_stand_in_groups_and_count_naturally(path: Path) -> None:
    expected = ["round", "global/acc", "global/loss", "personal_on_global/acc_mean", "client/acc_mean"]
    expected += ["client/acc_std", "comm/up_bytes", "time/fit_s", "client_0/acc", "client_2/acc", "client_2/train_loss"]
    expected += ["client_10/acc", "client_100/acc", "entropy/class_9", "entropy/class_11"]
    for order in (expected, expected[::-1], sorted(expected)):
        written(path, [dict.fromkeys(order, 1)])
        assert path.read_text().splitlines()[0].split(",") == expected


def test_the_columns_do_not_depend_on_when_they_came(path: Path) -> None:
    later = [{"round": 1, "client_10/acc": 1.0}, {"round": 2, "client_9/acc": 1.0}, {"round": 3, "global/acc": 1.0}]
    written(path, later)
    assert path.read_text().splitlines()[0] == "round,global/acc,client_9/acc,client_10/acc"


# --- Rewinding ---

numbers = st.floats() | st.integers(-(2**80), 2**80)


def bits(value: float) -> tuple[type, bytes | int]:
    if isinstance(value, float):
        return float, struct.pack("d", math.nan if math.isnan(value) else value)
    return int, value


@given(st.lists(st.dictionaries(st.sampled_from(["global/acc", "client_3/acc", "x"]), numbers), max_size=5))
def test_numbers_come_back_bit_for_bit(tmp_path_factory: pytest.TempPathFactory, contents: list[Row]) -> None:
    path = tmp_path_factory.mktemp("csv") / "metrics.csv"
    rows: list[Row] = [{"round": n, **content} for n, content in enumerate(contents, 1)]
    written(path, rows)
    back = rewound(path, len(rows)).rows
    assert [{name: bits(value) for name, value in row.items()} for row in back] == [
        {name: bits(value) for name, value in row.items()} for row in rows
    ]


names = st.sampled_from(["global/acc", "time/fit_s", "client/acc_mean", "client_2/acc", "client_10/acc", "zeta", "µ"])


@given(
    contents=st.lists(st.dictionaries(names, st.floats(allow_nan=False)), min_size=1, max_size=6),
    done=st.integers(0, 6),
    data=st.data(),
)
def test_rewinding_and_replaying_gives_the_uninterrupted_file(
    tmp_path_factory: pytest.TempPathFactory, contents: list[Row], done: int, data: st.DataObject
) -> None:
    rows: list[Row] = [{"round": n, **content} for n, content in enumerate(contents, 1)]
    folder = tmp_path_factory.mktemp("csv")
    uninterrupted, path = folder / "a.csv", folder / "b.csv"
    written(uninterrupted, rows)
    written(path, rows[:done])
    back = data.draw(st.integers(0, min(done, len(rows))))
    metrics = rewound(path, back)
    assert metrics.rows == rows[:back]
    for row in rows[back:]:
        metrics.append(row)
    assert path.read_bytes() == uninterrupted.read_bytes()
    assert metrics.rows == rows


def test_rewinding_drops_columns_that_only_later_rounds_had(path: Path) -> None:
    written(path, THREE)
    rewound(path, 1)
    assert path.read_text() == "round,global/acc\n1,0.1234\n"


def test_before_round_1_no_file_is_needed(path: Path) -> None:
    assert rewound(path, 0).rows == []
    assert rewound(path, 0).rows == []


def test_a_last_line_that_was_cut_short_does_not_count(path: Path) -> None:
    written(path, THREE)
    whole = path.read_bytes()
    for missing in range(1, len(b"3,,1152921504606846976,0.75\n") + 1):
        path.write_bytes(whole[:-missing])
        with pytest.raises(CheckpointError, match="does not hold rounds 1 to 3"):
            rewound(path, 3)
        path.write_bytes(whole[:-missing])
        assert rewound(path, 2).rows == THREE[:2]


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
def test_a_file_that_does_not_hold_every_round_is_refused_and_left_alone(content: bytes | None, path: Path) -> None:
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"metrics.csv does not hold rounds 1 to 2: put it back, or start"):
        rewound(path, 2)
    assert (path.read_bytes() if path.exists() else None) == content
