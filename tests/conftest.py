"""Fixtures of all tests. Random numbers of a test depend on its name and on `FL_LIGHTNING_TEST_SEED` only."""

import ctypes
import functools
import gc
import os
import random
import sqlite3.dbapi2
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there: the workers would fight over the cores

import hypothesis
import numpy as np
import pytest
import torch
from commands import TINY
from lightning.fabric.utilities import registry

from fl_lightning.core.state_dicts import to_float64
from fl_lightning.data import FederatedData, Scenario, images
from fl_lightning.engines import ProcessesEngine, trainer

BASE_SEED = int(os.environ.get("FL_LIGHTNING_TEST_SEED", "0"))

hypothesis.settings.register_profile("quick", max_examples=25, deadline=None, database=None)
hypothesis.settings.load_profile("quick")


def seed_of(name: str) -> int:
    return zlib.crc32(f"{BASE_SEED} {name}".encode())


class TorchRandom:
    """Torch's random state in the interface of Hypothesis, so that it can repeat a failed example."""

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(BASE_SEED + number)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


TORCH_RANDOM = TorchRandom()  # Hypothesis itself holds no reference to it
hypothesis.register_random(TORCH_RANDOM)


def pytest_report_header() -> str:
    return f"FL_LIGHTNING_TEST_SEED={BASE_SEED}"


def pytest_itemcollected(item: pytest.Item) -> None:
    test = getattr(item, "obj", None)
    if hypothesis.is_hypothesis_test(test):
        hypothesis.seed(seed_of(item.nodeid.partition("[")[0]))(test)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of a test beyond its `fast_cases` as `thorough`."""
    seen: Counter[str] = Counter()
    for item in items:
        if mark := item.get_closest_marker("fast_cases"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > mark.args[0]:
                item.add_marker("thorough")


@pytest.fixture(autouse=True, scope="session")
def _quick_collections() -> Iterator[None]:
    """Freeze all imports: a run that searches them for garbage takes twice as long.

    A run itself freezes nothing, otherwise its cycles would stay until the process ends.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "gc", SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None))
        yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _release_memory() -> Iterator[None]:
    """Return free memory to the system after each file of tests, and freeze what the file has imported.

    glibc would keep a gigabyte in the end. Each fit would search all imports for garbage, 0.6 s late in the suite.
    """
    yield
    gc.collect()
    gc.freeze()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


@pytest.fixture(autouse=True, scope="session")
def _quick_files() -> Iterator[None]:
    """Cache the digits and skip `fsync`, a quarter of a tiny run. Programs that tests start still call `fsync`.

    SQLite calls it for each table of a sweep's database, 0.3 s a sweep.
    """

    def connect(*args: Any, **options: Any) -> sqlite3.Connection:
        connection = connect_durably(*args, **options)
        with suppress(sqlite3.Error):  # the file is no database
            connection.execute("PRAGMA synchronous = OFF")
        return connection

    connect_durably = sqlite3.dbapi2.connect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "read_digits", functools.cache(images.read_digits))
        patch.setattr(os, "fsync", lambda file: None)
        patch.setattr(sqlite3.dbapi2, "connect", connect)  # SQLAlchemy takes it from there
        yield


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessesEngine]:
    """An engine with two processes for all tests of a file, because they take seconds to start."""
    with pytest.MonkeyPatch.context() as patch:
        engine = ProcessesEngine(workers=2)
        patch.setattr(engine, "close", lambda: None)
        yield engine
    engine.close()


@pytest.fixture(autouse=True, scope="session")
def _quick_trainers() -> Iterator[None]:
    """Read the entry points of all installed packages once, not for each `Trainer`: 5 ms of 8."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "entry_points", functools.cache(registry.entry_points))
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a temporary folder among pytest's own, so that pytest removes the files of killed processes."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("tmp"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(autouse=True, scope="session")
def _own_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Create the key that signs runs in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("config")))
        yield


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    seed = seed_of(request.node.nodeid)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # `torch.manual_seed` stores its stack for each kind of GPU


@pytest.fixture(autouse=True)
def _forget_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Forget the modules that a test has imported from a temporary folder: another test may use their names."""
    before, folder = len(sys.modules), str(tmp_path_factory.getbasetemp())
    yield
    for name in list(sys.modules)[before:]:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(folder):
            del sys.modules[name]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder that contains only the tiny experiment, `tiny.yaml`."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one torch thread, as worker processes do: the number of threads affects rounding."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make networks, plain tensors and the samples of scenarios float64."""
    build = Scenario.build

    def build_double(self: Scenario, *args: Any) -> FederatedData:
        built = build(self, *args)
        tensors = {name: value for name, value in vars(built.data).items() if isinstance(value, torch.Tensor)}
        built.data = replace(built.data, **to_float64(tensors))
        return built

    monkeypatch.setattr(Scenario, "build", build_double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
