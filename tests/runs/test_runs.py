"""Reading run folders as tables, also damaged and hostile ones."""

import contextlib
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import yaml
from run_folders import CONFIG, ROUNDS, changed, write_csv, write_run

import fl_lightning
from fl_lightning import runs
from fl_lightning.core.errors import ConfigError
from fl_lightning.evaluation.summary import summarize
from fl_lightning.runs.reader import DamagedRun, open_run_folder
from fl_lightning.runs.search import conditions, find, open_runs
from fl_lightning.runs.tables import load


@contextlib.contextmanager
def caught_warnings():
    """Yield a list that contains the warnings in the end."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = []
        yield lines
    lines += [str(each.message) for each in caught]


# --- One run ---


def test_run_has_config_rounds_and_summary(tmp_path):
    run = open_run_folder(write_run(tmp_path / "run"))
    assert run.config == CONFIG
    assert run.rounds == ROUNDS
    assert run.finished
    assert run.summary == summarize(ROUNDS, [0.5, 0.8])
    assert run.summary["R_0.5"] == 3
    assert run.summary["R_0.8"] is None


def test_settings_have_keys_and_class_names_of_the_command_line(tmp_path):
    settings = open_run_folder(write_run(tmp_path / "run")).settings
    assert settings["scenario.partition"] == "Dirichlet"
    assert settings["scenario.partition.alpha"] == 0.1
    assert settings["optimizer"] == "SGD"
    assert settings["model.hidden"] == [8, 4]
    assert {key for key in settings if "class_path" in key or "init_args" in key} == set()
    run = open_run_folder(write_run(tmp_path / "own", changed(algorithm="mine.FedAvg")))
    assert run.settings["algorithm"] == "mine.FedAvg"  # not the FedAvg of the package


def test_a_setting_is_found_by_its_key_or_the_end_of_it(tmp_path):
    run = open_run_folder(write_run(tmp_path / "run"))
    assert run.key("alpha") == run.key("partition.alpha") == "scenario.partition.alpha"
    assert run.setting("tau") == 0.08
    assert run.setting("lpha") is None
    second = {"class_path": "mine.Net", "init_args": {"clients": 4}}
    run = open_run_folder(write_run(tmp_path / "other", CONFIG | {"model": second}))
    with pytest.raises(ConfigError, match=r"^clients: .* scenario.clients and model.clients"):
        run.key("clients")


def test_unfinished_run_has_a_summary_of_its_rounds(tmp_path):
    folder = write_run(tmp_path / "run", rounds=ROUNDS[:2], finished=False)
    with (folder / "metrics.csv").open("a") as file:
        file.write("3,0.5")  # as a killed process leaves it
    run = open_run_folder(folder)
    assert not run.finished
    assert run.summary == summarize(ROUNDS[:2], [0.5, 0.8])


@pytest.mark.parametrize("targets", ["abc", ["x", 0.5]])
def test_invalid_target_accuracies_are_ignored(targets, tmp_path):
    config = CONFIG | {"evaluation": {"target_accuracies": targets}}
    run = open_run_folder(write_run(tmp_path / "run", config, finished=False))
    assert run.summary == summarize(ROUNDS, [0.5] if targets == ["x", 0.5] else [])


def test_run_resumed_with_more_rounds_is_not_finished(tmp_path):
    folder = write_run(tmp_path / "run", rounds=ROUNDS[:2])
    write_csv(folder / "metrics.csv", ROUNDS)
    run = open_run_folder(folder)
    assert not run.finished
    assert run.summary["rounds"] == 3


def test_a_run_from_python_has_no_config(tmp_path):
    run = open_run_folder(write_run(tmp_path / "run", config=None))
    assert (run.config, run.settings, run.finished) == ({}, {}, True)


def test_opening_a_run_imports_no_class_that_it_names(tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("raise SystemExit('run')")
    monkeypatch.syspath_prepend(tmp_path)
    folder = write_run(tmp_path / "run", changed(algorithm="trap.Trap", callbacks=[{"class_path": "trap.Trap"}]))
    assert load(folder).runs.algorithm.tolist() == ["trap.Trap"]
    assert "trap" not in sys.modules


# --- Damaged, foreign and hostile folders ---

NUMBER = "1" * 5000
BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 11))
WIDE = f"a: &a [{'x,' * 90_000}]\nb: &b [{'*a,' * 90_000}]\nc: [{'*b,' * 90_000}]\n"
CONFIGS = {
    "no mapping": ("- a\n- b\n", "it is not a mapping of settings"),
    "empty": ("", "it is not a mapping of settings"),
    "no YAML": ("a: [", "line 1: while parsing"),
    "aliases": (BOMB, "expands to more"),
    "wide aliases": (WIDE, "expands to more"),
    "recursive alias": ("a: &a [*a]", r"\*a refers to no anchor, or to itself"),
    "deep lists": ("[" * 500_000, "expands to more|nesting depth"),  # PyYAML 6.0.4 has a reason of its own
    "deep lines": ("- " * 100_000, "expands to more"),
    "many settings": ("".join(f"a{i}: 1\n" for i in range(101_000)), "expands to more"),
    "huge number": (f"a: {NUMBER}", "a number of 5,000 digits"),
    "huge number to base 60": ("a: " + "1:" * 200_000 + "1", "a number of 400,001 digits"),
    "no UTF-8": (b"a: \xff\xfe", "line 1: byte 0xff is no UTF-8"),
    "too large": ("# " + "x" * 2**20, "larger than it can be"),
}

METRICS = {
    "an empty file": ("", "no round has finished yet"),
    "no rounds": ("a,b\n1,2\n", "metrics.csv cannot be read: round 1 is missing"),
    "a column twice": ("round,a,a\n1,2,3\n", "metrics.csv cannot be read: two columns have the same name"),
    "a round left out": ("round,a\n1,2\n3,2\n", "round 2 is missing or out of order"),
    "a line of words": ("round,a\n1,2\n2,x\n3,2\n", "round 2 is missing or out of order"),
    "a line of fewer cells": ("round,a,b\n1,2,3\n2,3\n3,2,1\n", "round 2 is missing or out of order"),
    "a quote that never ends": ('round,a\n1,"2\n' + "2,3\n" * 50_000, "field larger than field limit"),
    "no text": (os.urandom(1000) + b"\n", "cannot be read|no round has finished"),
}
SUMMARIES = {
    "no JSON": ("{", "Expecting property name"),
    "no mapping": ('[["rounds", 3]]', "it is not the summary of a run"),
    "words": ('{"rounds": 3, "global/acc_last": "high"}', "global/acc_last is not a number"),
    "no rounds": ('{"global/acc_last": 1}', "it is not the summary of a run"),
    "5,000 lists": ('{"rounds": 3, "a": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
    "a huge number": (f'{{"rounds": 3, "a": {NUMBER}}}', "digits"),
    "no UTF-8": (b"\xff", "can't decode"),
}
FILES = {"config.yaml": CONFIGS, "metrics.csv": METRICS, "final/summary.json": SUMMARIES}


@pytest.mark.parametrize(("file", "case"), [(file, case) for file, cases in FILES.items() for case in cases])
def test_unreadable_file_gives_the_reason(file, case, tmp_path):
    text, why = FILES[file][case]
    folder = write_run(tmp_path / "run", finished=file != "metrics.csv")
    (folder / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    started = time.process_time()
    with pytest.raises(DamagedRun, match=why if file == "metrics.csv" else f"{file} cannot be read: .*{why}") as error:
        open_run_folder(folder)
    assert time.process_time() - started < 5
    assert "\n" not in str(error.value)


def test_config_may_have_aliases_and_numbers_of_any_kind(tmp_path):
    folder = write_run(tmp_path / "run")
    shared = [1, 2]
    config = {"a": shared, "b": shared, "c": float("inf"), "d": 10**200, "e": {"x": [[1] * 300] * 300}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    assert "&id001" in (folder / "config.yaml").read_text()
    run = open_run_folder(folder)
    assert run.config == config
    tables = load(folder)
    assert tables.runs.c.tolist() == [float("inf")]
    assert (len(tables.clients), list(tables.clients)) == (0, ["run", "round", "client"])


def test_huge_numbers_and_nan_are_read(tmp_path):
    folder = write_run(tmp_path / "run", finished=False)
    (folder / "metrics.csv").write_text(f"round,a,b,c,d,run\n1,nan,-inf,{'9' * 400},{2**70 + 1},7\n")
    row = open_run_folder(folder).rounds[0]
    assert str(row["a"]) == "nan"
    assert (row["b"], row["c"], row["d"]) == (float("-inf"), float("inf"), 2**70 + 1)  # no float is equal to it
    rounds = load(folder).rounds
    assert rounds.run.tolist() == [str(folder)]
    assert float(rounds.d[0]) == 2.0**70


def test_finished_run_with_missing_rounds_is_damaged(tmp_path):
    folder = write_run(tmp_path / "run")
    write_csv(folder / "metrics.csv", ROUNDS[:2])
    with pytest.raises(DamagedRun, match=r"it had 3 rounds, metrics.csv has 2"):
        open_run_folder(folder)


@pytest.mark.parametrize("name", ["final/summary.json", "clients.csv"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "link to itself", "unreadable"])
def test_special_files_are_not_read(name, kind, tmp_path):
    """Reading a pipe would block, and `/dev/zero` would fill the memory."""
    folder = write_run(tmp_path / "run")
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "unreadable":
        path.symlink_to("/proc/self/mem")
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    write_run(tmp_path / "sound")
    with caught_warnings() as lines:
        tables = load(tmp_path)
    kept = ["run", "sound"] if name == "clients.csv" else ["sound"]
    assert [Path(run).name for run in tables.runs.run] == kept
    assert len(lines) == 1
    assert str(folder) in lines[0]
    assert lines[0].endswith("left out")


# --- Many runs ---


def test_find_returns_each_run_once_sorted_by_name(tmp_path, monkeypatch):
    for name in ("b/2", "b/1", "a", "c/deep/er"):
        write_run(tmp_path / name)
    write_run(tmp_path / "a" / "inside")  # a run holds no runs
    (tmp_path / "link").symlink_to(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert [str(path) for path in find(".")] == ["a", "b/1", "b/2", "c/deep/er"]
    assert find(tmp_path / "b" / "2") == [tmp_path / "b" / "2"]
    assert [str(path) for path in find(["b/2", Path("link"), "b", "."])] == ["b/2", "link/1", "a", "c/deep/er"]


def test_a_path_that_is_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(ConfigError, match=f"{name}: folder not found"):
            open_runs([tmp_path / name])


def test_no_run_is_an_error(tmp_path):
    (tmp_path / "empty").mkdir()
    with caught_warnings() as lines, pytest.raises(ConfigError, match=r"empty: no run found$") as error:
        load(tmp_path / "empty")
    assert error.value.exit_code == 2
    assert lines == []


def test_folders_that_are_no_runs_are_left_out_with_a_warning(tmp_path):
    sound = write_run(tmp_path / "runs" / "sound")
    write_run(tmp_path / "runs" / "damaged").joinpath("config.yaml").write_text("a: [")
    begun = tmp_path / "runs" / "begun"
    begun.mkdir()
    (begun / "config.yaml").write_text("a: 1")
    (tmp_path / "foreign").mkdir()
    with caught_warnings() as lines:
        opened = open_runs([tmp_path / "runs", tmp_path / "foreign"])
    assert [run.run_dir for run in opened] == [sound]
    left_out = [begun, tmp_path / "runs" / "damaged", tmp_path / "foreign"]
    assert [line.partition(": ")[0] for line in lines] == list(map(str, left_out))
    assert "metrics.csv not found" in lines[0]
    assert lines[2].endswith("no run found; left out")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_folder_is_left_out_with_a_warning(tmp_path):
    write_run(tmp_path / "sound")
    (tmp_path / "closed").mkdir(mode=0)
    with caught_warnings() as lines:
        assert len(open_runs(tmp_path)) == 1
    assert lines == [f"{tmp_path / 'closed'}: Permission denied; left out"]


def test_where_accepts_keys_ends_of_keys_and_lists(tmp_path):
    for tau in (0.08, 0.001):
        for seed in (0, 1, 2):
            write_run(tmp_path / f"{tau}-{seed}", changed(tau=tau, seed=seed))

    def names(where):
        return [run.run_dir.name for run in open_runs(tmp_path, where)]

    assert names(["tau=1e-3"]) == names(["algorithm.tau=0.001"]) == ["0.001-0", "0.001-1", "0.001-2"]
    assert names({"tau": 0.08, "seed": 1}) == names(["tau=0.08", "seed=1"]) == ["0.08-1"]
    assert names(["tau=0.08", "seed=[0, 2]"]) == names({"tau": 0.08, "seed": (0, 2)}) == ["0.08-0", "0.08-2"]
    assert len(names(["hidden=[8, 4]"])) == len(names(["algorithm=FedSKC"])) == 6
    assert len(names({"algorithm": "fl_lightning.algorithms.FedSKC"})) == 6
    with pytest.raises(ConfigError, match=r"none of 6 runs has hidden=\[8\] and tau=0.08"):
        names(["hidden=[8]", "tau=0.08"])
    with pytest.raises(ConfigError, match="none of 6 runs has seed=True"):
        names(["seed=true"])


@pytest.mark.parametrize(
    ("where", "why"),
    [
        (["alpa=1"], "where: .* 'alpa'.* alpha?"),
        (["zzz=1"], "where: .* 'zzz'$"),
        (["alpha"], "where: 'alpha' .* KEY=VALUE"),
        (["=1"], "where: '=1' .* KEY=VALUE"),
        (["seed=1", "seed=2"], r"where: seed .* seed=\[1,2\]"),
        (["seed=["], r"where: '\[' .* YAML"),
        (["seed=0b_"], "where: '0b_' .* YAML"),  # PyYAML raises a ValueError
        (["seed=\udc80"], "where: .* YAML"),
    ],
)
def test_invalid_where_is_refused(where, why, tmp_path):
    write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=why):
        open_runs(tmp_path, where)


def test_ambiguous_end_of_a_key_is_refused(tmp_path):
    write_run(tmp_path / "a", {"algorithm": {"mu": 1}})
    write_run(tmp_path / "b", {"model": {"mu": 1}})
    with pytest.raises(ConfigError, match=r"^where: mu .* algorithm.mu .*model.mu"):
        open_runs(tmp_path, ["mu=1"])


def test_conditions_are_parsed_as_yaml():
    words = ["a=1", "b=x=y", "c=null", "d=[1, a]", "e=true", "f=1e3", "g="]
    assert conditions(words) == {"a": 1, "b": "x=y", "c": None, "d": [1, "a"], "e": True, "f": 1000.0, "g": None}


# --- Tables ---


def test_load_gives_a_row_a_run_a_round_and_a_client(tmp_path):
    clients = [
        {"round": 1, "client": 0, "acc": 0.1 + 0.2, "train_loss": 1.5},
        {"round": 1, "client": 3, "acc": "", "train_loss": 1 / 3},
        {"round": 3, "client": 0, "acc": 0.5, "train_loss": 1e-300},
    ]
    first = write_run(tmp_path / "1", clients=clients)
    second = write_run(
        tmp_path / "2", changed(algorithm="fl_lightning.algorithms.FedAvg"), rounds=ROUNDS[:1], finished=False
    )
    tables = load(tmp_path)
    runs = tables.runs
    assert runs.run.tolist() == [str(first), str(second)]
    assert runs.finished.tolist() == [True, False]
    assert runs.algorithm.tolist() == ["FedSKC", "FedAvg"]
    assert runs["model.hidden"].tolist() == ["[8, 4]"] * 2
    assert runs["global/acc_last"].tolist() == [0.75, 0.25]
    assert runs["rounds"].tolist() == [3, 1]
    assert runs["comm/total_up_bytes"].tolist() == [31, 10]
    assert list(runs)[:2] == ["run", "finished"]
    rounds = tables.rounds
    assert list(zip(rounds.run, rounds["round"], strict=True)) == [
        *((str(first), i) for i in (1, 2, 3)),
        (str(second), 1),
    ]
    assert rounds["comm/up_bytes"].tolist() == [10, 10, 11, 10]
    assert rounds["global/acc"].isna().tolist() == [False, True, False, False]
    assert list(tables.clients) == ["run", "round", "client", "acc", "train_loss"]
    assert tables.clients.client.tolist() == [0, 3, 0]
    assert tables.clients.acc.isna().tolist() == [False, True, False]
    assert tables.clients.train_loss.tolist() == [1.5, 1 / 3, 1e-300]
    assert tables.clients.acc[0] == 0.1 + 0.2
    assert set(tables.clients.run) == {str(first)}
    merged = tables.rounds.merge(runs[["run", "algorithm"]], on="run")
    assert merged.groupby("algorithm")["global/acc"].max().to_dict() == {"FedAvg": 0.25, "FedSKC": 0.75}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a,b\n1,2\n", "it does not begin with round and client"),
        ("", "it does not begin with round and client"),
        ("round,client,acc,acc\n1,1,1,1\n", "two columns have the same name"),
        ("round,client,acc\n1,2\n", "line 2 has 2 cells, its header 3"),
        ("round,client,acc\n1,2,x\n", "could not convert"),
        ("round,client,acc\n1.5,1,0\n", "a round is not a whole number"),
        ("round,client,acc\n1,-1,0\n", "a client is not a whole number"),
        ("round,client,acc\n1e30,1,0\n", "a round is not a whole number"),
    ],
)
def test_unreadable_clients_csv_is_left_out_with_a_warning(text, why, tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "clients.csv").write_text(text)
    with caught_warnings() as lines:
        tables = load(tmp_path)
    assert (len(tables.runs), len(tables.rounds), len(tables.clients)) == (1, 3, 0)
    assert len(lines) == 1
    assert lines[0].startswith(f"{folder}: clients.csv cannot be read: {why}")
    assert lines[0].endswith("its clients are left out")


def test_clients_csv_with_odd_columns_is_read(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "clients.csv").write_text("round,client,run,acc\n1,2,7,nan\n2,2,7,inf\n3,2,7")
    clients = load(tmp_path).clients
    assert clients.run.tolist() == [str(folder)] * 2
    assert clients.acc.tolist()[1] == float("inf")


def test_config_cannot_replace_columns_of_the_tables(tmp_path):
    folder = write_run(tmp_path / "run", {"run": "x", "finished": "x", "global/acc_last": 9, "rounds": 70})
    runs = load(tmp_path).runs
    assert runs.loc[0, ["run", "finished", "global/acc_last", "rounds"]].tolist() == [str(folder), True, 0.75, 3]


def test_reading_runs_imports_neither_torch_nor_pandas(tmp_path):
    write_run(tmp_path / "run")
    code = (
        "import sys, fl_lightning; opened = fl_lightning.runs.open_runs(sys.argv[1]);"
        "opened[0].settings; opened[0].summary;"
        "print(*({'torch', 'lightning', 'pandas'} & set(sys.modules)), 'none');"
        "fl_lightning.runs.load(sys.argv[1]); print(*({'torch', 'lightning'} & set(sys.modules)), 'none')"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["none", "none"]
    assert fl_lightning.runs is runs
