"""`fl-lightning fit --seeds ... --multirun ...`: the grid, the refusals, the runs and the comparison."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from commands import TINY, contents, run, tiny, untimed_rows
from run_folders import changed

from fl_lightning.analysis.study.executor import Job, JobResult
from fl_lightning.analysis.study.multirun import combinations, multirun_jobs, parse_grid, split_values
from fl_lightning.cli import jobs
from fl_lightning.cli.jobs import describe_job, run_missing
from fl_lightning.core.errors import ConfigError

FIT = ("fit", "--config", "tiny.yaml")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to a folder with the tiny experiment."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY.replace("rounds: 3", "rounds: 1").replace("FedSKC", "FedAvg"))
    return tmp_path


@pytest.fixture
def started(started, monkeypatch):
    """Run jobs and checks in this process; return the started jobs, in order."""

    def in_this_process(function, command_lines, workers):
        yield from (function(words, dict(os.environ)) for words in command_lines)

    monkeypatch.setattr(jobs, "in_job_processes", in_this_process)
    return started


def folders(out="runs/multirun/tiny"):
    """Return the run folders by combination and seed, without their digests."""
    return {re.sub("-[0-9a-f]{10}$", "", str(p.parent.relative_to(out))): p.parent for p in Path(out).rglob("final")}


# --- The grid ---


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("FedAvg,FedProx", ["FedAvg", "FedProx"]),
        ("0.10, 1e-3,010,null", ["0.10", "1e-3", "010", "null"]),
        ("[1, 2],[3],[]", ["[1, 2]", "[3]", "[]"]),
        ("{class_path: A, init_args: {b: [1, 2]}},C", ["{class_path: A, init_args: {b: [1, 2]}}", "C"]),
        ("'a,b',\"c, d\",e f", ["a,b", "c, d", "e f"]),
        ("data/ü,a b,x", ["data/ü", "a b", "x"]),
    ],
)
def test_values_are_split_at_the_outer_commas(text, values):
    assert split_values("key", text) == values


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["algorithm"], "'algorithm' is not of the form KEY=VALUE,VALUE"),
        (["=1"], "'=1' is not of the form KEY=VALUE,VALUE"),
        (["a="], "a: a value is missing ('')"),
        (["a=1,"], "a: a value is missing ('1,')"),
        (["a=1,'',2"], "a: a value is missing"),
        (["a=1] #"], "a: a value is missing"),
        (["a=1,,2"], "a: '1,,2' is no list of values (line 1: "),
        (["a=[1,2"], "a: '[1,2' is no list of values (line 1: "),
        ([f"a={'[' * 10**5}"], "is no list of values"),
        (["a=1,2,1"], "a: 1 is given twice"),
        (["a=1", "b=1", "a=2"], "a is given twice. List all its values after one a="),
        (["seed=1,2"], "seed cannot vary here. Use --seeds 0 1 2."),
        (["run_dir=a,b"], "run_dir cannot vary here. Use --out FOLDER."),
    ],
)
def test_a_wrong_grid_is_refused(words, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_grid(words)


def test_combinations_replace_the_option_in_its_place():
    words = ("--config", "x", "--multirun", "--algorithm.mu", "1")
    first, *_, last = found = combinations(parse_grid(["algorithm=A,m.B", "scenario.partition.alpha=0.1,1"]), words)
    assert first.words == (*words[:2], "--algorithm=A", "--scenario.partition.alpha=0.1", *words[3:])
    assert [each.name for each in found] == [
        f"algorithm={name},alpha={alpha}" for name in "AB" for alpha in ("0.1", "1")
    ]
    assert last.values == {"algorithm": "m.B", "scenario.partition.alpha": "1"}
    assert [(each.name, each.words) for each in combinations({}, ("--rounds", "1"))] == [("", ("--rounds", "1"))]


def test_another_setting_is_another_folder_unless_it_does_not_change_results():
    def folder(**values):
        ((job,),) = multirun_jobs(combinations({}, ()), [changed(**values)], [], Path("out"))
        return job.folder

    assert folder(engine="stacked", data_dir="elsewhere") == folder()
    assert folder(callbacks=None) == folder(callbacks=[{"class_path": "fl_lightning.callbacks.RowNorms"}])
    stopper = {"class_path": "fl_lightning.callbacks.EarlyStopping", "init_args": {"patience": 3}}
    assert folder(seed=2).name.split("-") == ["seed_2", folder().name.split("-")[1]]
    others = [
        folder(callbacks=None),
        folder(callbacks=[stopper]),
        folder(lr=0.2),
        folder(tau=0.1),
        folder(rounds=4),
        folder(algorithm="fl_lightning.algorithms.FedDW"),
    ]
    assert len({folder(), *others}) == 7


# --- Refusals ---


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--seeds", "--seeds: no value is given. Write --seeds 0 1 2"),
        ("--multirun --seeds 0", "--multirun: no value is given. Write --multirun algorithm=FedAvg,FedProx"),
        ("--seeds 0 1 0", "--seeds: 0 is given twice. Leave one out"),
        ("--seeds 0 -1", "--seeds: -1 is below 0"),
        ("--seeds 0 x", "--seeds: got 'x', expected int"),
        ("--seeds 0 --seeds 1", "--seeds: given twice. Write all its values after one --seeds"),
        ("--seeds 0 --seed 1", "--seed: --seeds sets it, too. Leave one of them out"),
        ("--seeds 0 --resume runs", "--resume: the same command resumes all its runs. Leave --resume out"),
        ("--seeds 0 --run_dir here", "--run_dir: each run has its own folder. Use --out"),
        ("--seeds 0 --print_config", "--print_config: it shows the config of one run"),
        ("--seeds 0 --workers 0", "--workers: 0 is below 1"),
        ("--seeds 0 --format pdf", "--format: got 'pdf', expected table | csv | latex | markdown"),
        ("--seeds 0 --percent 1", "1 belongs to no option"),
        ("--seeds 0 --round 1", "the config has no key 'round'. Did you mean --rounds?"),
        ("--workers 2", "--workers: needs --seeds or --multirun. Add one of them, or leave it out"),
        ("-m algorithm=FedAvg --algorithm FedProx", "--algorithm: --multirun sets it, too. Leave one of them out"),
        ("-m algorithm=FedAvg,FedPrx", "algorithm=FedPrx: algorithm: class 'FedPrx' not found. Did you mean FedProx?"),
        ("-m algorithm=FedAvg,FedProx algorithm.mu=1", "algorithm=FedAvg,mu=1: algorithm: FedAvg has no key 'mu'"),
        ("--seeds 0 --out done", "--out: done is the folder of a run. Give another folder"),
    ],
)
def test_wrong_options_are_refused_without_torch(words, message, here, monkeypatch):
    monkeypatch.setattr(jobs, "in_job_processes", None)
    refused(words, message, here)


@pytest.mark.thorough
@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-m optimizer.lr=0.1,fast", "lr=fast: optimizer.lr: got 'fast', expected float"),
        ("-m scenario.partition.alpha=1,-1", "alpha=-1: scenario.partition.alpha: -1"),
        ("-m scenario.clients=2,9999", "clients=9999: scenario.clients: 9999 is above"),
        ("-m optimizer.lr=0.1,0.10", "lr=0.1 and lr=0.10 give the same results"),
        ("-m callbacks=[RowNorms],[]", "callbacks=[RowNorms] and callbacks=[] give the same results"),
        ("-m engine=sequential,stacked", "engine=sequential and engine=stacked give the same results"),
        ("-m algorithm=FedAvg,FedProx --reference MOON", "--reference: no group has MOON. Available: FedAvg, FedProx."),
    ],
)
def test_wrong_values_are_refused_before_the_first_run(words, message, here, started):
    refused(words, message, here)
    assert not started


def refused(words, message, here):
    """Check that a command line is refused in one line that contains the message, and that nothing is written."""
    Path("done").mkdir()
    Path("done/config.yaml").write_text(TINY)
    before = contents(here)
    code, out, err = run(*FIT, *words.split())
    assert (code, out, contents(here)) == (2, "", before)
    assert message in err
    assert err.count("\n") == 1


def test_values_that_a_later_config_overrides_are_refused(here, started):
    code, _, err = run("fit", "--multirun", "algorithm=FedAvg,FedProx", *FIT[1:])
    assert (code, started) == (2, [])
    assert "put --config before it" in err


def test_a_config_cannot_contain_the_options(here):
    with Path("tiny.yaml").open("a") as config:
        config.write("seeds: [0, 1]\n")
    message = "the config has no key 'seeds'. It is an option of the command line, --seeds."
    assert run(*FIT).err == f"fl-lightning: error: {message}\n"


# --- The lines about runs ---


@pytest.mark.parametrize(
    ("code", "reason", "seconds", "line"),
    [
        (0, "", 61.0, "done in 2 min, global acc 0.5000, client acc 0.2500"),
        (0, "", 0.0, "done, global acc 0.5000, client acc 0.2500"),
        (1, "diverged", 3.0, "failed after 3 s: diverged"),
        (1, "diverged", 0.0, "failed: diverged"),
    ],
    ids=["done", "done before", "failed", "failed before"],
)
def test_the_line_of_a_run_has_its_score_and_its_time(code, reason, seconds, line, tmp_path):
    final = {"rounds": 3, "global/acc_last": 0.5, "global/acc_best": 0.75, "client/acc_mean_last": 0.25, "R_0.5": None}
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "summary.json").write_text(json.dumps(final))
    assert describe_job(JobResult(Job(tmp_path, ()), code, reason, seconds)) == line


def test_lines_say_how_much_time_is_left(tmp_path, monkeypatch, capsys):
    """After 1 of 3 jobs in 40 s, 80 s are left; after 2 of them in 60 s, 30 s."""
    clock = SimpleNamespace(now=0.0)
    jobs = [Job(tmp_path / str(k), ()) for k in range(3)]

    def run_jobs(jobs, *args):
        for job, seconds in zip(jobs, (40, 20, 30), strict=True):
            clock.now += seconds
            yield JobResult(job, 1, "diverged", seconds)

    monkeypatch.setattr("fl_lightning.cli.jobs.run_jobs", run_jobs)
    monkeypatch.setattr("fl_lightning.cli.jobs.time", SimpleNamespace(monotonic=lambda: clock.now))
    assert len(run_missing(jobs, tmp_path, 1, None)) == 3
    assert capsys.readouterr().err.splitlines()[1:] == [
        "1 of 3, 0: failed after 40 s: diverged; left 2 min",
        "2 of 3, 1: failed after 20 s: diverged; left 30 s",
        "3 of 3, 2: failed after 30 s: diverged",
    ]


# --- The runs ---


@pytest.mark.thorough
def test_all_combinations_and_seeds_are_run_once_and_compared(here, started):
    words = [*FIT, "--multirun", "algorithm=FedAvg,fedprox", "--algorithm.loss_terms", "null", "--seeds"]
    code, out, err = run(*words, "0", "--workers", "2", "--threads", "1", "--percent")
    assert code == 0
    assert [(workers, threads) for _, workers, threads in started] == [(2, 1)] * 2
    assert err.splitlines()[0] == "2 of 2 runs to do, in runs/multirun/tiny"
    assert folders().keys() == {"algorithm-FedAvg/seed_0", "algorithm-fedprox/seed_0"}
    second = folders()["algorithm-fedprox/seed_0"].relative_to("runs/multirun/tiny")
    assert re.fullmatch(rf"2 of 2, {second}: done, global acc 0\.\d{{4}}, client acc 0\.\d{{4}}", err.splitlines()[2])
    assert re.search(r"; left \d+ s$", err.splitlines()[1])
    started.clear()
    code, out, err = run(*words, "0", "3", "--reference", "FedProx")
    assert sorted(job.words[-1] for job, *_ in started) == ["--seed=3"] * 2
    assert len(folders()) == 4
    assert "to FedProx" in out
    compared = run("compare", "runs/multirun/tiny", "--reference", "FedProx")
    assert out == compared.out
    config = yaml.safe_load((folders()["algorithm-fedprox/seed_3"] / "config.yaml").read_text())
    assert (config["algorithm"]["class_path"].rpartition(".")[2], config["seed"]) == ("FedProx", 3)
    started.clear()
    assert (run(*words, "0", "3", "--reference", "FedProx").out, started) == (out, [])
    assert run("watch", "runs/multirun/tiny", "--once").code == 0
    assert "wrote page.html: 4 runs" in run("report", "runs/multirun/tiny", "-o", "page.html").out


@pytest.mark.thorough
def test_a_run_that_fails_is_left_out_of_the_table(here, started):
    words = [*FIT, "-m", "optimizer.lr=0.5,1e30", "--format", "csv"]
    code, out, err = run(*words)
    assert (code, len(started)) == (1, 2)
    assert re.search(r"2 of 2, lr-1e30/seed_0-\w+: failed: .*NaN or Inf", err)
    assert len(out.splitlines()) == 2
    assert (run(*words).code, len(started)) == (1, 2)


@pytest.mark.thorough
def test_fast_makes_a_dry_run_of_each_combination(here, started):
    before = contents(here)
    code, out, err = run(*FIT, "-m", "algorithm=FedAvg,FedProx", "--seeds", "0", "1", "--fast")
    assert (code, err, started, contents(here)) == (0, "", [], before)
    assert re.findall(r"^algorithm=\w+:$", out, re.MULTILINE) == ["algorithm=FedAvg:", "algorithm=FedProx:"]
    assert re.findall(r"^dry run passed in [\d.]+ s: (\w+) on Digits", out, re.MULTILINE) == ["FedAvg", "FedProx"]
    code, out, err = run(*FIT, "-m", "optimizer.lr=1e30,0.5", "--fast")
    assert (code, out.splitlines()[0], out.count("lr=")) == (1, "lr=1e30:", 1)
    assert "NaN or Inf" in err


@pytest.mark.thorough
def test_killed_runs_continue_in_job_processes(here):
    """Four runs: the command is killed when some are finished, then it runs again."""
    words = [
        *FIT,
        "--rounds",
        "4",
        "-m",
        "optimizer.lr=0.5,0.25",
        "--seeds",
        "0",
        "1",
        "--workers",
        "2",
        "--threads",
        "1",
    ]
    command = [sys.executable, "-m", "fl_lightning", *words]
    begun = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (done := list(Path("runs").glob("multirun/*/*/*/final/summary.json"))) and begun.poll() is None:
        time.sleep(0.02)
    os.kill(begun.pid, signal.SIGKILL)
    begun.wait()
    assert 1 <= len(done) < 4
    written = {path: path.stat().st_mtime_ns for path in done}
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {path: path.stat().st_mtime_ns for path in done} == written
    assert len(folders()) == 4
    assert again.stdout == run("compare", "runs/multirun/tiny").out
    tiny(here / "alone", "--rounds", "4", "--optimizer.lr", "0.25", "--seed", "1", text=Path("tiny.yaml").read_text())
    assert untimed_rows(folders()["lr-0.25/seed_1"]) == untimed_rows(here / "alone")
