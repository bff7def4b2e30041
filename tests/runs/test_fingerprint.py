"""The fingerprint of a run is compared on resume; checks of the run folder."""

import errno
import json
import os
import re
import shutil
import socket
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import TINY, Outcome, contents, run, tiny, untimed_rows
from experiments import ONE_EPOCH, experiment

import fl_lightning
from fl_lightning.algorithms import DFedAvgM
from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.runs.fingerprint import Fingerprint
from fl_lightning.runs.folder import lock_owner, lock_run_dir
from fl_lightning.runs.metrics_csv import Digest

pytestmark = pytest.mark.filterwarnings("always::UserWarning")

OPTIONS = (
    "--callbacks+=Checkpointing",
    "--callbacks.every=1",
    "--scenario.partition.min_samples=3",
    "--scenario.clients=3",
)


def data(path: Path, **changed: np.ndarray) -> str:
    x = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    y = np.arange(60) % 4
    np.savez(path, **{"x_train": x, "y_train": y, "x_test": x[:20], "y_test": y[:20]} | changed)
    return f"--scenario.dataset={{class_path: Arrays, init_args: {{path: {path}}}}}"


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a run of five rounds, the same run after three, and their data."""
    folder = tmp_path_factory.mktemp("fingerprint")
    words = (data(folder / "data.npz"), *OPTIONS)
    tiny(folder / "whole", *words, "--rounds=5")
    tiny(folder / "part", *words)
    return folder


@pytest.fixture
def part(examples: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(examples / "part", tmp_path / "part"))


def resume(part: Path, *words: str) -> Outcome:
    return run("fit", "--resume", part, "--rounds=5", *words)


def same_results(part: Path, whole: Path) -> bool:
    same = (part / "final/model.pt").read_bytes() == (whole / "final/model.pt").read_bytes()
    return same and untimed_rows(part) == untimed_rows(whole)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_unchanged_run_resumes_without_warnings_to_the_same_bytes(part, examples):
    code, _, err = resume(part)
    assert (code, err) == (0, "")
    assert same_results(part, examples / "whole")


# --- The config ---


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lr: 0.5", "lr: 0.51", "optimizer.lr (0.5 -> 0.51)"),
        ("local_test: null", "local_test: 0.2", "scenario.local_test (None -> 0.2)"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "test"])
def test_edit_that_changes_results_is_refused(old, new, message, command, part):
    edit(part / "config.yaml", old, new)
    before = contents(part)
    code, _, err = resume(part) if command == "fit" else run("test", part)
    assert code == 2
    assert f": {message}. " in err
    assert err.count("\n") == 1
    assert contents(part) == before


def test_edit_that_changes_no_results_is_warned_of_once(part):
    edit(part / "config.yaml", "rounds: 3", "rounds: 4")
    code, _, err = run("fit", "--resume", part)
    assert code == 0
    assert err == f"fl-lightning: warning: {part}/config.yaml was edited: rounds (3 -> 4)\n"
    assert len(untimed_rows(part)) == 4
    assert run("fit", "--resume", part).err == ""


@pytest.mark.thorough
def test_edit_of_a_finished_run_is_warned_of_once(part):
    """No checkpoint is written, so the existing one gets the new settings."""
    edit(part / "config.yaml", "rounds: 3", "rounds: 2")
    message = f"fl-lightning: warning: {part}/config.yaml was edited: rounds (3 -> 2)\n"
    assert run("fit", "--resume", part).err == message
    assert run("fit", "--resume", part).err == ""


@pytest.mark.thorough
def test_a_change_on_the_command_line_is_not_warned_of(part):
    edit(part / "config.yaml", "rounds: 3", "rounds: 4")
    assert resume(part, "--evaluation.target_accuracies=[0.2]").err == ""
    assert run("fit", "--resume", part).err == ""


@pytest.mark.parametrize(
    "option", ["client_model=received", "max_clients=2", "positive_class=0", "new_client_model=trained"]
)
def test_a_column_keeps_its_meaning(option, part):
    """Otherwise the best round would be chosen among values of different models or clients."""
    code, _, err = resume(part, f"--evaluation.{option}")
    assert code == 2
    assert f"evaluation.{option.partition('=')[0]} (" in err


def test_settings_are_compared_by_type_and_value():
    fingerprint = Fingerprint({"a": float("nan"), "b": True}, made_with={"fl-lightning": fl_lightning.__version__})
    fingerprint.check_config({"a": float("nan"), "b": True})
    with pytest.raises(ConfigError, match=r"b \(True -> 1\)"):
        fingerprint.check_config({"a": float("nan"), "b": 1})


def test_refused_resume_leaves_the_config_unchanged(part):
    before = contents(part)
    assert run("fit", "--resume", part, "--rounds=9", "--batch_size=7").code == 2
    assert contents(part) == before


def test_another_version_is_warned_of_and_may_have_other_keys(part, monkeypatch):
    monkeypatch.setattr(fl_lightning, "__version__", "9.0")
    edit(part / "config.yaml", "channels_last: null\n", "")
    code, _, err = resume(part)
    assert code == 0
    assert re.fullmatch(r"fl-lightning: warning: .* fl-lightning \S+ -> 9.0: .*\n", err)


def test_settings_of_one_version_only_are_ignored():
    fingerprint = Fingerprint({"lr": 1, "gone": 2}, made_with={"fl-lightning": "0.0"})
    fingerprint.check_config({"lr": 1, "new": 3})
    with pytest.raises(ConfigError, match=r"lr \(1 -> 2\)"):
        fingerprint.check_config({"lr": 2, "new": 3})


@pytest.mark.thorough
def test_another_number_of_threads_is_warned_of(part):
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        code, _, err = resume(part)
    finally:
        torch.set_num_threads(threads)
    assert code == 0
    assert re.fullmatch(rf"fl-lightning: warning: .* threads {threads} -> {threads + 1}: .*\n", err)


# --- The data ---


def increment_first(array: np.ndarray) -> np.ndarray:
    changed = array.copy()
    changed.flat[0] += 1
    return changed


@pytest.mark.parametrize(("name", "command"), [("x_train", "fit"), ("y_test", "test")])
def test_replaced_data_are_refused_by_name(name, command, part, examples):
    path = examples / "data.npz"
    whole = path.read_bytes()
    with np.load(path) as arrays:
        changed = increment_first(arrays[name])
    before = contents(part)
    try:
        data(path, **{name: changed})
        code, _, err = resume(part) if command == "fit" else run("test", part)
    finally:
        path.write_bytes(whole)
    assert code == 2
    assert re.fullmatch(rf"fl-lightning: error: scenario.dataset: .*: .*{name}.*\n", err)
    assert contents(part) == before


def test_another_partition_of_the_same_data_is_refused(part, monkeypatch):
    split = fl_lightning.data.Dirichlet.split

    def other(*args):
        parts = split(*args)
        return [np.sort(np.append(parts[0], parts[1][:1])), parts[1][1:], *parts[2:]]

    monkeypatch.setattr(fl_lightning.data.Dirichlet, "split", other)
    code, _, err = resume(part)
    assert code == 2
    assert "scenario.partition: " in err


# --- The metrics ---


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv"])
def test_changed_digit_in_the_metrics_falls_back_to_the_previous_checkpoint(name, part, examples):
    lines = (part / name).read_text().splitlines(keepends=True)
    third = next(i for i, line in enumerate(lines) if line.startswith("3,"))
    digit = re.search(r"\.(\d)", lines[third])
    lines[third] = lines[third][: digit.start(1)] + str((int(digit[1]) + 1) % 10) + lines[third][digit.end(1) :]
    (part / name).write_text("".join(lines))
    code, _, err = resume(part)
    assert code == 0
    assert re.fullmatch(rf"fl-lightning: warning: {part}/{name} .* round 3; .* round 2's\n", err)
    assert same_results(part, examples / "whole")


def test_changed_header_of_the_metrics_is_refused(part):
    edit(part / "metrics.csv", "global/acc", "global/bcc")
    before = contents(part)
    code, _, err = resume(part)
    assert code == 2
    assert re.search(r"metrics\.csv .* round 3\.", err)
    assert contents(part) == before


def test_missing_rounds_in_the_metrics_fall_back_to_an_older_checkpoint(part, examples):
    lines = (part / "metrics.csv").read_text().splitlines(keepends=True)
    (part / "metrics.csv").write_text("".join(lines[:-2]) + lines[-2][:5])
    code, _, err = resume(part)
    assert code == 0
    assert [line.removeprefix(f"fl-lightning: warning: {part}/") for line in err.splitlines()] == [
        f"metrics.csv holds 1 of rounds 1 to {n}; resuming from round 1's" for n in (3, 2)
    ]
    assert same_results(part, examples / "whole")


@pytest.mark.thorough
def test_another_spelling_of_a_number_is_no_change(part):
    path = part / "metrics.csv"
    path.write_text(path.read_text().replace("1,", "1,", 1).replace("\n2,", "\n02,"))
    assert resume(part).err == ""


def test_digest_covers_names_and_values_in_any_order():
    row = {"round": 1, "a": 0.5, "b": float("nan")}
    same = Digest.over([{"b": float("nan"), "a": 0.5, "c": None, "d": "", "round": 1}])
    assert str(Digest.over([row])) == str(same)
    for other in ({**row, "a": 0.25}, {**row, "c": 1}, {"round": 1, "a": 0.5}, {"round": 1, "b": 0.5, "a": row["b"]}):
        assert str(Digest.over([other])) != str(same)
    assert str(Digest.over([row, row])) != str(same)


def test_changed_warnings_file_is_warned_of(tmp_path):
    class Warns(fl_lightning.callbacks.RoundCallback):
        def on_round_start(self, run, participants):
            warnings.warn(f"in {run.round + 1}", stacklevel=2)

    experiment(tmp_path, rounds=2, callbacks=[Warns()]).fit()
    edit(tmp_path / "warnings.txt", "round 1: in 1", "round 1: im 1")
    with pytest.warns(UserWarning, match=r"warnings.txt .* round 2"):
        experiment(tmp_path, rounds=3, callbacks=[Warns()]).fit(resume=True)


# --- The folder ---


@pytest.mark.thorough
def test_failed_start_leaves_no_folder(tmp_path, monkeypatch):
    def fails(*_):
        raise ConfigError("logger: no")

    with monkeypatch.context() as patched:
        patched.setattr("fl_lightning.runs.record.write_counts", fails)
        (tmp_path / "tiny.yaml").write_text(TINY)
        words = ("fit", "--config", tmp_path / "tiny.yaml", "--run_dir", tmp_path / "new" / "deep" / "run")
        assert run(*words).code == 2
    assert os.listdir(tmp_path) == ["tiny.yaml"]
    assert run(*words).code == 0


def test_failed_start_removes_only_its_own_folder(tmp_path, monkeypatch):
    def fails(*_):
        (tmp_path / "new" / "other").mkdir()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("fl_lightning.runs.record.write_counts", fails)
    with pytest.raises(ConfigError, match=rf"^run_dir: {tmp_path}/new/run .*No space left on device"):
        experiment(tmp_path / "new" / "run").fit()
    assert os.listdir(tmp_path / "new") == ["other"]


@pytest.mark.parametrize("name", ["clients", "config.yaml", "checkpoints/round-000010"])
def test_folder_with_any_file_of_a_run_is_refused_for_a_new_run(name, tmp_path):
    (tmp_path / name).mkdir(parents=True)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=rf"run_dir: {tmp_path} .* \({Path(name).name}\)"):
        experiment(tmp_path).fit()
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["csv_logs/metrics.csv", ".lock", "checkpoints/round-000003"])
def test_links_in_a_run_folder_are_refused(name, tmp_path):
    folder = tmp_path / "run"
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "victim").mkdir()
    (folder / name).symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=f"{name} is a link"), lock_run_dir(folder):
        pass
    assert os.listdir(tmp_path / "victim") == []


@pytest.mark.parametrize(
    ("noted", "message"),
    [
        (f"process {os.getppid()} on {socket.gethostname()}", f"process {os.getppid()} on {socket.gethostname()}"),
        ("process 999999999 on elsewhere", "process 999999999 on elsewhere"),
        ("\x1b[31m", "another process"),
        (None, "another process"),
    ],
)
def test_lock_owner_is_named(noted, message, tmp_path):
    if noted:
        (tmp_path / ".owner").write_text(noted)
    assert lock_owner(tmp_path) == message


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv", "config.yaml", "checkpoints/round-000003"])
def test_pipe_in_place_of_a_file_is_refused(name, tmp_path):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    for read in (experiment(tmp_path).load, lambda: experiment(tmp_path).fit(resume=True)):
        with pytest.raises(ConfigError, match=f"{name} is neither file nor folder"):
            read()


def test_partial_files_are_removed_but_not_those_of_runs_in_subfolders(tmp_path):
    half = [f"{place}/.x.0a1b.writing" for place in (".", "clients", "figures/a", "checkpoints/round-000001")]
    others = ["points/.x.0a1b.writing", "points/one/.x.0a1b.writing", "clients/notes.writing"]
    for name in (*half, *others):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "checkpoints" / ".writing-a").mkdir()
    with lock_run_dir(tmp_path):
        assert not [name for name in half if (tmp_path / name).exists()]
        assert all((tmp_path / name).exists() for name in others)
        assert os.listdir(tmp_path / "checkpoints") == ["round-000001"]


def test_run_folder_may_be_a_link(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "big")
    (tmp_path / "big" / "notes").symlink_to(tmp_path)
    (tmp_path / "big" / "wandb").mkdir()
    (tmp_path / "big" / "wandb" / "latest-run").symlink_to(tmp_path)
    with lock_run_dir(tmp_path / "run"):
        assert (tmp_path / "big" / ".lock").exists()


def test_file_system_without_locks_gives_a_warning(tmp_path, monkeypatch):
    def none(*_, **__):
        raise NotImplementedError

    monkeypatch.setattr("filelock.FileLock.acquire", none)
    with pytest.warns(UserWarning, match="has no locks"), lock_run_dir(tmp_path):
        pass


def test_manifest_holds_the_fingerprint(part):
    fingerprint = json.loads((part / "checkpoints/round-000003/manifest.json").read_text())["seal"]
    assert fingerprint["config"]["optimizer.lr"] == 0.5
    assert sorted(fingerprint["data"]) == ["partition", "x_test", "x_train", "y_test", "y_train"]
    assert sorted(fingerprint["rows"]) == ["clients.csv", "metrics.csv", "warnings.txt"]
    assert fingerprint["made_with"]["fl-lightning"] == fl_lightning.__version__


def test_checkpoint_of_a_version_whose_method_kept_less_is_refused(tmp_path):
    def peers(rounds):
        return experiment(tmp_path, DFedAvgM(), rounds=rounds, trainer=ONE_EPOCH)

    before = peers(1)
    before.fit()
    saved = before.checkpoints.read(1)
    del saved.state["state"]["published"]
    before.checkpoints.write(1, saved.state, saved.files, saved.fingerprint)
    metrics = (tmp_path / "metrics.csv").read_bytes()
    with pytest.raises(CheckpointError, match=r"round 1.*published"):
        peers(2).fit(resume=True)
    assert (tmp_path / "metrics.csv").read_bytes() == metrics
