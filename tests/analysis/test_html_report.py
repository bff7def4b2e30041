"""The report's data and HTML, also for hostile and damaged runs. test_html_report_browser.py tests the figures."""

import base64
import gzip
import hashlib
import json
import math
import os
import re
import statistics
import zlib
from html.parser import HTMLParser
from io import BytesIO

import numpy as np
import pytest
import scipy.stats
from commands import run as command
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from run_folders import write_counts, write_image, write_run

from fl_lightning.analysis.html_report import contents as report_contents
from fl_lightning.analysis.html_report import report as page
from fl_lightning.analysis.html_report import run_files
from fl_lightning.analysis.result_table import ResultTable
from fl_lightning.core.errors import ConfigError
from fl_lightning.runs.partition import group_clients
from fl_lightning.runs.search import open_runs

CONFIG = {
    "algorithm": {"class_path": "fl_lightning.algorithms.FedSKC", "init_args": {"tau": 0.08}},
    "evaluation": {"target_accuracies": [0.5]},
    "rounds": 4,
}
METRICS = {
    "global/acc": [0.1, None, 0.123456789, 0.6],
    "global/loss": [2.5, None, float("nan"), 1.0],
    "comm/up_bytes": [1000, 1000, 1000, 1000],
    "comm/down_bytes": [500, 500, 500, 500],
    "comm/total_bytes": [1500, 3000, 4500, 6000],
    "time/round_s": [1.5, 0.25, 0.25, 2.0],
}
HOSTILE = "</script><script>steal()</script><img src=x onerror=steal()>&amp;\u2028'\""


def config(method="FedSKC", seed=0, **settings):
    return {**CONFIG, "algorithm": {"class_path": f"fl_lightning.algorithms.{method}"}, "seed": seed, **settings}


def contents(*folders):
    return report_contents.contents(open_runs(folders))


def left_out(folder):
    """Return the only line about a part that was left out of the page of a run."""
    (line,) = contents(folder)["left_out"]
    return line


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "a", CONFIG, METRICS)


# --- numbers ---


@given(st.floats(-1.7976e308, 1.7976e308).filter(lambda value: value == 0 or abs(value) >= 1e-15))
def test_numbers_keep_five_digits(value):
    assert report_contents.round_number(value) == pytest.approx(value, rel=5.001e-5, abs=0)
    assert len(re.sub(r"e.*|\D", "", repr(report_contents.round_number(value))).strip("0")) <= 5
    assert json.loads(json.dumps(report_contents.round_number(value))) == report_contents.round_number(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (2.0, "2"),
        (-1.7e-17, "0"),
        (123456, "123460"),
        (math.nan, "null"),
        (-math.inf, "null"),
        (1.79765e308, "null"),
    ],
)
def test_numbers_in_json(value, text):
    assert json.dumps(report_contents.round_number(value)) == text


def test_axes_and_metrics_of_a_run(folder):
    (run,) = contents(folder)["runs"]
    assert run["axes"] == {"round": [1, 2, 3, 4], "bytes": [1500, 3000, 4500, 6000], "seconds": [1.5, 1.75, 2, 4]}
    assert run["metrics"]["global/acc"] == [0.1, None, 0.12346, 0.6]
    assert run["metrics"]["global/loss"] == [2.5, None, None, 1]
    assert "round" not in run["metrics"]


@pytest.mark.parametrize(("rounds", "every"), [(1000, 1), (1001, 1), (5000, 10)])
def test_a_long_run_is_drawn_at_some_evaluated_rounds(tmp_path, rounds, every):
    accuracy = [0.5 if i % every == 0 or i == rounds else None for i in range(1, rounds + 1)]
    (run,) = open_runs([write_run(tmp_path / "a", {}, {"time/fit_s": [1] * rounds, "global/acc": accuracy})])
    drawn = report_contents.drawn_rounds(run)
    evaluated = [i for i, value in enumerate(accuracy, 1) if value]
    assert drawn[-1] == rounds
    assert len(drawn) <= 1000
    if rounds <= 1000:
        assert drawn == list(range(1, rounds + 1))
    else:
        assert set(drawn) <= set(evaluated)
        assert len(drawn) >= min(len(evaluated), 499)
        assert len(set(np.diff(drawn[:-1]))) == 1
        assert report_contents.contents([run])["left_out"] == [f"a: {len(drawn):,} of {rounds:,} rounds are drawn"]


