"""A run folder has one owner at a time; a second one is refused and changes nothing."""

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import pytest
from commands import TINY, contents, rows, run, tiny, untimed_rows
from experiments import experiment
from killed_runs import results_of

from fl_lightning.callbacks import RoundCallback
from fl_lightning.cli.main import main
from fl_lightning.core.errors import ConfigError
from fl_lightning.runs import folder
from fl_lightning.runs.folder import lock_run_dir

ROUNDS = 8
LONG = TINY.replace("rounds: 3", f"rounds: {ROUNDS}")
FIT = ["fit", "--config", "tiny.yaml", "--run_dir", "run"]
RESUME = ["fit", "--resume", "run"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    tiny(folder, text=LONG)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(LONG)
    yield tmp_path
    while Command.begun:
        Command.begun.pop().process.kill()


def assert_undisturbed(whole, run_dir="run"):
    assert results_of(Path(run_dir)) == results_of(whole)
    assert untimed_rows(Path(run_dir)) == untimed_rows(whole)


def assert_refused(code, err, pid):
    """Check for one line that names the owner of the folder."""
    assert code == 2, err
    (line,) = err.splitlines()
    assert line.startswith("fl-lightning: error: ")
    assert f"process {pid} on {socket.gethostname()}" in line


# --- Commands in other processes ---


class Command:
    """A command in another process, which ends with the test at the latest."""

    begun: ClassVar[list["Command"]] = []

    def __init__(self, words, log, start=None):
        self.log = Path(log)
        context = get_context("forkserver")
        context.set_forkserver_preload(["fl_lightning.cli.commands.fit"])
        self.process = context.Process(target=run_command, args=(words, str(self.log), start), daemon=True)
        self.process.start()
        self.begun.append(self)

    @property
    def pid(self):
        return self.process.pid

    def end(self):
        """Return its exit code and its stderr."""
        self.process.join(120)
        return self.process.exitcode, self.log.read_text()


def run_command(words, log, start):
    """Run a command once all processes are ready."""
    if start:
        start.wait()
    with open(log, "w") as said, open(os.devnull, "w") as shown, redirect_stderr(said), redirect_stdout(shown):
        code = main(words)
    sys.exit(code)


def has_rounds(count):
    return Path("run/metrics.csv").exists() and len(rows(Path("run"))) >= count


def pause(command, after=2):
    """Pause a command once its run has some rounds."""
    until = time.monotonic() + 300
    while not has_rounds(after):
        assert command.process.is_alive(), command.end()
        assert time.monotonic() < until
        time.sleep(0.005)
    os.kill(command.pid, signal.SIGSTOP)
    while " (stopped)" not in Path(f"/proc/{command.pid}/status").read_text():  # all of its threads
        time.sleep(0.005)
    time.sleep(0.1)
    assert len(rows(Path("run"))) < ROUNDS
    return command


def run_together(*commands):
    """Start commands at the same moment. Return their exit codes, messages and process ids."""
    start = get_context("forkserver").Barrier(len(commands))
    begun = [Command(words, f"log-{i}", start) for i, words in enumerate(commands)]
    return [(*command.end(), command.pid) for command in begun]


# --- While a folder has an owner ---


@pytest.mark.thorough
@pytest.mark.parametrize("how", [FIT, RESUME], ids=["fit", "resume"])
def test_other_commands_may_read_but_not_write_a_run_in_progress(how, here, whole):
    if how is RESUME:
        leave_half_run()
    owner = pause(Command(how, "log"), after=2 if how is FIT else 5)
    before = contents(Path("run"))
    for words in (RESUME, [*RESUME, "--rounds", "30"], FIT, [*FIT, "--seed", "1"]):
        outcome = run(*words)
        if "--run_dir" in words:  # refused for the run or for its owner
            assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
            assert "holds a run already" in outcome.err or f"process {owner.pid} on" in outcome.err
        else:
            assert_refused(outcome.code, outcome.err, owner.pid)
        assert contents(Path("run")) == before
    for words in (["test", "run"], ["watch", "run", "--once"], ["compare", "run", "--unfinished"]):
        assert run(*words).code == 0, words
    if how is FIT:  # once is enough, since a report takes long
        assert run("report", "run", "--out", "report.html").code == 0
    assert contents(Path("run")) == before
    os.kill(owner.pid, signal.SIGCONT)
    assert owner.end() == (0, "")
    assert_undisturbed(whole)


def leave_half_run():
    """Leave the run of a command that was killed after some rounds."""
    command = pause(Command(FIT, "log-half"))
    os.kill(command.pid, signal.SIGKILL)
    command.process.join()


@pytest.mark.thorough
@pytest.mark.parametrize("commands", [[RESUME] * 2, [FIT] * 4], ids=["resume", "fit"])
def test_only_one_of_several_commands_gets_the_folder(commands, here, whole):
    if RESUME in commands:
        leave_half_run()
    first, *others = sorted(run_together(*commands))
    assert first[:2] == (0, "")
    for code, err, _ in others:
        if commands != [FIT] * 4 or "run holds a run already" not in err:  # the first has ended
            assert_refused(code, err, first[2])
    assert_undisturbed(whole)


class Beside(RoundCallback):
    """Try to use the folder of a running experiment within its process."""

    def __init__(self, folder):
        self.folder, self.said = folder, []

    def on_round_end(self, run, metrics):
        def attempt(resume):
            try:
                experiment(self.folder).fit(resume=resume)
            except ConfigError as error:
                self.said.append(str(error))

        for resume in (True, False):
            thread = threading.Thread(target=attempt, args=(resume,))
            thread.start()
            thread.join()
            attempt(resume)


def test_folder_has_one_owner_within_one_process(tmp_path):
    whole = experiment(tmp_path / "whole")
    whole.fit()
    beside = Beside(tmp_path / "run")
    experiment(tmp_path / "run", callbacks=[beside]).fit()
    assert len(beside.said) == 3 * 4
    held = f"process {os.getpid()} on {socket.gethostname()}"
    assert all(held in said or "holds a run already" in said for said in beside.said)
    assert sum(held in said for said in beside.said) >= 3 * 2  # each attempt to resume
    assert results_of(tmp_path / "run") == results_of(tmp_path / "whole")
    experiment(tmp_path / "run", rounds=4).fit(resume=True)


# --- After an owner ---


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--engine=processes"], marks=pytest.mark.slow),
        pytest.param(["--logger=fl_lightning.loggers.wandb.WandbRoundLogger"], marks=pytest.mark.slow),
    ],
    ids=["with processes", "with W&B"],
)
def test_folder_of_a_killed_owner_is_free_at_once(more, here, whole):
    """Its worker processes may still be running."""
    words = [sys.executable, "-m", "fl_lightning", *FIT, *more]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    with process:
        while not has_rounds(2):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        process.send_signal(signal.SIGSTOP)
        refused = run(*RESUME)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        resumed = run(*RESUME, "--engine=sequential", "--logger=null")
    assert_refused(refused.code, refused.err, process.pid)
    assert resumed.code == 0, resumed.err
    assert_undisturbed(whole)


