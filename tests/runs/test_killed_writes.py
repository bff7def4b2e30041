"""A run that is killed, or whose disk is full, at any file operation can be resumed."""

import errno
import json
import os
import random
import shutil
import signal
import sys
from contextlib import contextmanager
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from commands import TINY, run, tiny, untimed_rows
from fuzzing import each_apart
from killed_runs import results_of

CONFIG = TINY.replace("rounds: 3", "rounds: 2") + "callbacks: [{class_path: Checkpointing, init_args: {every: 1}}]\n"
METHODS = {
    "FedSKC": [],
    "UAPDFL": ["--algorithm=UAPDFL", "--algorithm.n_com=2", "--clients_per_round=3", "--client_store=disk"],
}
RESUME = ["fit", "--resume", "run", "--rounds=2"]
NEVER = 10**9

# --- In a worker process, which runs one case after another ---


class Harm:
    """Count the file operations of this process, and kill it or fill the disk at one of them."""

    changes = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink", "os.chmod")
    uses_space = ("open", "os.mkdir", "fsync")

    def __init__(self):
        self.armed, self.count, self.at, self.how = False, 0, NEVER, ""
        sys.addaudithook(self._seen)
        self._fsync, os.fsync = os.fsync, self._fsynced

    def arm(self, at, how):
        self.armed, self.count, self.at, self.how = True, 0, at, how

    def _seen(self, event, args):
        if not self.armed:
            return
        if event == "open":
            writes = (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if writes and isinstance(args[0], str) and os.path.abspath(args[0]).startswith(os.getcwd()):
                self._step(event)
        elif event in self.changes:
            self._step(event)

    def _fsynced(self, handle):
        if self.armed:
            self._step("fsync")
        self._fsync(handle)

    def _step(self, event):
        self.count += 1
        if self.how == "kill" and self.count > self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "disk full" and self.count > self.at and event in self.uses_space:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


HARM = []


def run_harmed(words, at, how):
    """Run a command in a fork. Return None if it was killed, otherwise its exit code, stderr and count."""
    HARM[:] = HARM or [Harm()]
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            HARM[0].arm(at, how)
            outcome = run(*words)
            HARM[0].armed = False
            os.write(theirs, json.dumps([outcome.code, outcome.err, HARM[0].count]).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as said:
        text = said.read()
    status = os.waitpid(child, 0)[1]
    return None if os.WIFSIGNALED(status) else json.loads(text)


@cache
def count(root, method, start):
    """Return the number of file operations of a command."""
    with work_folder(root / method, f"counted by {os.getpid()}", start):
        return run_harmed(command(method, start), NEVER, "")[2]


def case(root, method, start, how, at):
    """Harm a command, continue it, and describe what is wrong; empty if nothing is.

    Args:
        root: The folder below which each method's `half` and `whole` are.
        method: The method.
        start: `fit` or `resume`.
        how: `kill` or `disk full`.
        at: The number of the file operation, from 0; or, as a float, the fraction of all file operations.
    """
    at = int(at * count(root, method, start)) if isinstance(at, float) else at
    with work_folder(root / method, f"{start}, {how} at {at}", start) as name:
        wrong = _check_end(run_harmed(command(method, start), at, how), how)
        wrong = wrong or _check_resumed(command(method, start), root / method / "whole")
        return wrong and f"{method}: {name}: {wrong}"


def _check_end(ended, how):
    """Describe what is wrong with the end of a harmed command."""
    if not ended:
        return ""
    code, err, _ = ended
    errors = [line for line in err.splitlines() if not line.startswith("fl-lightning: warning: ")]
    if how == "kill" or "Traceback" in err or (code, len(errors)) not in ((0, 0), (1, 1), (2, 1)):
        return f"exit code {code}: {err}"
    return f"it does not say why: {errors[0]}" if code and "No space left on device" not in errors[0] else ""


def command(method, start):
    return RESUME if start == "resume" else ["fit", "--config", "tiny.yaml", "--run_dir", "run", *METHODS[method]]


@contextmanager
def work_folder(folder, name, start):
    """Change to a folder for a new run, or with a copy of the half-finished one."""
    place = folder / name
    if start == "resume":
        shutil.copytree(folder / "half", place)
    else:
        place.mkdir()
    (place / "tiny.yaml").write_text(CONFIG)
    os.chdir(place)
    yield name
    os.chdir(folder)
    shutil.rmtree(place)


def _check_resumed(words, whole):
    """Repeat or resume a command, and describe what is wrong with its result."""
    message = ""
    again = run(*words)
    if again.code and words != RESUME:
        message = f"{again.err}, then: "
        if again.code != 2 or len(again.err.splitlines()) != 1:
            return f"the same command: {again.code}: {again.err}"
        again = run(*RESUME)
    if again.code:
        return f"{message}{again.err}"
    if results_of(Path("run")) != results_of(whole):
        return f"{message}another end"
    if untimed_rows(Path("run")) != untimed_rows(whole):
        return f"{message}other metrics"
    litter = [path.name for path in Path("run").rglob("*writing*")]
    return f"{message}left behind: {litter}" if litter else ""


# --- The tests ---


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with a complete and a half-finished run of each method."""
    root = tmp_path_factory.mktemp("killed")
    for method, words in METHODS.items():
        tiny(root / method / "whole", *words, text=CONFIG)
        tiny(root / method / "half" / "run", *words, "--rounds=1", text=CONFIG)
    return root


EACH = list(product(METHODS, ("fit", "resume"), ("kill", "disk full")))


@pytest.mark.thorough
def test_run_survives_a_kill_or_full_disk_at_some_file_operations(root):
    chance = random.Random(0)
    cases = [(root, *each, (k + chance.random()) / 2) for each in EACH for k in range(2)]
    assert [wrong for wrong in each_apart(case, cases, 2) if wrong != ""] == []


@pytest.mark.slow
@pytest.mark.parametrize(("method", "start", "how"), EACH)
def test_run_survives_a_kill_or_full_disk_at_each_file_operation(method, start, how, root):
    (steps,) = each_apart(count, [(root, method, start)], 1)
    assert steps > 30
    cases = [(root, method, start, how, at) for at in range(steps)]
    assert [wrong for wrong in each_apart(case, cases, 2) if wrong != ""] == []
