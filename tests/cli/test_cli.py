"""The commands on tiny runs of digits, in this process."""

import inspect
import io
import os
import re
import shutil
import struct
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from commands import TINY, contents, rows, run, summary, table, tiny, untimed_rows
from refusals import check_refused_command

from fl_lightning import HOMES, algorithms, models
from fl_lightning.cli import main as cli
from fl_lightning.cli.catalogue import FAMILIES, KINDS
from fl_lightning.cli.experiment import open_run, use_recorded_paths
from fl_lightning.core.config_files import shipped, shipped_text
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import Digits, Dirichlet, Scenario
from fl_lightning.engines import SequentialEngine

RICH = """# Everything nested that a config can hold.
rounds: 2
seed: 3
scenario: {dataset: Digits, partition: {class_path: Pathological, init_args: {classes_per_client: 3}}, clients: 4}
model: {class_path: MLP, init_args: {hidden: [8, 4]}}
algorithm: {class_path: FedAvg, init_args: {loss_terms: [{class_path: LocalContrastive, init_args: {tau: 0.5}}]}}
optimizer: {class_path: Adam, init_args: {lr: 1e-3, betas: [0.8, 0.9]}}
lr_scheduler: {class_path: StepLR, init_args: {step_size: 1}}
round_lr_scheduler: {class_path: ExponentialLR, init_args: {gamma: 0.9}}
callbacks: [{class_path: EarlyStopping, init_args: {patience: 5}}]
evaluation: {client_model: received, target_accuracies: [0.25]}
trainer: {max_epochs: 1, accelerator: cpu, gradient_clip_val: 1.0}
logger: {class_path: CSVLogger, init_args: {save_dir: logs}}
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of three rounds, and what it printed."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    words = ["--evaluation.client_model=received", "--seed=5", "--callbacks+=Checkpointing", "--callbacks.every=1"]
    return run_dir, tiny(run_dir, *words)


def printed_config(capsys, *words):
    with pytest.raises(SystemExit) as end:
        cli.main(["fit", *words, "--print_config"])
    assert end.value.code in (0, None)
    return capsys.readouterr().out


# --- Help and --print_config ---


def test_help_lists_every_command(capsys):
    for words in ([], ["--help"], ["-h"]):
        assert cli.main(words) == 0
        text = capsys.readouterr().out
        assert all(f"  {command} " in text and line in text for command, line in cli.COMMANDS.items())


@pytest.mark.thorough
@pytest.mark.parametrize("text", [TINY, RICH], ids=["tiny", "rich"])
@pytest.mark.fast_cases(1)
def test_a_printed_config_is_a_config_that_prints_itself(text, here, capsys):
    Path("own.yaml").write_text(text)
    printed = printed_config(capsys, "--config", "own.yaml")
    Path("printed.yaml").write_text(printed)
    assert printed_config(capsys, "--config", "printed.yaml") == printed
    assert run("fit", "--config", "printed.yaml", "--run_dir", "printed", "--rounds", "1").code == 0
    assert run("fit", "--config", "own.yaml", "--run_dir", "own", "--rounds", "1").code == 0
    assert Path("printed/final/model.pt").read_bytes() == Path("own/final/model.pt").read_bytes()
    assert Path("printed/config.yaml").read_bytes() == Path("own/config.yaml").read_bytes()


def test_a_printed_config_has_the_settings_of_the_file(here, capsys):
    Path("own.yaml").write_text(RICH)
    printed = yaml.safe_load(printed_config(capsys, "--config", "own.yaml"))
    assert printed["algorithm"]["init_args"]["loss_terms"][0]["init_args"]["tau"] == 0.5
    assert printed["optimizer"]["init_args"]["betas"] == [0.8, 0.9]
    assert printed["callbacks"][0]["init_args"]["patience"] == 5
    evaluation = {"client_model": "received", "target_accuracies": [0.25], "personal_on_global": False, "every": 1}
    assert printed["evaluation"].items() >= evaluation.items()
    assert printed["logger"]["init_args"]["save_dir"] == "logs"


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", ["CSVLogger", "TensorBoardLogger", "MLFlowLogger"])
def test_a_logger_that_lightning_has_too_is_ours(name, here):
    command = [sys.executable, "-m", "fl_lightning", "fit", "--config", "digits_fedavg", "--logger", name]
    printed = subprocess.run([*command, "--print_config"], capture_output=True, text=True, check=True).stdout
    assert yaml.safe_load(printed)["logger"]["class_path"] == f"fl_lightning.{name}"


def test_the_shell_overrides_the_config_and_a_later_config_an_earlier_one(here, capsys):
    Path("more.yaml").write_text("rounds: 8\nbatch_size: 5\n")
    words = ["--config", "tiny.yaml", "--config", "more.yaml", "--algorithm.tau", "0.5", "--scenario.clients=7"]
    printed = yaml.safe_load(printed_config(capsys, *words, "--batch_size", "6", "--model.hidden", "[3, 2]"))
    assert (printed["rounds"], printed["batch_size"], printed["seed"]) == (8, 6, 0)
    assert printed["scenario"]["clients"] == 7
    assert printed["scenario"]["partition"]["init_args"]["alpha"] == 0.5
    assert printed["algorithm"]["init_args"]["tau"] == 0.5
    assert printed["model"]["init_args"]["hidden"] == [3, 2]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("words", [["--config", "{}"], ["--config={}"], ["-c", "{}"]])
def test_a_config_is_a_file_of_the_working_folder_or_a_shipped_one(words, here, capsys):
    words = [word.format("digits_fedskc.yaml") for word in words]
    assert yaml.safe_load(printed_config(capsys, *words))["rounds"] == 30
    Path("digits_fedskc.yaml").write_text(TINY.replace("rounds: 3", "rounds: 77"))
    assert yaml.safe_load(printed_config(capsys, *words))["rounds"] == 77


# --- list ---


def listed(text):
    """Return the names and their descriptions by heading."""
    kinds, names = {}, {}
    for line in text.splitlines():
        if line.startswith(" "):
            name, words = line.split(maxsplit=1)
            names[name] = words
        else:
            names = kinds[line] = {}
    return kinds


def test_list_of_a_kind_shows_the_first_line_of_each_docstring():
    code, out, err = run("list", "graphs")
    assert (code, err) == (0, "")
    assert listed(out)["graphs"]["Ring"] == algorithms.Ring.__doc__.partition("\n")[0]


def test_list_shows_algorithms_by_family():
    groups = listed(run("list", "algorithms")[1])
    assert list(groups) == [f"algorithms, {one.replace('_', ' ')}" for one in FAMILIES]
    folder = Path(inspect.getfile(algorithms)).parent
    for family, lines in zip(FAMILIES, groups.values(), strict=True):
        assert all(folder / family in Path(inspect.getfile(getattr(algorithms, name))).parents for name in lines)


def test_list_names_the_shipped_configs_with_their_first_line():
    code, out, _ = run("list", "configs")
    assert code == 0
    lines = {name: shipped_text(name, "configs").splitlines()[0].removeprefix("# ") for name in shipped("configs")}
    assert listed(out)["configs"] == lines
    assert "digits_fedskc.yaml" in lines


def test_list_alone_lists_every_kind():
    assert list(dict.fromkeys(heading.partition(",")[0] for heading in listed(run("list").out))) == [*KINDS]


# --- partition ---


def counted(seed, classes=10):
    """Return the class counts of each client in the tiny experiment, counted sample by sample."""
    built = Scenario(Digits(), Dirichlet(0.5, min_samples=20), clients=4).build(seed)
    labels = built.data.y_train.tolist()
    counts = {}
    for split in ("train", "test"):
        counts[split] = np.zeros((4, classes), dtype=int)
        for client, shard in enumerate(built.shards):
            for index in getattr(shard, split).tolist():
                counts[split][client, labels[index]] += 1
    return counts


def counts_in(path):
    lines = [line.split(",") for line in path.read_text().splitlines()]
    assert lines[0] == ["client", "split", *(f"class_{label}" for label in range(10))]
    return {
        split: np.array([[int(n) for n in line[2:]] for line in lines[1:] if line[1] == split])
        for split in ("train", "test")
    }


def test_partition_prints_and_draws_the_true_counts(here):
    code, out, err = run("partition", "--config", "tiny.yaml", "--out", "drawn/here")
    assert (code, err) == (0, "")
    true = counted(seed=0)
    lines = out.splitlines()
    header = next(i for i, line in enumerate(lines) if line.startswith("client"))
    assert lines[header - 1] == "training samples by client and class"
    assert lines[header].split() == ["client", *map(str, range(10)), "train", "test"]
    for client in range(4):
        cells = re.sub("[░▒▓█]", "", lines[header + 1 + client]).split()
        held = [str(n) for n in true["train"][client] if n]
        assert cells == [str(client), *held, str(true["train"][client].sum()), str(true["test"][client].sum())]

    written = counts_in(Path("drawn/here/partition.csv"))
    for split in ("train", "test"):
        np.testing.assert_array_equal(written[split], true[split])
    assert true["train"].sum() + true["test"].sum() == 1437
    picture = Path("drawn/here/partition.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    assert min(struct.unpack(">II", picture[16:24])) > 100
    assert {path.name for path in here.iterdir()} == {"tiny.yaml", "drawn"}


def test_partition_without_out_writes_nothing_and_fit_has_the_same_partition(finished, here):
    before = contents(here)
    assert run("partition", "--config", "tiny.yaml").code == 0
    assert contents(here) == before
    written = counts_in(finished[0] / "partition.csv")
    for split, true in counted(seed=5).items():
        np.testing.assert_array_equal(written[split], true)


def test_partition_needs_only_a_scenario(here):
    scenario = ["--scenario.dataset", "Digits", "--scenario.partition", "IID", "--scenario.clients", "2"]
    code, out, _ = run("partition", *scenario)
    assert code == 0
    assert re.search(r"^0 .* 539 +180 *$", out, re.M)  # 1437 samples, 719 and 718 a client, a quarter for its test


# --- fit ---


def test_fit_writes_config_metrics_partition_checkpoints_and_final_model(finished):
    run_dir, _ = finished
    files = {"config.yaml", "metrics.csv", "clients.csv", "partition.csv", "final/model.pt", "final/summary.json"}
    for round in {2, 3, summary(run_dir)["global/acc_best_round"]}:
        files |= {f"checkpoints/round-{round:06d}/{name}" for name in ("manifest.json", "state.pt")}
    files |= {".lock", ".owner", ".signature"}
    assert {name for name, content in contents(run_dir).items() if content is not None} == files
    assert [row["round"] for row in rows(run_dir)] == ["1", "2", "3"]
    weights = torch.load(run_dir / "final" / "model.pt", weights_only=True)
    model = models.MLP((1, 8, 8), 10, hidden=(8,))
    model.load_state_dict(weights)
    held_out = Digits().load()
    with torch.no_grad():
        right = (model(held_out.x_test).argmax(1) == held_out.y_test).sum().item()
    assert right / len(held_out.y_test) == pytest.approx(float(rows(run_dir)[-1]["global/acc"]), abs=1e-12)


def test_the_table_and_the_summary_agree_with_the_metrics(finished):
    run_dir, outcome = finished
    shown, figures, metrics = table(outcome.out), summary(run_dir), rows(run_dir)
    labels = {"global acc": "global/acc", "client acc": "client/acc_mean"}
    labels["client acc, weighted"] = "client/acc_weighted"
    for label, name in labels.items():
        series = [float(row[name]) for row in metrics]
        best = max(series)
        assert figures[f"{name}_last"] == series[-1]
        assert figures[f"{name}_best"] == best
        assert figures[f"{name}_best_round"] == 1 + series.index(best)
        assert shown[label] == [f"{series[-1]:.4f}", f"{best:.4f}", str(1 + series.index(best))]
    for target in (0.5, 0.8, 0.9):
        reached = [int(row["round"]) for row in metrics if float(row["global/acc"]) >= target]
        assert figures[f"R_{target}"] == (reached[0] if reached else None)
        assert shown[f"R_{target} (global)"][0] == (f"round {reached[0]}" if reached else "not reached")
    for way in ("up", "down"):
        total = sum(int(row[f"comm/{way}_bytes"]) for row in metrics)
        assert figures[f"comm/total_{way}_bytes"] == total
        assert shown[f"bytes {way}"][0] == f"{total / 1000:.3g} kB"
    assert outcome.out.endswith(f"run: {run_dir}\n")


def test_fit_shows_a_summary_and_one_line_per_round_and_nothing_of_lightning(finished):
    run_dir, (_, out, err) = finished
    assert err == ""
    lines = out.splitlines()[6:]
    assert out.startswith("method: FedSKC with ")
    assert out.splitlines()[5] == f"folder: {run_dir}"
    for round, line in enumerate(lines[:3], 1):
        assert re.fullmatch(
            rf"round {round}/3  global acc 0\.\d{{4}}  client acc 0\.\d{{4}}  train loss \d\.\d{{4}}  left \d+ s", line
        )
    assert lines[3].split() == ["3", "rounds"]


def test_a_recorded_config_gives_the_same_bytes_again(finished, tmp_path):
    run_dir, _ = finished
    assert run("fit", "--config", run_dir / "config.yaml", "--run_dir", tmp_path / "again").code == 0
    for name in ("final/model.pt", "final/summary.json", "partition.csv", "config.yaml"):
        assert (tmp_path / "again" / name).read_bytes() == (run_dir / name).read_bytes()
    assert untimed_rows(tmp_path / "again") == untimed_rows(run_dir)


@pytest.mark.parametrize("name", HOMES)
def test_recorded_class_paths_can_be_imported(name):
    module, _, attribute = use_recorded_paths(f"fl_lightning.{name}").rpartition(".")
    assert hasattr(import_module(module), attribute)


@pytest.mark.thorough
def test_run_folders_are_named_after_the_config_and_the_time(here):
    Path("changes.yaml").write_text("rounds: 1\n")
    for words in (["--rounds", "1"], ["--config", "changes.yaml"]):
        assert run("fit", "--config", "tiny.yaml", *words).code == 0
    names = [path.name for path in Path("runs/tiny").iterdir()]
    assert len(names) == 2
    for name in names:
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d-[0-9a-f]{6}", name)


# --- test ---


def test_test_gives_the_metrics_of_the_last_round(finished):
    run_dir, _ = finished
    before = contents(run_dir)
    code, out, err = run("test", run_dir)
    assert (code, err) == (0, "")
    assert "after round 3" in out
    last, shown = rows(run_dir)[-1], table(out)
    names = [name for name in last if name.startswith(("global/", "client/acc", "client/loss"))]
    assert len(names) == 7
    for name in names:
        assert shown[name] == [f"{float(last[name]):.4f}"]
    assert contents(run_dir) == before


@pytest.fixture
def half_finished(finished, tmp_path):
    """A run that was killed between the metrics of its third round and the checkpoint."""
    run_dir = tmp_path / "half"
    shutil.copytree(finished[0], run_dir)
    shutil.rmtree(run_dir / "final")
    shutil.rmtree(run_dir / "checkpoints" / "round-000003")
    return run_dir


def test_test_works_on_a_half_finished_run(half_finished):
    code, out, err = run("test", half_finished)
    assert (code, err) == (0, "")
    assert "after round 2" in out
    assert table(out)["global/acc"] == [f"{float(rows(half_finished)[1]['global/acc']):.4f}"]


def test_a_run_can_be_opened_in_python(half_finished):
    opened = open_run(half_finished, checkpoint="1")
    assert (opened.round, opened.test()["global/loss"]) == (1, float(rows(half_finished)[0]["global/loss"]))
    assert opened.client_module(2)(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    with pytest.raises(ConfigError, match=r"checkpoint '9' .*: last, best and rounds"):
        open_run(half_finished, checkpoint="9")


@pytest.mark.thorough
def test_test_takes_the_best_checkpoint_or_that_of_a_round(tmp_path):
    fewest_bytes = "[{class_path: Checkpointing, init_args: {every: 1, monitor: comm/total_bytes, mode: min}}]"
    tiny(tmp_path / "run", "--rounds", "4", "--callbacks", fewest_bytes)  # best is round 1, whatever is learnt
    losses = [float(row["global/loss"]) for row in rows(tmp_path / "run")]
    for checkpoint, round in (("best", 1), ("last", 4), ("3", 3), ("1", 1)):
        code, out, _ = run("test", tmp_path / "run", "--checkpoint", checkpoint)
        assert code == 0
        assert f"after round {round}" in out
        assert table(out)["global/loss"] == [f"{losses[round - 1]:.4f}"]


# --- fit --resume ---


@pytest.mark.thorough
def test_a_run_resumed_with_more_rounds_equals_an_uninterrupted_run(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    tiny(whole, "--rounds", "4")
    tiny(parts, "--rounds", "2")
    assert yaml.safe_load((parts / "config.yaml").read_text())["rounds"] == 2
    code, out, err = run("fit", "--resume", parts, "--rounds", "4")
    assert (code, err) == (0, "")
    assert "\nround 3/4" in out
    for name in ("final/model.pt", "final/summary.json", "partition.csv", "config.yaml"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert untimed_rows(parts) == untimed_rows(whole)
    assert table(out) == table(run("fit", "--resume", whole).out)


def test_a_resumed_run_equals_an_uninterrupted_run(half_finished, finished):
    code, out, _ = run("fit", f"--resume={half_finished}")
    assert code == 0
    assert out.splitlines()[5] == f"folder: {half_finished}, resumed after round 2"
    assert out.splitlines()[6].startswith("round 3/3")
    for name in ("final/model.pt", "final/summary.json"):
        assert (half_finished / name).read_bytes() == (finished[0] / name).read_bytes()
    assert untimed_rows(half_finished) == untimed_rows(finished[0])


FAULTY = """
import torch
from fl_lightning import FedAvg, LossTerm


