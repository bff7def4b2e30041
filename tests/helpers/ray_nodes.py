"""Ray nodes as users start them, with `ray start`, and the end of all their processes."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from running import free_port

BIN = str(Path(sys.executable).parent)


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a program: one thread, and no statistics for Ray's makers."""
    base = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{BIN}:{os.environ['PATH']}"}
    return os.environ | base | more


def descendants(pid: int) -> list[int]:
    """Return a process and all processes that it has started, and those that they have started."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = [pid]
    for one in found:
        found += children.get(one, [])
    return found


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a process and all its descendants with SIGKILL, as a machine that loses its power."""
    for pid in descendants(process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


@contextmanager
def short_folder() -> Iterator[str]:
    """Yield a temporary folder for Ray, whose sockets have paths of at most 107 characters."""
    with TemporaryDirectory(prefix="fl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder


def start(words: Sequence[str | Path], log: Path, variables: Mapping[str, str]) -> subprocess.Popen:
    """Start a program in the folder of its log file, to which it appends."""
    with log.open("a") as file:
        return subprocess.Popen(words, cwd=log.parent, env=variables, stdout=file, stderr=file)


def start_node(cwd: Path, *words: str, **variables: str) -> subprocess.Popen:
    """Start a Ray node. It ends with the returned process."""
    cwd.mkdir(exist_ok=True)
    return start(["ray", "start", "--block", *words], cwd / "log", environment(**variables))


def wait_for_port(port: int, seconds: float = 120) -> None:
    """Wait until something listens on a port of this machine."""
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        assert time.monotonic() < end, "nothing listens"
        time.sleep(0.2)


def wait_for(path: Path, process: subprocess.Popen, seconds: float = 300) -> None:
    """Wait until a file exists, while a process runs."""
    end = time.monotonic() + seconds
    while not path.exists():
        assert process.poll() is None, f"ended with exit code {process.returncode} before {path} was there"
        assert time.monotonic() < end, f"{path} is not there"
        time.sleep(0.05)


@contextmanager
def two_nodes(folder: Path, variables: Mapping[str, str]) -> Iterator[str]:
    """Start two Ray nodes with working folders of their own, and yield the address. Only the second has CPUs: two.

    Args:
        folder: Parent of the working folders.
        variables: Environment variables of the second node.
    """
    port, processes = free_port(), []
    with short_folder() as temporary:
        try:
            head = ("--head", "--num-cpus=0", f"--port={port}", "--include-dashboard=false", f"--temp-dir={temporary}")
            processes.append(start_node(folder / "head", *head, f"--ray-client-server-port={free_port()}"))
            wait_for_port(port)
            processes.append(start_node(folder / "other", "--num-cpus=2", f"--address=127.0.0.1:{port}", **variables))
            yield f"127.0.0.1:{port}"
        finally:
            for process in reversed(processes):
                kill_tree(process)