def test_a_long_run_without_accuracies_is_drawn(tmp_path):
    (run,) = open_runs([write_run(tmp_path / "a", {}, {"global/loss": [1.0] * 2500})])
    assert report_contents.drawn_rounds(run) == [*range(3, 2500, 3), 2500]


# --- clients ---


def quantile(values, share):
    """Return a quantile by its definition: linear between the order statistics."""
    values, at = sorted(values), share * (len(values) - 1)
    low = math.floor(at)
    return values[low] + (at - low) * (values[min(low + 1, len(values) - 1)] - values[low])


def test_clients_are_quantiles_by_round_and_points_of_the_last_round(tmp_path):
    random = np.random.default_rng(3)
    lines = [(i, k, random.normal()) for i in (1, 2, 4) for k in sorted(random.choice(50, 9, replace=False).tolist())]
    columns = {"round": [i for i, _, _ in lines], "client": [k for _, k, _ in lines], "acc": [v for _, _, v in lines]}
    columns["weight"] = [v if i == 2 else None for i, _, v in lines]
    (run,) = contents(write_run(tmp_path / "a", CONFIG, METRICS, clients=columns))["runs"]
    spread = run["clients"]["acc"]
    assert spread["rounds"] == [1, 2, 4]
    for j, i in enumerate((1, 2, 4)):
        own = [v for at, _, v in lines if at == i]
        expected = [quantile(own, share) for share in (0, 0.1, 0.5, 0.9, 1)]
        assert [line[j] for line in spread["quantiles"]] == pytest.approx(expected, rel=1e-4)
    assert spread["last"]["round"] == 4
    assert spread["last"]["client"] == [k for i, k, _ in lines if i == 4]
    assert spread["last"]["value"] == pytest.approx([v for i, _, v in lines if i == 4], rel=1e-4)
    assert run["clients"]["weight"]["rounds"] == [2]
    assert run["clients"]["weight"]["last"]["round"] == 2


def test_at_most_a_thousand_clients_have_a_point(tmp_path):
    columns = {"round": [1] * 5000, "client": range(5000), "acc": np.linspace(0, 1, 5000).tolist()}
    (run,) = contents(write_run(tmp_path / "a", CONFIG, METRICS, clients=columns))["runs"]
    last = run["clients"]["acc"]["last"]
    assert len(last["client"]) == len(set(last["client"])) == len(last["value"]) == 1000
    assert (last["client"][0], last["client"][-1]) == (0, 4999)
    assert last["value"] == pytest.approx(np.array(last["client"]) / 4999, rel=1e-4)
    assert run["clients"]["acc"]["quantiles"][2] == [0.5]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n", "the columns round and client are missing"),
        ("round,client,acc\n1,0\n", "line 2 has 2 cells"),
        ("round,client,acc\n1,0,x\n", "could not convert"),
    ],
)
def test_a_damaged_clients_csv_is_left_out_with_a_line(folder, text, reason):
    (folder / "clients.csv").write_text(text)
    assert contents(folder)["runs"][0]["clients"] == {}
    assert re.match(f"a/clients.csv: .*{reason}", left_out(folder))


# --- names and settings ---


def test_names_of_runs(tmp_path):
    for name in ("x/a", "x/b", "y"):
        write_run(tmp_path / name, CONFIG, METRICS)
    assert [run["name"] for run in contents(tmp_path)["runs"]] == ["x/a", "x/b", "y"]
    assert [run["name"] for run in contents(tmp_path / "x" / "a")["runs"]] == ["a"]