class Term(LossTerm):
    def forward(self, step):
        return torch.zeros(3) @ step.logits  # line 8: shapes do not fit


class Method(FedAvg):
    def aggregation(self, round):
        super().aggregation(round)
        return {}["model"]  # line 14


class State(FedAvg):
    def initial_state(self, *args):
        raise ArithmeticError("of all things")  # line 19
"""


@pytest.mark.parametrize(
    ("words", "what", "place"),
    [
        (["--algorithm", "FedAvg", "--algorithm.loss_terms", "[faulty_own.Term]"], "round 1: RuntimeError", 8),
        (["--algorithm", "faulty_own.Method"], "KeyError: 'model'", 14),
        (["--algorithm", "faulty_own.State"], "algorithm: of all things", 19),
    ],
)
@pytest.mark.parametrize("engine", ["sequential", pytest.param("processes", marks=pytest.mark.thorough)])
def test_an_error_in_the_users_code_is_reported_with_its_line(words, what, place, engine, here, monkeypatch):
    monkeypatch.delitem(sys.modules, "faulty_own", raising=False)
    monkeypatch.syspath_prepend(str(here))
    Path("faulty_own.py").write_text(FAULTY)
    outcome = run("fit", "--config", "tiny.yaml", "--engine", engine, *words, "--clients_per_round", "1", "--seed", "3")
    assert what in outcome.err
    assert f"(faulty_own.py, line {place})" in outcome.err
    assert outcome.err.count("\n") == 1


IMPATIENT = ["--rounds", "9", "--callbacks+=EarlyStopping", "--callbacks.patience", "1", "--callbacks.min_delta", "9"]


@pytest.mark.parametrize(
    ("words", "ending"),
    [
        (IMPATIENT, "stopped after round 2 of 9 by EarlyStopping: global/acc "),
        ([*IMPATIENT, "--algorithm", "Local"], "stopped after round 2 of 9 by EarlyStopping: client/acc_mean "),
        (
            [*IMPATIENT, "--callbacks.monitor", "global/loss", "--callbacks.patience", "2"],
            "stopped after round 3 of 9 by EarlyStopping: global/loss ",
        ),
        (["--rounds", "1"], "1 round is done"),
    ],
)
@pytest.mark.thorough
def test_fit_says_why_it_ended(words, ending, tmp_path):
    outcome = tiny(tmp_path / "run", *words)
    assert f"\nended: {ending}" in outcome.out
    assert "(best -" not in outcome.out
    again = run("fit", "--resume", tmp_path / "run")
    assert f"\nended: nothing to do: {ending}" in again.out


@pytest.mark.parametrize(
    "words",
    [
        ["--engine", "stacked", "--engine.clients", "3"],
        ["--engine.clients", "3", "--engine=stacked"],
        ["--config", "engine.yaml", "--engine.clients", "3"],
    ],
)
def test_an_engine_given_by_its_short_name_accepts_options(words, here, capsys):
    Path("engine.yaml").write_text("engine: stacked\n")
    engine = yaml.safe_load(printed_config(capsys, "--config", "tiny.yaml", *words))["engine"]
    assert engine["class_path"].endswith(".StackedEngine")
    assert engine["init_args"]["clients"] == 3


def test_a_resumed_run_stays_in_its_folder(finished, here):
    words = ["fit", "--resume", finished[0], "--run_dir", "other"]
    check_refused_command(words, ["--run_dir: ", f"({finished[0]})"])


def test_a_round_of_five_thousand_digits_is_refused(finished):
    words = ["test", finished[0], "--checkpoint", "1" * 5000]
    check_refused_command(words, ["--checkpoint: checkpoint '11111111111111111111'... ", "last, best"])


def test_resuming_a_finished_run_changes_nothing_and_prints_its_table(finished, tmp_path):
    run_dir = Path(shutil.copytree(finished[0], tmp_path / "run"))
    before = contents(run_dir)
    code, out, err = run("fit", "--resume", run_dir)
    assert (code, err) == (0, "")
    assert contents(run_dir) == before
    assert table(out) == table(finished[1].out)
    assert "\nended: all 3 rounds are done" in finished[1].out
    assert "\nended: nothing to do: all 3 rounds are done" in out


@pytest.mark.thorough
def test_a_run_stopped_in_its_first_round_resumes_from_the_start(finished, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"

    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(SequentialEngine, "run", stopped)
        assert run("fit", "--config", finished[0] / "config.yaml", "--run_dir", run_dir).code == 1
    assert os.listdir(run_dir / "checkpoints") == ["round-000000"]
    assert run("fit", "--resume", run_dir).code == 0
    assert (run_dir / "final/model.pt").read_bytes() == (finished[0] / "final/model.pt").read_bytes()


@pytest.mark.parametrize("kept", ["config.yaml", "metrics.csv"])
def test_a_run_without_checkpoints_is_refused_and_not_changed(kept, finished, tmp_path):
    run_dir = Path(shutil.copytree(finished[0], tmp_path / "run"))
    shutil.rmtree(run_dir / "checkpoints")
    if kept == "config.yaml":
        (run_dir / "metrics.csv").unlink()
    before = contents(run_dir)
    code, _, err = run("fit", "--resume", run_dir)
    assert code == 2
    assert "but no checkpoint" in err
    assert contents(run_dir) == before


def test_a_resume_may_change_callbacks_and_evaluation(finished, tmp_path):
    run_dir = Path(shutil.copytree(finished[0], tmp_path / "run"))
    words = ["--callbacks=[{class_path: Checkpointing, init_args: {every: 1, keep_last: 3}}]"]
    words += ["--log_clients=false", "--evaluation.every=2"]
    words += ["--evaluation.target_accuracies=[0.1]", "--rounds=4"]
    code, out, _ = run("fit", "--resume", run_dir, *words)
    assert code == 0
    assert "R_0.1 (global)" in out
    last = rows(run_dir)[-1]
    assert last["round"] == "4"
    assert [int(line["round"]) for line in rows(run_dir, "clients.csv")] == [1] * 4 + [2] * 4 + [3] * 4


@pytest.mark.filterwarnings("always")
def test_a_damaged_checkpoint_is_reported_in_one_line(finished, tmp_path):
    run_dir = Path(shutil.copytree(finished[0], tmp_path / "run"))
    (run_dir / "checkpoints/round-000003/state.pt").write_bytes(b"")
    code, _, err = run("fit", "--resume", run_dir)
    assert code == 0
    assert re.fullmatch(
        r"fl-lightning: warning: checkpoint \S+round-000003 is damaged: .*; resuming from round 2's\n", err
    )
    assert (run_dir / "final/model.pt").read_bytes() == (finished[0] / "final/model.pt").read_bytes()


# --- main ---


def test_main_reads_the_shells_words_by_default(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["fl-lightning", "list", "configs"])
    assert cli.main() == 0
    assert "digits_fedskc.yaml" in capsys.readouterr().out


BROKEN = """
from fl_lightning.algorithms import FedAvg, WeightedMean

