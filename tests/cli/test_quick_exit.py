import subprocess
import sys


def ended(source, before=""):
    """How a process ends whose command, `list`, runs this source."""
    script = f"""
import atexit, gc, os, sys
{before}
from fl_lightning.cli import main as cli
from fl_lightning.cli.commands import list as command

def main(*_):
{"".join(f"    {line}{chr(10)}" for line in source.splitlines())}
    return 0

command.main = main
sys.argv = ["fl-lightning", "list"]
cli.run()
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)


def test_what_was_imported_is_not_looked_through_for_garbage():
    earlier = "atexit.register(lambda: print(gc.get_freeze_count() > 10_000))"
    done = ended("pass", before=earlier)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_what_nobody_closed_is_written(tmp_path):
    """As Python's own end does: in text, in bytes, in a file for reading and writing."""
    source = f"""
class Log:
    def __init__(self, name, mode):
        self.file, self.self = open({str(tmp_path)!r} + "/" + name, mode), self
for name, mode, text in (("a", "w", "text"), ("b", "wb", b"bytes"), ("c", "w+b", b"both")):
    log = Log(name, mode)
    log.file.write(text)
sys.last = log
gc.freeze()
open({str(tmp_path)!r} + "/d", "w").close()
sys.closed, sys.read = log, open({str(tmp_path)!r} + "/d")
"""
    done = ended(source)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(tmp_path / name).read_text() for name in "abc"] == ["text", "bytes", "both"]


def test_what_is_registered_with_atexit_is_called_and_heard():
    done = ended("atexit.register(lambda: print('out')); atexit.register(lambda: print('error', file=sys.stderr))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "error\n")


def test_libraries_that_tell_of_their_own_end_are_not_heard():
    late = "atexit.register(lambda: os.write(2, b'leaked 4 instances'))"  # registered before, and so called after
    assert ended("pass", before=late).stderr == ""


def test_the_exit_code_is_the_command_s():
    assert ended("return 3").returncode == 3


def test_a_process_without_stderr_ends():
    done = ended("sys.stderr = sys.__stderr__ = None\nos.close(2)")
    assert (done.returncode, done.stdout) == (0, "")
