"""A run leaves nothing in the system's temporary folder, even if it is killed."""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from commands import TINY

from fl_lightning.core.temporary_folders import temporary_files

PLAIN = ["--logger", "null"]
WANDB = ["--logger", "WandbRoundLogger"]
DERIVED = ["--config", "digits_fedprox.yaml"]  # a config without a file of its own
PROCESSES = ["--engine", "processes", "--engine.workers", "2"]


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, as sockets need it."""
    return Path(tempfile.mkdtemp(dir=tmp_path_factory.getbasetemp(), prefix=""))


def fit(folder: Path, *words: str) -> subprocess.Popen:
    """Start `fit` with an empty temporary folder. The cache of torch.compile is elsewhere."""
    temporary = folder / "t"
    temporary.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    environment = os.environ | {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
    command = [sys.executable, "-m", "fl_lightning", "fit", "--config", "tiny.yaml", "--run_dir", "run", *words]
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL)


def remaining_files(folder: Path) -> list[str]:
    """Return the content of the temporary folder, up to a minute after the process has ended."""
    for _ in range(1200):
        if not (found := sorted(os.listdir(folder / "t"))):
            break
        time.sleep(0.05)
    return found


@pytest.mark.thorough
def test_a_run_that_ends_leaves_nothing(here):
    assert fit(here, *WANDB, *PROCESSES).wait(300) == 0
    assert remaining_files(here) == []


@pytest.mark.thorough
@pytest.mark.parametrize("words", [[*PLAIN, *PROCESSES], [*WANDB, *DERIVED]], ids=["processes", "wandb and derived"])
def test_a_killed_run_leaves_nothing(here, words):
    process = fit(here, "--rounds", "1000", *words)
    while not (here / "run" / "metrics.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert os.listdir(here / "t")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert remaining_files(here) == []


def test_the_usual_temporary_folder_is_restored(here, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    monkeypatch.delenv("TMPDIR", raising=False)
    with temporary_files(of_programs=True):
        inside = Path(tempfile.mkdtemp()).parent
        assert os.environ["TMPDIR"] == str(inside) != str(here)
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == (str(here), None)
    monkeypatch.setenv("TMPDIR", "mine")
    with pytest.raises(KeyError), temporary_files(of_programs=True):
        raise KeyError
    assert (tempfile.gettempdir(), os.environ["TMPDIR"]) == (str(here), "mine")


def first_use() -> Callable[..., AbstractContextManager[None]]:
    """Return `temporary_files` of a new copy of its module, which has no folder yet."""
    spec = importlib.util.find_spec(temporary_files.__module__)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.temporary_files


def test_a_long_path_falls_back_to_the_usual_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 60)))
    with first_use()():
        assert tempfile.gettempdir() == str(tmp_path / ("x" * 60))


def test_without_a_shell_the_usual_folder_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with first_use()(of_programs=True):
        assert tempfile.gettempdir() == str(tmp_path)