class Breaking(WeightedMean):
    def fold(self, folded, upload):
        super().fold(folded, upload)
        raise {error}

class Broken(FedAvg):
    def __init__(self):
        super().__init__(aggregator=Breaking())
"""


def broken(folder, monkeypatch, error):
    """Return a `fit` in which an error is raised."""
    (folder / "broken.py").write_text(BROKEN.format(error=error))
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(folder)
    return ["fit", "--config", "tiny.yaml", "--algorithm", "broken.Broken"]


def test_an_unexpected_error_is_one_line_and_debug_shows_the_traceback(here, monkeypatch):
    words = broken(here, monkeypatch, r"ArithmeticError('of all\nthings')")
    code, _, err = run(*words)
    assert code == 1
    assert err.count("\n") == 1
    assert err.startswith("fl-lightning: error: ArithmeticError: of all things (broken.py, line 7)")
    assert "--debug" in err
    with pytest.raises(ArithmeticError, match="of all"):
        run(*words, "--debug")


def test_debug_shows_the_traceback_of_bad_input(here):
    with pytest.raises(ValueError, match="rounds: 0 is below 1"):
        run("fit", "--config", "tiny.yaml", "--debug", "--rounds", "0")


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "error", ["KeyboardInterrupt()", "SystemExit(0)", "SystemExit(1)", "SystemExit('text')", "GeneratorExit()"]
)
def test_code_that_exits_inside_a_run_fails_it(error, here, monkeypatch):
    """`sys.exit(0)` in a user's code does not count as the end of a run."""
    outcome = run(*broken(here, monkeypatch, error), "--run_dir", "run")
    assert outcome.code == 1
    assert f"{error} was raised in {here / 'broken.py'}, line 7 (fold)" in outcome.err
    assert outcome.err.count("\n") == 1
    assert not Path("run/final").exists()


