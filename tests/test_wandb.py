"""What a W&B run holds, read back from its file."""

import json
import os
import struct
import time
from pathlib import Path

import pytest
import wandb
import yaml
from commands import TINY, rows, run, summary, tiny
from experiments import client_series
from wandb.proto.wandb_internal_pb2 import Record

from fl_lightning.loggers import WandbRoundLogger

BLOCK = 32 * 1024
WANDB = ["--logger", "WandbRoundLogger"]

DIVERGING = """
from fl_lightning.algorithms import FedAvg

class Diverging(FedAvg):
    rounds = 0

    def aggregate(self, state, uploads):
        self.rounds += 1
        if self.rounds == 2:
            raise ArithmeticError("diverged")
        return super().aggregate(state, uploads)
"""


def records(path: Path) -> list[Record]:
    """The records of a `.wandb` file: a LevelDB log after a header of seven bytes."""
    content = path.read_bytes()
    assert content.startswith(b":W&B")
    found, position, parts = [], 7, b""
    while position + 7 <= len(content):
        if BLOCK - position % BLOCK < 7:  # what is left of a block is too small for a header
            position += BLOCK - position % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", content, position)
        parts += content[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            found.append(Record.FromString(parts))
            parts = b""
    return found


def finished(path: Path) -> list[Record]:
    """The records of a run that is over: W&B's own process writes the last of them a moment after."""
    deadline = time.monotonic() + 60
    while not of_kind(found := records(path), "exit"):
        assert time.monotonic() < deadline, f"{path} has no end"
        time.sleep(0.02)
    return found


def of_kind(found, kind):
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def values(items):
    """Keys and values of a history, summary or config record; nested keys are joined by dots."""
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}


def history(found):
    """One dict a logged round."""
    logged = [values(record.item) for record in of_kind(found, "history")]
    return [row for row in logged if "global/acc" in row]