def test_runs_that_differ_in_the_seed_or_the_logger_are_one_group(tmp_path):
    write_run(tmp_path / "a", config(seed=0, run_dir="x", engine="sequential"), METRICS)
    write_run(tmp_path / "b", config(seed=0, alpha=0.5), METRICS)
    write_run(tmp_path / "c", config(seed=1, logger={"class_path": "W", "init_args": {"name": "c"}}), METRICS)
    data = contents(tmp_path)
    assert [run["group"] for run in data["runs"]] == [0, 1, 0]


def title(*folders):
    text = page.page(contents(*folders))
    names = re.findall("<(?:title|h1)>(.*?)</", text)
    assert len(names) == 2
    assert len(set(names)) == 1
    return names[0]


@pytest.mark.thorough
def test_titles(tmp_path):
    digits = {"scenario": {"dataset": {"class_path": "fl_lightning.data.Digits"}}}
    for method, seed in (("FedSKC", 0), ("FedSKC", 1), ("FedAvg", 0)):
        write_run(tmp_path / f"{method}-{seed}", config(method, seed, **digits), METRICS)
    assert title(tmp_path) == "FedAvg, FedSKC on Digits: 3 runs, 2 seeds"
    assert title(tmp_path / "FedSKC-0", tmp_path / "FedAvg-0") == "FedSKC, FedAvg on Digits: 2 runs"
    assert title(tmp_path / "FedSKC-1") == "FedSKC on Digits: FedSKC-1"
    write_run(tmp_path / "unknown", {}, METRICS)
    assert title(tmp_path / "unknown") == "unknown"
    assert title(tmp_path) == "FedAvg, FedSKC on Digits: 4 runs, 2 seeds"
    for i in range(9):
        write_run(tmp_path / "many" / str(i), config(f"Method{i}"), METRICS)
    assert title(tmp_path / "many") == "Method0, Method1, Method2, Method3, Method4, 4 more: 9 runs"


def names_of(tmp_path, *configs):
    for i, each in enumerate(configs):
        write_run(tmp_path / str(i), each, METRICS)
    return contents(tmp_path)["groups"]


def test_names_of_groups(tmp_path):
    assert names_of(tmp_path / "1", config("FedAvg"), config("FedSKC", seed=3)) == ["FedAvg", "FedSKC"]
    assert names_of(tmp_path / "2", config("FedAvg"), config("FedAvg", seed=3)) == ["FedAvg"]
    many = [config(method, optimizer={"lr": lr}) for method in ("FedAvg", "FedSKC") for lr in (1, 2)]
    assert names_of(tmp_path / "3", *many, config("Local", optimizer={"lr": 1})) == [
        *("FedAvg lr=1", "FedAvg lr=2", "FedSKC lr=1", "FedSKC lr=2"),
        "Local",
    ]
    assert names_of(tmp_path / "4", config(mu=1), config(mu=2)) == ["mu=1", "mu=2"]


def test_the_summary_has_means_and_sample_deviations(tmp_path):
    accuracies = {"a": [0.5, 0.75], "b": [0.25, 0.625], "c": [0.125, None]}
    for seed, (name, values) in enumerate(accuracies.items()):
        columns = {"global/acc": values, "comm/total_bytes": [1e6, 2e6 + seed * 1e6], "time/round_s": [1, seed]}
        write_run(tmp_path / name, config(seed=seed), columns)
    write_run(tmp_path / "other", config("Local"), {"client/acc_mean": [0.25, 0.5]})
    table = contents(tmp_path)["summary"]
    first, second = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
    last = [0.75, 0.625, 0.125]
    assert first == {
        "runs": "3",
        "rounds": "2",
        "global/acc_last": f"0.5000 ± {statistics.stdev(last):.4f}",
        "global/acc_best": f"0.5000 ± {statistics.stdev(last):.4f}",
        "R_0.5": f"1.5 ± {statistics.stdev([1, 2]):.1f} (2 of 3)",
        "client/acc_mean_last": None,
        "client/acc_mean_best": None,
        "MB": "3 ± 1",
        "seconds": "2 ± 1",
    }
    assert table["columns"] == list(first), "R_acc before the clients' columns: a screen shows it without scrolling"
    assert second["client/acc_mean_last"] == "0.5000"
    assert second["R_0.5"] == "2.0"
    assert (second["runs"], second["global/acc_last"], second["MB"], second["seconds"]) == ("1", None, None, None)