LEAVING = """
import sys
from fl_lightning import LossTerm

class Leaving(LossTerm):
    def forward(self, step):
        {how}
"""


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "sys.exit(0)", "sys.exit(3)"])
def test_a_loss_term_that_exits_inside_a_fit_fails_the_run(how, here, monkeypatch):
    """Lightning turns a `KeyboardInterrupt` in its fit into a `SystemExit`. One that a client raises is its failure."""
    Path("leaving.py").write_text(LEAVING.format(how=how))
    monkeypatch.delitem(sys.modules, "leaving", raising=False)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(here)
    terms = ["--algorithm", "FedAvg", "--algorithm.loss_terms", "[leaving.Leaving]"]
    code, out, err = run(
        "fit", "--config", "tiny.yaml", "--run_dir", "run", *terms, "--trainer.accumulate_grad_batches=2"
    )
    assert code == 1
    message = f"client 0, round 1: SystemExit: {how[-2]} (leaving.py, line 7)"
    if "raise" in how:
        message = f"KeyboardInterrupt() was raised in {here / 'leaving.py'}, line 7 (forward)"
    assert err.startswith(f"fl-lightning: error: {message}")
    assert err.count("\n") == 1
    assert "rounds" not in out


def test_a_module_that_exits_on_import_fails_the_command(here, monkeypatch):
    Path("gone.py").write_text("import sys\nsys.exit()\n")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(here)
    code, _, err = run("fit", "--config", "tiny.yaml", "--model", "gone.Model")
    assert code == 1
    assert re.fullmatch(r"fl-lightning: error: SystemExit\(.*\) was raised in \S+gone.py, line 2 .*\n", err)


