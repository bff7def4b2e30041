"""The folders beside the package (`callbacks/`, `configs/`, ...) belong to it, also for tools that run nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("callbacks", "configs", "papers", "sweeps")

NAMES = ["EarlyStopping", "FedAvg", "FederatedOrchestrator", "FedProx", "MLP", "Scenario", "WandbRoundLogger"]


@pytest.mark.thorough
def test_a_type_checker_knows_the_public_names(tmp_path: Path) -> None:
    """With the editable install of the README, from another folder. Other libraries would take half a minute."""
    pytest.importorskip("mypy")
    lines = [f"from fl_lightning import {', '.join(NAMES)}", *(f"reveal_type({name}.__init__)" for name in NAMES)]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    settings = ["[mypy]", "follow_imports = skip", "[mypy-fl_lightning.*]", "follow_imports = normal"]
    (tmp_path / "mypy.ini").write_text("\n".join(settings))
    words = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache"), "mine.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count('Revealed type is "def (self: fl_lightning.') == len(NAMES), done.stdout


@pytest.mark.thorough
def test_a_second_clone_has_its_own_folders(tmp_path: Path) -> None:
    for name in ("fl_lightning", *LINKED):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import fl_lightning.callbacks, fl_lightning.configs; print(*fl_lightning.callbacks.__path__)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "fl_lightning" / "callbacks"), done.stderr
    (tmp_path / "configs" / "mine_alone.yaml").write_text("# only here\nrounds: 1\n")
    words = [sys.executable, "-m", "fl_lightning", "list", "configs"]
    assert "mine_alone.yaml" in subprocess.run(words, env=environment, capture_output=True, text=True).stdout
