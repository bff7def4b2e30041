"""The executor: the results of parallel jobs, and jobs that are stopped or killed."""

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import TINY, contents, rows, summary, tiny, untimed_rows
from filelock import FileLock
from running import alive, gone

from fl_lightning.analysis.study import executor
from fl_lightning.analysis.study.executor import DiskFull, Job, JobResult, earlier_result, run_jobs
from fl_lightning.cli.jobs import FIT
from fl_lightning.core.errors import CheckpointError, ConfigError
from fl_lightning.runs.folder import lock_run_dir

WITNESS = '''
import os, torch
from fl_lightning.client.loss_term import LossTerm

class Witness(LossTerm):
    """Encodes the threads and the environment of its process in the loss."""

    def forward(self, step):
        found = torch.get_num_threads() + 10 * int(os.environ["OMP_NUM_THREADS"]) + 100 * int(os.environ["FL_WITNESS"])
        return step.logits.sum() * 0 + found

class Slow(LossTerm):
    """Slow from round 2 on."""

    def begin(self, module):
        self.round = module.context.round

    def forward(self, step):
        import time
        time.sleep(0.02 if self.round > 1 else 0)
        return step.logits.sum() * 0

class NoRoom(LossTerm):
    """Raises the error of a full disk in round 2, unless a file named `room` exists."""

    def begin(self, module):
        self.full = module.context.round == 2 and not os.path.exists("room")

    def forward(self, step):
        if self.full:
            raise OSError(28, "No space left on device")
        return step.logits.sum() * 0
'''
LEADER = """
import sys
from pathlib import Path
from fl_lightning.cli import main as cli
from fl_lightning.core.errors import FLError
from fl_lightning.analysis.study.executor import Job, run_jobs
from fl_lightning.cli.jobs import FIT

if __name__ == "__main__":
    root, config = Path(sys.argv[1]), sys.argv[2]
    words = ("--config", config, "--rounds", "50", "--algorithm.loss_terms+=witness.Slow")
    try:
        list(run_jobs([Job(root / str(k), (*words, "--seed", str(k))) for k in range(3)], FIT, workers=2, threads=1))
    except FLError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Change to a folder with the tiny config and a module that job processes can import."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "witness.py").write_text(WITNESS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def job(name, *words):
    return Job(Path("points") / name, ("--config", "tiny.yaml", *words))


def short_job(name):
    """Return a job that ends soon, because its config does not exist."""
    return Job(Path("points") / name, ("--config", "nowhere.yaml"))


def by_name(outcomes):
    return {outcome.job.folder.name: outcome for outcome in outcomes}


def children():
    return [child.pid for child in multiprocessing.active_children()]


@pytest.mark.thorough
def test_jobs_have_the_results_of_separate_runs(here):
    jobs = [
        job("nan", "--optimizer.lr=1e30"),
        job("typo", "--algorithm.tua=1"),
        job("one", "--seed=1"),
        job("offline", "--logger=WandbRoundLogger"),
    ]
    outcomes = by_name(run_jobs(jobs, FIT, workers=2, threads=1))
    assert {name: outcome.code for name, outcome in outcomes.items()} == {"nan": 1, "typo": 2, "one": 0, "offline": 0}
    assert all(outcomes[one.folder.name].job == one for one in jobs)
    diverged = outcomes["nan"].reason
    assert diverged.startswith("client 0, round 1: loss term 'ce' ")
    assert diverged == (here / "points/nan/failed.txt").read_text().strip()
    assert outcomes["typo"].reason.endswith("'tua'. Did you mean tau?")
    assert not (here / "points/typo/failed.txt").exists()
    assert (outcomes["one"].reason, outcomes["offline"].reason) == ("", "")
    tiny(here / "alone", "--seed=1")
    assert untimed_rows(here / "points/one") == untimed_rows(here / "alone")
    assert summary(here / "points/one") == summary(here / "alone")
    assert "round 3/3" in (here / "points/one/log.txt").read_text()
    assert list((here / "points/offline/wandb").glob("offline-run-*/run-*.wandb"))
    assert not children()

    before = contents(here / "points")
    again = by_name(run_jobs(jobs, FIT, workers=2, threads=1))
    assert {name: outcome._replace(seconds=0.0) for name, outcome in again.items()} == {
        name: outcome._replace(seconds=0.0) for name, outcome in outcomes.items()
    }
    after = contents(here / "points")
    assert {name for name in after if after[name] != before.get(name)} == {"typo/log.txt"}
    (here / "points/nan/failed.txt").unlink()
    repaired = Job(Path("points/nan"), ("--config", "tiny.yaml", "--optimizer.lr=1e30", "--rounds=2"))
    (retried,) = run_jobs([repaired], FIT, threads=1)
    assert (retried.code, retried.reason) == (1, diverged)
    assert (here / "points/nan/log.txt").read_text().count(diverged) == 2


@pytest.mark.thorough
def test_a_full_disk_ends_all_jobs(here, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(here))
    jobs = [job(name, "--algorithm.loss_terms+=witness.NoRoom", f"--seed={name}") for name in ("0", "1")]
    fix = "Free disk space or raise the limit, then run the same command to continue."
    with pytest.raises(DiskFull, match=re.escape(f"points/0: No space left on device. {fix}")):
        list(run_jobs(jobs, FIT, threads=1))
    assert not list(here.rglob("failed.txt"))
    assert not (here / "points/1").exists()
    (here / "room").touch()
    assert [outcome.code for outcome in run_jobs(jobs, FIT, threads=1)] == [0, 0]
    assert len(rows(here / "points/0")) == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_used_up_quota_is_no_failure_of_the_job(number, here):
    folder = here / "points/0"
    folder.mkdir(parents=True)
    reason = CheckpointError(f"cannot write checkpoint 0: {OSError(number, os.strerror(number))}")
    (folder / "log.txt").write_text(f"round 1/1\nfl-lightning: error: {reason}\n")
    process = SimpleNamespace(join=lambda: None, exitcode=1)
    with pytest.raises(DiskFull, match=os.strerror(number)):
        executor.RunningJob(Job(folder, ()), process).result()
    assert not (folder / "failed.txt").exists()


@pytest.mark.thorough
def test_the_next_job_is_requested_when_a_worker_is_free():
    ended, requested = [], []

    def next_jobs():
        for k in range(5):
            requested.append((k, len(ended), len(children())))
            yield short_job(str(k))

    for outcome in run_jobs(next_jobs(), FIT, workers=2, threads=1):
        ended.append(outcome)
    assert [k for k, _, _ in requested] == [0, 1, 2, 3, 4]
    assert all(k - done < 2 and running < 2 for k, done, running in requested)
    assert len(ended) == 5
    assert {outcome.code for outcome in ended} == {2}
    assert [running for k, _, running in requested if k == 1] == [1]  # the second did not wait for the first


@pytest.mark.thorough
def test_a_job_has_its_threads_and_the_current_environment(monkeypatch):
    words = ["--rounds=1", "--scenario.clients=1", "--algorithm=FedAvg", "--algorithm.loss_terms=[witness.Witness]"]
    monkeypatch.setenv("FL_WITNESS", "5")
    (outcome,) = run_jobs([job("one", *words)], FIT, threads=2)
    assert outcome.code == 0, outcome.reason
    assert float(rows(outcome.job.folder)[0]["client/train_witness"]) == 500 + 11 * 2


@pytest.mark.parametrize(
    ("workers", "variable", "each"), [(2, None, 3), (9, None, 1), (2, "5", 5), (2, "5,2", 5), (2, "", 3)]
)
def test_cores_are_shared_among_workers(workers, variable, each, monkeypatch):
    import torch

    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(os, "environ", {"OLD": "1"})
    monkeypatch.setattr("fl_lightning.engines.processes.usable_cores", lambda: 7)
    environment = {"NEW": "2"} | ({} if variable is None else {"OMP_NUM_THREADS": variable})
    executor.set_environment(environment, workers, None)
    assert given == [each]
    assert os.environ == {"NEW": "2", "OMP_NUM_THREADS": str(each)}


@pytest.mark.thorough
def test_a_stopped_job_writes_a_checkpoint_and_resumes(here):
    slow = job("slow", "--rounds=3", "--algorithm.loss_terms=[witness.Slow]")
    polls = []

    def should_stop(one):
        assert one == slow
        polls.append(time.monotonic())
        return (here / "points/slow/metrics.csv").exists() and len(rows(here / "points/slow")) >= 1

    (stopped,) = run_jobs([slow], FIT, threads=1, should_stop=should_stop)
    assert stopped.code == 128 + signal.SIGTERM, stopped.reason
    assert "stopped by SIGTERM after round 1 of 3" in stopped.reason
    assert all(later - earlier > 0.4 for earlier, later in pairwise(polls))
    assert earlier_result(slow) is None
    assert list((here / "points/slow/checkpoints").glob("round-*"))
    (ended,) = run_jobs([slow], FIT, threads=1)
    assert ended[:3] == (slow, 0, "")
    assert ended.seconds > 0
    assert "round 1/3" not in (here / "points/slow/log.txt").read_text().partition("stopped by SIGTERM")[2]
    tiny(here / "alone", "--algorithm.loss_terms=[witness.Slow]")
    assert untimed_rows(here / "points/slow") == untimed_rows(here / "alone")


@pytest.mark.thorough
def test_a_killed_job_runs_again_in_the_next_call(here):
    slow = job("slow", "--rounds=2", "--algorithm.loss_terms=[witness.Slow]")

    def kill(one):
        if (here / "points/slow/config.yaml").exists():
            os.kill(children()[0], signal.SIGKILL)
        return False

    (killed,) = run_jobs([slow], FIT, threads=1, should_stop=kill)
    assert killed.code == -signal.SIGKILL
    assert killed.reason.startswith("killed by SIGKILL")
    assert not (here / "points/slow/failed.txt").exists()
    (ended,) = run_jobs([slow], FIT, threads=1)
    assert ended[:3] == (slow, 0, "")
    assert ended.seconds > 0


@pytest.mark.thorough
def test_a_job_waits_for_another_process_in_its_folder(here):
    """The other process may belong to a call that was killed. If it finishes the run, the job does not run."""
    one, polls = job("one", "--rounds=1"), []
    (here / "points/one/final").mkdir(parents=True)
    lock = FileLock(here / "points/one/.lock")
    lock.acquire()

    def look(_):
        polls.append(sorted(path.name for path in (here / "points/one").iterdir()))
        if len(polls) == 4:
            (here / "points/one/final/summary.json").write_text("{}")
            lock.release()
        return False

    (ended,) = run_jobs([one], FIT, threads=1, should_stop=look)
    assert ended._replace(seconds=0.0) == JobResult(one, 0, "")  # not started again
    assert all(seen == [".lock", "final"] for seen in polls[:4])
    assert not (here / "points/one/metrics.csv").exists()


@pytest.mark.thorough
def test_closing_the_generator_ends_all_jobs():
    handler = signal.getsignal(signal.SIGTERM)
    slow = job("slow", "--rounds=50", "--algorithm.loss_terms=[witness.Slow]")
    outcomes = run_jobs([short_job("0"), slow], FIT, workers=2, threads=1)
    next(outcomes)
    pids = children()
    assert pids
    assert signal.getsignal(signal.SIGTERM) != handler
    outcomes.close()
    assert not any(map(alive, pids))
    assert signal.getsignal(signal.SIGTERM) == handler


@pytest.mark.parametrize("numbers", [{"workers": 0}, {"threads": 0}])
def test_numbers_below_one_are_refused(numbers):
    with pytest.raises(ConfigError, match="0 is below 1"):
        next(run_jobs([], FIT, **numbers))


def test_a_folder_that_cannot_be_created_is_named(here):
    (here / "points").write_text("in the way")
    with pytest.raises(ConfigError, match=r"points/0 cannot be written to: "):
        next(run_jobs([short_job("0")], FIT))
    with pytest.raises(ConfigError, match=r"points/0 cannot be written to: "), lock_run_dir(here / "points/0"):
        pass


# --- The calling process ---


def start_leader(here):
    """Start a process that runs three long jobs, and wait until two of them have finished a round."""
    (here / "leader.py").write_text(LEADER)
    command = [sys.executable, "leader.py", "led", "tiny.yaml"]
    environment = os.environ | {"PYTHONPATH": f"{here}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 300
    while not all((here / f"led/{k}/metrics.csv").exists() and len(rows(here / f"led/{k}")) for k in range(2)):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


def processes_of_session(number):
    """Return the ids of the processes in a session."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == number:
            pids.append(int(stat.parent.name))
    return pids


@pytest.mark.thorough
@pytest.mark.parametrize(
    "how",
    [
        "SIGKILL",
        pytest.param("SIGINT to the group", marks=pytest.mark.slow),
        pytest.param("SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_jobs_end_with_the_calling_process(here, how):
    process = start_leader(here)
    pids = processes_of_session(process.pid)
    number = signal.Signals[how.partition(" ")[0]]
    assert len(pids) >= 4  # the process, its fork server and two jobs
    os.killpg(process.pid, number) if "group" in how else process.send_signal(number)
    message = process.communicate(timeout=300)[1]
    if number == signal.SIGKILL:
        assert process.returncode == -number
        assert gone(pids)
    else:
        assert process.returncode == 128 + number
        assert message == f"stopped by {number.name}. Run the same command to continue\n"
        assert gone(pids)
        for k in range(2):
            log = (here / f"led/{k}/log.txt").read_text()
            assert "stopped by SIGTERM after round" in log, log
            last = int(rows(here / f"led/{k}")[-1]["round"])
            assert (here / f"led/{k}/checkpoints/round-{last:06d}").is_dir()
    assert not (here / "led/2").exists()
    assert not list(here.glob("led/*/failed.txt"))