@pytest.mark.parametrize("words", [["list"], ["partition", "--config", "tiny.yaml"], ["fit", "--config", "tiny.yaml"]])
def test_a_closed_pipe_ends_quietly(words, here, monkeypatch, capfd):
    """As in `fl-lightning list | head`: nothing is printed to stderr, not even by the last flush of stdout."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        code = cli.main(words)
        stdout.write("what Python may still want to write")
    assert code in (1, 141)
    assert capfd.readouterr().err == ""


@pytest.mark.thorough
def test_fit_reads_each_config_once_besides_its_parser(here, monkeypatch):
    """The parser reads them by itself: for the settings, and the experiment's config alone for the name of the run."""
    Path("more.yaml").write_text("seed: 3\n")
    opened, ours, every = [], os.open, io.open

    def record(kind, open_file):
        def record_and_open(file, *rest, **options):
            if str(file).endswith(".yaml") and not Path(file).is_relative_to(here / "run"):
                opened.append((kind, Path(file).name))
            return open_file(file, *rest, **options)

        return record_and_open

    monkeypatch.setattr(os, "open", record("ours", ours))
    monkeypatch.setattr("builtins.open", record("parser", every))
    words = ["--config", "tiny.yaml", "--config", "more.yaml", "--algorithm", "FedProx", "--logger", "CSVLogger"]
    assert run("fit", *words, "--run_dir", str(here / "run"))[0] == 0
    assert [name for kind, name in opened if kind == "ours"] == ["tiny.yaml", "more.yaml"]
    assert [name for kind, name in opened if kind == "parser"].count("more.yaml") == 1