def test_a_run_that_did_not_finish_is_marked_and_in_no_mean(tmp_path):
    """Its rounds are drawn as a group of their own, in the colour of its method."""
    for seed, acc in enumerate((0.5, 0.75)):
        write_run(tmp_path / str(seed), config(seed=seed), {"global/acc": [0.1, acc]})
    write_run(tmp_path / "other", config("Local"), {"global/acc": [0.1, 0.2]})
    write_run(tmp_path / "stopped", config(seed=2), {"global/acc": [0.1]}, finished=False)
    write_run(tmp_path / "unknown", None, {"global/acc": [0.1]}, finished=False)
    data = contents(tmp_path)
    names = ["FedSKC", "FedSKC (not finished: stopped)", "Local", "unknown (not finished: unknown)"]
    assert data["groups"] == names
    table = dict(zip(names, data["summary"]["rows"], strict=True))
    first = data["summary"]["columns"].index("global/acc_last")
    assert [table[name][0] for name in names] == ["2", "1", "1", "1"]
    assert table["FedSKC"][first] == f"0.6250 ± {statistics.stdev([0.5, 0.75]):.4f}"
    assert [run["name"] for run in data["runs"]] == [
        "0",
        "1",
        "other",
        "stopped (not finished)",
        "unknown (not finished)",
    ]
    assert data["title"].endswith("5 runs, 3 seeds, 2 not finished")
    colours, dashes = zip(*data["styles"], strict=True)
    assert colours[0] == colours[1] != colours[2]
    assert dashes[0] != dashes[1]


def test_equal_results_have_no_deviation(tmp_path):
    """The standard deviation of three times 0.9 is 1.4e-16 in floating point."""
    for seed in range(3):
        write_run(tmp_path / str(seed), config(seed=seed), {"global/acc": [0.9]})
    table = contents(tmp_path)["summary"]
    assert dict(zip(table["columns"], table["rows"][0], strict=True))["global/acc_last"] == "0.9000"


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([[3, 3], [12]], ["3", "12"]),
        ([[3, 4], [12]], ["3.50 ± 0.71", "12.00"]),
        ([[0.5, 0.5], [1.0, None]], ["0.5000", "1.0000 (1 of 2)"]),
        ([[1234.5678, 1236.5678], [0.001]], ["1236 ± 1", "0"]),
        ([[151.37], [0.5]], ["151.4", "0.5"]),
        ([[2.0, 2.25], [math.nan], [math.inf, 1.0]], ["2.125 ± 0.177", None, "1.000 (1 of 2)"]),
        ([[], [None]], [None, None]),
    ],
)
def test_numbers_of_a_column_have_the_same_decimal_places(values, texts):
    assert report_contents.column_texts(values) == texts


def study(tmp_path, finals):
    """Write a run for each method and seed, given the final accuracies of each method."""
    for method, accuracies in finals.items():
        for seed, accuracy in enumerate(accuracies):
            write_run(tmp_path / f"{method}-{seed}", config(method, seed), {"global/acc": [0.1, accuracy]})


