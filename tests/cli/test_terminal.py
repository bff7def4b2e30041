"""The command as a process: signals, closed or full streams, limited encodings, odd environments."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from commands import run

import fl_lightning.cli.commands.list  # noqa: F401, replaced below
from fl_lightning.core.errors import Interrupted
from fl_lightning.core.interrupt import Stopped
from fl_lightning.core.terminal import CLEAR_LINE, print_to_stderr, show_status

COMMAND = [sys.executable, "-m", "fl_lightning"]


def shell(words, **environment):
    """Run a command line in bash, with `fl-lightning` as the command."""
    line = words.replace("fl-lightning", " ".join(COMMAND))
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **environment}, timeout=300
    )


def is_one_line(text):
    return text.startswith("fl-lightning: error: ") and text.count("\n") == 1


# --- Streams ---


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("fl-lightning --help >&-", 2, "stdout is closed"),
        ("fl-lightning --help >/dev/full", 1, "stdout: No space left on device"),
        ("fl-lightning list configs >/dev/full", 1, "stdout: No space left on device"),
        ("fl-lightning nothing", 2, "'nothing'"),
        ("mkdir gone && cd gone && rmdir ../gone && fl-lightning list configs", 2, "the working folder was deleted"),
    ],
)
def test_a_command_that_cannot_run_says_why_in_one_line(line, code, message, here):
    done = shell(line)
    assert done.returncode == code
    assert is_one_line(done.stderr)
    assert message in done.stderr


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("fl-lightning --help 2>&-", 0),
        ("fl-lightning --help <&-", 0),
        ("fl-lightning nothing 2>&-", 2),
        ("fl-lightning nothing 2>/dev/full", 2),
        ("fl-lightning --help >&- 2>&- <&-", 2),
        ("fl-lightning --help | true; exit ${PIPESTATUS[0]}", 141),
    ],
)
def test_the_exit_code_is_right_without_streams(line, code, here):
    done = shell(line, PYTHONUNBUFFERED="1")
    assert (done.returncode, done.stderr) == (code, "")
    assert ("commands:" in done.stdout) == (code == 0)


def test_no_file_gets_the_number_of_a_closed_stream(here):
    """Text that is printed to a closed stderr must not end in a file."""
    program = "import os; from fl_lightning.core.terminal import prepare_terminal; prepare_terminal(); "
    code = program + "print(os.open('file', os.O_CREAT) > 2)"
    done = shell(f'{sys.executable} -c "{code}" 2>&- <&-')
    assert (done.returncode, done.stdout) == (0, "True\n")


@pytest.mark.thorough
def test_characters_that_stdout_cannot_encode_are_replaced(here):
    done = shell("fl-lightning partition --config tiny.yaml", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert "?" in done.stdout


# --- Terminals ---


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "term", "before", "after"),
    [
        (Screen, "xterm-256color", "loading ...\r", CLEAR_LINE),
        (Screen, "dumb", "loading ...\n", ""),
        (io.StringIO, "xterm-256color", "", ""),
    ],
    ids=["terminal", "dumb", "file"],
)
def test_a_status_is_shown_at_once_and_erased(stream, term, before, after, monkeypatch):
    monkeypatch.setattr("sys.stderr", stream())
    monkeypatch.setenv("TERM", term)
    with show_status("loading ..."):
        assert sys.stderr.getvalue() == before
    assert sys.stderr.getvalue() == before + after


def test_a_status_needs_no_stderr(monkeypatch):
    for stderr in (None, Screen()):
        monkeypatch.setattr("sys.stderr", stderr)
        if stderr:
            stderr.close()
        with contextlib.suppress(ValueError), show_status("loading ..."):
            pass


def test_messages_are_broken_between_words_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    path = "runs/" + "long-" * 12
    message = f"{path}: a run of somebody else. Resume it with: fl-lightning fit --resume x"
    for stream in (Screen, io.StringIO):
        monkeypatch.setattr("sys.stderr", stream())
        print_to_stderr(message)
        lines = sys.stderr.getvalue().splitlines()
        if stream is Screen:
            assert " ".join(lines) == f"fl-lightning: {message}"
            assert [line for line in lines if len(line) > 40] == [f"{path}:"]
        else:
            assert lines == [f"fl-lightning: {message}"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda n: Interrupted(n, "stopped by a signal after round 3 of 5"), "stopped by a signal after round 3 of 5"),
        (Stopped, "stopped by {}"),
    ],
    ids=["run", "other"],
)
def test_a_signal_is_no_error(number, error, message, monkeypatch):
    def interrupted(*args):
        raise error(number)

    monkeypatch.setattr("fl_lightning.cli.commands.list.main", interrupted)
    code, out, err = run("list")
    assert (code, out) == (128 + number, "")
    assert err == f"fl-lightning: {message.format(number.name)}\n"


# --- Environment variables ---


@pytest.mark.thorough
def test_invalid_environment_variables_are_ignored(here):
    garbage = dict.fromkeys(("MPLBACKEND", "COLUMNS", "LINES", "TERM", "NO_COLOR", "FORCE_COLOR"), "garbage")
    done = shell("unset HOME; fl-lightning partition --config tiny.yaml --out out", **garbage)
    assert (done.returncode, done.stderr) == (0, "")
    assert (here / "out/partition.png").is_file()


@pytest.mark.thorough
def test_a_variable_that_torch_refuses_gives_one_line(here):
    done = shell("fl-lightning fit --config tiny.yaml", TORCH_LOGS="garbage")
    assert done.returncode == 1
    assert is_one_line(done.stderr)
    assert "Invalid log settings: garbage" in done.stderr
    assert len(done.stderr) <= 400


# --- Signals ---


def killed(number, after, *words, library=""):
    """Send a command a signal some seconds after it starts, or loads a library. Return its exit code and output."""
    reset = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background processes of a shell ignore it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *words], text=True, preexec_fn=reset, **pipes)
    while library not in Path(f"/proc/{process.pid}/maps").read_text() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(after)
    process.send_signal(number)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", [0, 0.5, 1.2])
def test_a_signal_while_torch_is_imported_ends_the_command_in_at_most_a_line(number, after, here):
    words = ["fit", "--config", "tiny.yaml", "--rounds", "500", "--run_dir", "run"]
    code, _, err = killed(number, after, *words, library="libtorch")
    assert code in (-number, 128 + number)
    assert err.count("\n") <= 1
    assert "Traceback" not in err
    assert "error" not in err


def test_ctrl_c_before_a_command_begins_gives_a_line():
    code = "import signal, fl_lightning.core.interrupt as one; one.end_on_interrupt(); signal.raise_signal(2); print(1)"
    reset = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=reset)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fl-lightning: stopped by SIGINT\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["fit", "partition"])
def test_a_signal_at_any_time_gives_at_most_one_line(command, number, here):
    after, over = 0.1, False
    while not over:
        words = ["--rounds", "6", "--run_dir", f"run{after:.2f}"] if command == "fit" else ["--out", "out"]
        code, _, err = killed(number, after, command, "--config", "tiny.yaml", *words)
        over = code == 0
        assert over or code in (-number, 128 + number), err
        assert err.count("\n") <= 1, err
        assert "Traceback" not in err
        after += 0.1


def test_sigint_that_is_ignored_by_the_parent_stays_ignored(here):
    line = f"trap '' INT; {' '.join(COMMAND)} list configs & sleep 0.2; kill -INT $!; wait $!"
    done = shell(line)
    assert done.returncode == 0
    assert "digits_fedskc.yaml" in done.stdout


# --- Paths ---

PATHS = {"lines": "a\nb", "escapes": "a\x1b[2Jb", "long": "x" * 300, "deep": "x/" * 3000}


@pytest.mark.parametrize(
    "words",
    [
        ["fit", "--config", "{}"],
        ["fit", "--resume", "{}"],
        ["test", "{}"],
        ["watch", "{}"],
        ["partition", "--config", "{}"],
        ["compare", "{}"],
        ["plot", "{}"],
        ["report", "{}"],
        ["sweep", "{}"],
        ["reproduce", "{}"],
        ["list", "{}"],
        ["{}"],
    ],
)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_path_with_any_characters_gives_one_line(words, path, here):
    code, _, err = run(*(word.format(path) for word in words))
    assert code == 2
    assert is_one_line(err)
    assert len(err) <= 400
    assert "\x1b" not in err
