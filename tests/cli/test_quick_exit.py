"""The console script ends without a final garbage collection, but closes everything else."""

import subprocess
import sys


def ended(source, before=""):
    """Run the console script with a command that executes this source. Return the ended process."""
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


def test_imports_are_not_searched_for_garbage():
    earlier = "atexit.register(lambda: print(gc.get_freeze_count() > 10_000))"
    done = ended("pass", before=earlier)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_files_that_were_not_closed_are_written(tmp_path):
    """Text files, binary files, and files for reading and writing."""
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


def test_functions_registered_with_atexit_are_called_and_can_print():
    done = ended("atexit.register(lambda: print('out')); atexit.register(lambda: print('error', file=sys.stderr))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "out\n", "error\n")


def test_libraries_cannot_print_after_the_end():
    late = "atexit.register(lambda: os.write(2, b'leaked 4 instances'))"  # registered before, and so called after
    assert ended("pass", before=late).stderr == ""


def test_the_exit_code_is_that_of_the_command():
    assert ended("return 3").returncode == 3


def test_a_process_without_stderr_ends():
    done = ended("sys.stderr = sys.__stderr__ = None\nos.close(2)")
    assert (done.returncode, done.stdout) == (0, "")