def test_the_summary_has_tests_of_significance(tmp_path):
    finals = {"FedAvg": [0.5, 0.51, 0.52], "FedDW": [0.6, 0.62, 0.64], "FedSKC": [0.55, 0.5, 0.53]}
    study(tmp_path, finals)
    write_run(tmp_path / "stopped", config("FedDW", 3), {"global/acc": [0.1]}, finished=False)
    table = contents(tmp_path)["summary"]
    column = table["columns"].index("to FedAvg")
    assert table["columns"][column - 1] == "global/acc_last"
    deltas = np.array(finals["FedDW"]) - finals["FedAvg"]
    p = scipy.stats.ttest_rel(finals["FedDW"], finals["FedAvg"]).pvalue
    assert 0.001 < 2 * p < 0.01
    cells = [row[column] for row in table["rows"]]
    assert cells[:2] == ["", f"{deltas.mean():+.4f} ± {deltas.std(ddof=1):.4f} **"]
    assert cells[2] is None  # not finished
    assert "*" not in cells[3]
    assert table["notes"][0].startswith("global/acc, to FedAvg: difference in the last round")
    other = report_contents.contents(open_runs([tmp_path]), {"algorithm": "FedSKC"})["summary"]
    assert "to FedSKC" in other["columns"]
    with pytest.raises(ConfigError, match=r"^--reference: no group has FedProx\."):
        report_contents.contents(open_runs([tmp_path]), {"algorithm": "FedProx"})


def test_without_a_reference_there_is_no_test(tmp_path):
    study(tmp_path, {"FedDW": [0.5, 0.6], "FedSKC": [0.6, 0.7]})
    table = contents(tmp_path)["summary"]
    assert not [name for name in table["columns"] if name.startswith("to ")]
    assert table["notes"] == []


def test_an_unfinished_run_has_its_planned_number_of_rounds(tmp_path):
    write_run(tmp_path / "a", config(), METRICS, finished=False)
    table = contents(tmp_path)["summary"]
    assert dict(zip(table["columns"], table["rows"][0], strict=True))["rounds"] == "4 of 4"


def test_labels_and_colours_of_figures(folder):
    (folder / "clients.csv").write_text("round,client,acc\n1,0,0.5\n")
    data = contents(folder)
    assert data["labels"]["global/acc"] == "Test accuracy"
    assert data["labels"]["acc"] == "Client test accuracy"
    assert {key: len(colours) for key, colours in data["colours"].items()} == {"light": 8, "dark": 8}


def test_common_and_own_settings(tmp_path):
    write_run(tmp_path / "a", config(seed=1, note="x"), METRICS)
    write_run(tmp_path / "b", config(seed=2, flag=None), METRICS)
    write_run(tmp_path / "c", config(seed=1, note="y"), METRICS)
    data = contents(tmp_path)
    first, second, _ = ({**data["common"], **run["settings"]} for run in data["runs"])
    common = {"algorithm": "FedSKC", "evaluation.target_accuracies": "[0.5]", "rounds": "4"}
    assert first == common | {"seed": "1", "note": "x"}
    assert second == common | {"seed": "2", "flag": "null"}
    assert data["runs"][0]["settings"] == {"seed": "1", "note": "x"}


def test_a_long_setting_is_cut(tmp_path):
    data = contents(write_run(tmp_path / "a", {"note": "z" * 5000, "short": "y" * 300}, METRICS))
    assert data["common"]["note"] == "z" * 299 + "…"
    assert data["common"]["short"] == "y" * 300


# --- partitions ---


def test_equal_partitions_are_stored_once(tmp_path):
    counts = np.random.default_rng(0).integers(0, 90, (6, 3))
    for name, its in (("a", counts), ("b", counts + 1), ("c", counts)):
        write_counts(write_run(tmp_path / name, CONFIG, METRICS), its)
    first, second = contents(tmp_path)["partitions"]
    unnamed = {"clients": (), "classes": ()}
    assert first == {"runs": [0, 2], "clients": 6, "counts": counts.tolist(), "names": unnamed}
    assert second == {"runs": [1], "clients": 6, "counts": (counts + 1).tolist(), "names": unnamed}


def test_a_partition_over_many_clients_is_binned(tmp_path):
    counts = np.random.default_rng(0).integers(0, 9, (1000, 4))
    write_counts(write_run(tmp_path / "a", CONFIG, METRICS), counts)
    (partition,) = contents(tmp_path)["partitions"]
    assert partition["clients"] == 1000
    assert np.shape(partition["counts"]) == (200, 4)
    assert partition["counts"] == pytest.approx(group_clients(counts).T, rel=1e-4)