@pytest.mark.thorough
def test_damaged_lock_files_of_a_killed_owner_do_not_matter(here):
    """The content of the lock files does not matter."""
    leave_half_run()
    Path("run/.owner").write_bytes(b"\xff\xfe")
    Path("run/.lock").write_text("1")
    assert run(*RESUME).code == 0


# --- Folders that cannot be read or written ---


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_folder_whose_owner_cannot_be_written_is_refused(number, tmp_path, monkeypatch):
    def write(path, content):
        raise OSError(number, os.strerror(number), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_atomically", write)
        with pytest.raises(ConfigError, match=r"run cannot be written to: .*\.owner"), lock_run_dir(tmp_path / "run"):
            pass
    with lock_run_dir(tmp_path / "run"):  # it was unlocked
        pass


def test_an_unreadable_run_is_not_called_missing(here, whole, monkeypatch):
    shutil.copytree(whole, "run")
    real = os.open

    def refusing(path, *given, **options):
        if str(path).startswith("run/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *given, **options)

    monkeypatch.setattr(os, "open", refusing)
    for words in (["test", "run"], ["fit", "--resume", "run"], ["export", "run", "-o", "model.pt"]):
        outcome = run(*words)
        assert outcome.code == 2
        assert re.search("run: config.yaml .*Permission denied", outcome.err)
    assert re.search("run: config.yaml .*Permission denied; left out", run("compare", "run").err)