class Logged:
    """A run folder and its W&B files, oldest first."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.paths = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_mtime_ns)
        self.parts = [finished(path) for path in self.paths]
        self.records = [record for part in self.parts for record in part]


@pytest.fixture(scope="module", autouse=True)
def wandb_at(tmp_path_factory):
    """W&B's own folders out of the way."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.lower())))
        patch.delenv("WANDB_MODE", raising=False)
        yield


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Two rounds, logged to W&B."""
    run_dir = tmp_path_factory.mktemp("logged") / "2026-01-02T03-04-05-abcdef"
    outcome = tiny(run_dir, "--rounds", "2", *WANDB)
    return Logged(run_dir), outcome


@pytest.fixture(scope="module")
def resumed(logged, tmp_path_factory):
    """The same run, then a third round in a second sitting."""
    run_dir = tmp_path_factory.mktemp("resumed") / logged[0].run_dir.name
    tiny(run_dir, "--rounds", "2", *WANDB)
    assert run("fit", "--resume", run_dir, "--rounds", "3", "--log_clients", "false").code == 0
    return Logged(run_dir)


def test_there_is_one_run_named_after_its_folder(logged):
    (started,) = of_kind(logged[0].records, "run")
    assert started.run_id == logged[0].run_dir.name
    assert started.project == "fl-lightning"
    (ended,) = of_kind(logged[0].records, "exit")
    assert ended.exit_code == 0


def test_round_is_the_step_of_every_metric(logged):
    defined = of_kind(logged[0].records, "metric")
    assert [(metric.name, metric.glob_name, metric.step_metric) for metric in defined] == [
        ("round", "", ""),
        ("", "*", "round"),
    ]
    assert b"global_step" not in logged[0].paths[0].read_bytes()


def test_the_history_is_metrics_csv_and_clients_csv(logged):
    told = history(logged[0].records)
    written = rows(logged[0].run_dir)
    assert [row["round"] for row in told] == [1, 2]
    for row, expected in zip(told, written, strict=True):
        own = {name: value for name, value in row.items() if not name.startswith("_")}
        series = client_series(logged[0].run_dir, row["round"])
        assert own == {name: float(text) for name, text in expected.items() if text} | series
    names = told[0].keys()
    assert {"global/acc", "global/loss", "client/acc_mean", "client/acc_std", "client/train_loss"} <= names
    assert {"comm/up_bytes", "comm/down_bytes", "comm/total_bytes"} <= names
    assert {f"client_{k}/{what}" for k in range(4) for what in ("acc", "train_loss")} <= names


def test_the_config_is_in_the_run(logged):
    config = {}
    for record in of_kind(logged[0].records, "config"):
        config |= values(record.update)
    written = yaml.safe_load((logged[0].run_dir / "config.yaml").read_text())
    assert {name: config[name] for name in written} == written
    assert written["algorithm"]["init_args"]["tau"] == 0.08


def test_the_partition_is_in_the_run(logged):
    (reference,) = [
        json.loads(item.value_json)
        for record in of_kind(logged[0].records, "history")
        for item in record.item
        if list(item.nested_key) == ["partition", "path"]
    ]
    table = json.loads((logged[0].paths[0].parent / "files" / reference).read_text())
    assert table["columns"] == ["client", *(f"class {label}" for label in range(10))]
    lines = [line.split(",") for line in (logged[0].run_dir / "partition.csv").read_text().splitlines()]
    assert table["data"] == [[int(n) for n in (line[0], *line[2:])] for line in lines if line[1] == "train"]


def test_the_final_summary_is_in_the_run(logged):
    told = {}
    for record in of_kind(logged[0].records, "summary"):
        told |= values(record.update)
    figures = summary(logged[0].run_dir)
    assert {name: told[name] for name, value in figures.items() if value is not None} == {
        name: value for name, value in figures.items() if value is not None
    }
    assert figures["global/acc_last"] == told["global/acc"]


def test_nothing_but_our_own_lines_is_printed(logged):
    _, (code, out, err) = logged
    assert (code, err) == (0, "")
    assert out.startswith("round 1/2")
    assert "wandb" not in out.replace(str(logged[0].run_dir), "").lower()
    assert "lightning" not in out.lower()


def test_a_resumed_run_has_the_same_id_and_goes_on(resumed, logged):
    assert len(resumed.parts) == 2
    ids = [started.run_id for part in resumed.parts for started in of_kind(part, "run")]
    assert ids == [logged[0].run_dir.name] * 2
    assert all(started.resume for started in of_kind(resumed.records, "run"))
    told = history(resumed.records)
    assert [row["round"] for row in told] == [1, 2, 3]
    assert told[2]["global/acc"] == float(rows(resumed.run_dir)[2]["global/acc"])
    assert told[2]["comm/total_bytes"] == 3 * told[0]["comm/total_bytes"]
    assert [metric.step_metric for metric in of_kind(resumed.parts[1], "metric")] == ["", "round"]


def test_without_log_clients_no_client_has_a_series(resumed):
    before, after = history(resumed.parts[0])[0], history(resumed.parts[1])[0]
    assert [name for name in before if name.startswith("client_")]
    assert [name for name in after if name.startswith("client_")] == []
    assert "client/acc_mean" in after


def test_offline_is_a_setting_of_the_run_not_of_the_process(logged):
    assert "WANDB_MODE" not in os.environ
    assert wandb.run is None


def test_a_failed_run_is_a_failed_run_there(tmp_path, monkeypatch):
    (tmp_path / "diverging.py").write_text(DIVERGING)
    (tmp_path / "own.yaml").write_text(TINY)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["--run_dir", tmp_path / "run", "--algorithm", "diverging.Diverging", *WANDB]
    code, _, err = run("fit", "--config", tmp_path / "own.yaml", *words)
    assert code == 1
    assert err.startswith("fl-lightning: error: ArithmeticError: diverged")
    logged = Logged(tmp_path / "run")
    (ended,) = of_kind(logged.records, "exit")
    assert ended.exit_code == 1
    assert [row["round"] for row in history(logged.records)] == [1]


def test_any_lightning_logger_takes_its_place(tmp_path):
    run_dir = tmp_path / "run"
    logger = ["--logger", "CSVLogger", "--logger.save_dir", str(tmp_path / "logs"), "--logger.version", "0"]
    tiny(run_dir, "--rounds", "2", *logger)
    assert not (run_dir / "wandb").exists()
    (written,) = (tmp_path / "logs").rglob("metrics.csv")
    header, *lines = [line.split(",") for line in written.read_text().splitlines()]
    expected = rows(run_dir)
    assert len(lines) == 2
    for line, row in zip(lines, expected, strict=True):
        told = dict(zip(header, line, strict=True))
        assert told.pop("step") == row["round"]
        assert {name: float(text) for name, text in told.items() if text} == {
            name: pytest.approx(float(text)) for name, text in row.items() if name != "round" and text
        } | client_series(run_dir, int(row["round"]))
    (config,) = (tmp_path / "logs").rglob("hparams.yaml")
    assert yaml.safe_load(config.read_text())["algorithm"]["class_path"] == "fl_lightning.FedSKC"


def test_names_and_groups_reach_wandb():
    logger = WandbRoundLogger(project="p", name="n", entity="e", group="g", tags=["a", "b"], offline=False)
    wanted = {"project": "p", "name": "n", "entity": "e", "group": "g", "tags": ["a", "b"]}
    assert {key: logger._wandb_init[key] for key in wanted} == wanted
    assert not logger._offline


def test_the_partition_of_many_clients_is_no_table():
    logger = WandbRoundLogger()
    logger.log_counts("partition", [[1, 2]] * 1001)
    assert logger._experiment is None