def test_partitions_beyond_the_limit_of_a_page_are_left_out_with_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(report_contents, "MOST_CELLS", 30)
    for i in range(3):
        write_counts(write_run(tmp_path / str(i), CONFIG, METRICS), np.full((5, 3), i))
    data = contents(tmp_path)
    assert [each["runs"] for each in data["partitions"]] == [[0], [1]]
    assert data["left_out"] == ["2/partition.csv: earlier partitions fill the page"]


@pytest.mark.parametrize("text", ["", "client,split,class_0\n0,train,-1\n", "client,split,class_0\n0,train,x\n"])
def test_a_damaged_partition_is_left_out_with_a_line(folder, text):
    (folder / "partition.csv").write_text(text)
    assert contents(folder)["partitions"] == []
    assert left_out(folder).startswith("a/partition.csv: ")


# --- images ---


def noise(height, width):
    return np.random.default_rng(0).integers(0, 255, (height, width, 3))


def image_of(source):
    start, _, code = source.partition(",")
    assert start == "data:image/png;base64"
    return Image.open(BytesIO(base64.b64decode(code)))


def test_the_last_image_of_each_kind_is_taken(folder):
    for name, round in (("drift", 2), ("drift", 10), ("row_norms", 4)):
        write_image(folder / "figures" / name / f"round-{round}.png", noise(5, round))
    write_image(folder / "figures" / "drift" / "later.png", noise(5, 5))
    data = contents(folder)
    images = [(each["run"], each["name"], each["round"]) for each in data["images"]]
    assert images == [(0, "drift", 10), (0, "row_norms", 4)]
    assert [np.array_equal(image_of(each["source"]), noise(5, each["round"])) for each in data["images"]] == [True] * 2
    assert not any(each["reduced"] for each in data["images"])
    assert data["left_out"] == []


@pytest.mark.thorough
def test_a_large_image_is_reduced(folder):
    blocks = np.kron(noise(20, 40) // 16 * 15, np.ones((40, 40, 1)))
    write_image(folder / "figures" / "drift" / "round-1.png", blocks + noise(800, 1600) % 2)
    assert (folder / "figures" / "drift" / "round-1.png").stat().st_size > run_files.IMAGE_BYTES
    (image,) = contents(folder)["images"]
    assert image["reduced"]
    small = image_of(image["source"])
    assert small.width in run_files.SIDES
    assert small.width == pytest.approx(2 * small.height, abs=2)
    assert len(base64.b64decode(image["source"].partition(",")[2])) <= run_files.IMAGE_BYTES


def test_an_image_that_stays_too_large_is_left_out_with_a_line(folder):
    write_image(folder / "figures" / "drift" / "round-1.png", noise(900, 900))
    data = contents(folder)
    assert data["images"] == []
    (line,) = data["left_out"]
    assert line.startswith("a/figures/drift/round-1.png: ")
    assert "150,000 bytes" in line


def test_images_beyond_the_limit_of_a_page_are_left_out_with_a_line_each(folder, monkeypatch):
    for name, side in (("a", 90), ("b", 120), ("c", 20)):
        write_image(folder / "figures" / name / "round-1.png", noise(side, side))
    monkeypatch.setattr(run_files, "IMAGES_BYTES", 45_000)
    data = contents(folder)
    assert [each["name"] for each in data["images"]] == ["a", "c"]
    assert data["left_out"] == ["a/figures/b/round-1.png: earlier images fill the page"]


def png(width, height):
    """Return a PNG of 10 x 10 pixels whose header has another size."""
    Image.fromarray(noise(10, 10).astype(np.uint8)).save(content := BytesIO(), format="PNG")
    chunk = b"IHDR" + width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return content.getvalue()[:12] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + content.getvalue()[33:]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<svg xmlns='http://www.w3.org/2000/svg' onload='steal()'/>", "it is not a PNG image"),
        (png(10, 10)[:200], "it is damaged"),
        (png(6_000, 5_000), "it has more than 25,000,000 pixels"),
        (png(100_000, 100_000), "it has more than 25,000,000 pixels"),
    ],
)
def test_a_file_that_is_no_image_is_left_out_with_a_line(folder, content, reason):
    path = folder / "figures" / "drift" / "round-1.png"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert contents(folder)["images"] == []
    assert re.match(f"a/figures/drift/round-1.png: .*{reason}", left_out(folder))


@pytest.mark.parametrize("link", ["figures", "figures/drift/round-1.png"])
def test_links_out_of_a_run_are_not_followed(folder, tmp_path, link):
    write_image(tmp_path / "elsewhere" / "drift" / "round-1.png", noise(9, 9))
    (folder / link).parent.mkdir(parents=True, exist_ok=True)
    (folder / link).symlink_to(tmp_path / link.replace("figures", "elsewhere"))
    assert contents(folder)["images"] == []
    assert left_out(folder) == "a/figures/drift/round-1.png: it is a link"


def test_a_pipe_in_place_of_a_file_does_not_block(folder):
    (folder / "figures" / "drift").mkdir(parents=True)
    for name in ("clients.csv", "partition.csv", "figures/drift/round-1.png"):
        os.mkfifo(folder / name)
    assert [line.partition(": ")[2] for line in contents(folder)["left_out"]] == ["it is no file"] * 3


def test_huge_files_are_not_opened(folder, monkeypatch):
    write_image(folder / "figures" / "drift" / "round-1.png", noise(9, 9))
    monkeypatch.setattr(run_files, "MOST_IMAGE_BYTES", 100)
    assert left_out(folder).startswith("a/figures/drift/round-1.png: it is larger")


# --- the page ---


class Elements(HTMLParser):
    """The tags and scripts of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "script":
            self.scripts.append((dict(attributes), ""))

    def handle_data(self, data):
        if self.tags and self.tags[-1][0] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data

    def handle_endtag(self, tag):
        self.tags.append((f"/{tag}", {}))


def test_hostile_text_does_not_become_markup(tmp_path):
    name = HOSTILE.replace("/", "|")
    plain = write_run(tmp_path / "plain", {**CONFIG, "note": "x", "key": "y"}, {**METRICS, "own/acc": [1, 1, 1, 1]})
    hostile = write_run(tmp_path / name, {**CONFIG, "note": HOSTILE, HOSTILE: "y"}, {**METRICS, HOSTILE: [1, 1, 1, 1]})
    pages = [Elements(page.page(contents(folder))) for folder in (plain, hostile)]
    assert pages[0].tags == pages[1].tags
    data = json.loads(pages[1].scripts[0][1])
    assert data["runs"][0]["name"] == name
    assert data["common"]["note"] == HOSTILE
    assert HOSTILE in data["common"]
    assert HOSTILE in data["runs"][0]["metrics"]


@pytest.mark.thorough
@given(st.dictionaries(st.text("<>&'\"/\\é\u2028") | st.text(), st.lists(st.text())))
def test_escaped_json_has_the_same_content_without_markup(data):
    text = page.escape_json(data)
    assert json.loads(text) == data
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_a_page_loads_nothing_and_its_policy_allows_only_its_scripts(folder):
    text = page.page(contents(folder))
    found = Elements(text)
    for tag, attributes in found.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form")
        assert not {"src", "href", "action"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on")]
    (policy,) = (each["content"] for _, each in found.tags if each.get("http-equiv") == "Content-Security-Policy")
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    kinds = {attributes.get("type"): script for attributes, script in found.scripts}
    assert kinds.keys() == {"application/json", "text/plain", None}
    plotly = gzip.decompress(base64.b64decode(kinds["text/plain"]))
    assert b"plotly.js v" in plotly[:200]
    hashes = [base64.b64encode(hashlib.sha256(script).digest()).decode() for script in (kinds[None].encode(), plotly)]
    assert rules.pop("script-src") == [f"'sha256-{each}'" for each in hashes]
    assert rules == {
        "default-src": ["'none'"],
        "style-src": ["'unsafe-inline'"],
        "img-src": ["data:", "blob:"],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }


# --- the command ---


def test_sections_come_first_with_tables_and_figures_and_hostile_cells_are_text(folder, tmp_path):
    rows = [[HOSTILE, "1"]]
    section = page.Section("ranks; tuned", [ResultTable(["method", "rank"], rows, notes=["n"])], [b"<svg/>"])
    page.write_report(open_runs([folder]), tmp_path / "page.html", [section])
    text = (tmp_path / "page.html").read_text()
    data = re.search('<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1]
    [found] = json.loads(data)["sections"]
    assert found["title"] == "ranks; tuned"
    assert found["tables"] == [{"header": ["method", "rank"], "rows": rows, "notes": ["n"]}]
    assert base64.b64decode(found["figures"][0].removeprefix("data:image/svg+xml;base64,")) == b"<svg/>"
    assert HOSTILE not in text


def test_the_command_writes_a_page_and_names_the_parts_left_out(folder, tmp_path):
    (folder / "partition.csv").write_text("damaged")
    out = tmp_path / "new" / "page.html"
    outcome = command("report", folder, "-o", out)
    assert outcome.code == 0
    missing, written = outcome.out.splitlines()
    assert missing.startswith("left out: a/partition.csv: ")
    assert written == f"wrote {out}: 1 run, {out.stat().st_size / 1e6:.1f} MB"
    assert out.stat().st_size < 2_500_000
    assert page.is_report(out)


@pytest.mark.thorough
def test_only_a_report_is_replaced(folder, tmp_path):
    out = tmp_path / "page.html"
    assert command("report", folder, "-o", out).code == 0
    first = out.read_text()
    assert command("report", folder, write_run(tmp_path / "b", CONFIG, METRICS), "-o", out).code == 0
    assert out.read_text() != first
    page, held = tmp_path / "own.html", tmp_path / "folder.html"
    page.write_text("<html>")
    held.mkdir()
    for other in (page, held):
        message = f"-o: {other} exists and is not a report. Name another file, or remove it"
        assert command("report", folder, "-o", other) == (2, "", f"fl-lightning: error: {message}\n")
    assert page.read_text() == "<html>"
    message = "-o: the name is empty. Name a file, such as report.html"
    assert command("report", folder, "-o", "") == (2, "", f"fl-lightning: error: {message}\n")


@pytest.mark.filterwarnings("default")
def test_damaged_folders_are_skipped_with_a_line_each(folder, tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "metrics.csv").write_text("nonsense\n")
    write_run(tmp_path / "worse", {}, METRICS)
    (tmp_path / "worse" / "config.yaml").write_text("!!python/object/apply:os.system ['touch hacked']")
    outcome = command("report", tmp_path, "-o", tmp_path / "page.html")
    assert outcome.code == 0
    assert [line.startswith("fl-lightning: warning: ") for line in outcome.err.splitlines()] == [True, True]
    assert ": 1 run, " in outcome.out


def test_the_name_of_a_folder_need_not_be_utf8(tmp_path):
    run = write_run(tmp_path / os.fsdecode(b"caf\xe9"), CONFIG, METRICS)
    outcome = command("report", run, "-o", tmp_path / "page.html")
    assert outcome.code == 0, outcome.err
    assert "caf?" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_runs_are_selected_by_their_settings(tmp_path):
    out = tmp_path / "page.html"
    assert command("report", tmp_path, "-o", out) == (2, "", f"fl-lightning: error: {tmp_path}: no run found\n")
    for seed in range(2):
        write_run(tmp_path / f"{seed}", config(seed=seed), METRICS)
    outcome = command("report", tmp_path, "-o", out, "--where", "seed=7")
    assert outcome.code == 2
    assert "seed=7" in outcome.err
    assert not out.exists()
    outcome = command("report", tmp_path, "-o", out, "--where", "seed=1", "algorithm=FedSKC")
    assert ": 1 run, " in outcome.out
