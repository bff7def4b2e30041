"""The wheel works in a new environment."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return a new environment with the wheel. It finds the dependencies in the current environment by path."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "data.npz")
    at_top = shutil.ignore_patterns("runs", "build", "dist")

    def left_out(place, names):
        return ignored(place, names) | (at_top(place, names) if Path(place) == ROOT else set())

    shutil.copytree(ROOT, folder / "source", ignore=left_out)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = ["wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(folder / "source")]
    subprocess.run([*pip, *build], check=True)
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "--python", str(python), "install", "--no-deps", str(wheel)], check=True)
    query = [str(python), "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
    own = Path(subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip())
    # Python searches the path in a .pth file after `own`, and ignores .pth files (editable installs) there.
    (own / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "env", own


def run(environment, *command, cwd):
    env, _ = environment
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [env / "bin" / command[0], *command[1:]], cwd=cwd, env=clean, capture_output=True, text=True, check=True
    ).stdout


def test_the_wheel_has_the_top_level_folders(environment, tmp_path):
    _, own = environment
    code = "import fl_lightning as f, fl_lightning.{0} as m; print(f.__file__); print(m.__file__)"
    for name in ("callbacks", "configs", "papers", "sweeps"):
        for path in run(environment, "python", "-c", code.format(name), cwd=tmp_path).split():
            assert Path(path).is_relative_to(own)
        here, there = ROOT / name, own / "fl_lightning" / name
        shipped, written = ({path.relative_to(at) for path in at.rglob("*.yaml")} for at in (there, here))
        assert shipped == written
    templates = ROOT / "fl_lightning" / "cli" / "templates"
    for path in (path for path in templates.rglob("*.*") if path.suffix != ".pyc"):
        assert (own / path.relative_to(ROOT)).exists()
    for name in ("page.html", "page.css", "page.js"):
        assert (own / "fl_lightning" / "analysis" / "html_report" / name).exists()
    assert (own / "fl_lightning" / "py.typed").exists()
    assert "FedSKC" in run(environment, "fl-lightning", "list", "algorithms", cwd=tmp_path)


def test_an_experiment_runs_from_the_wheel(environment, tmp_path):
    reduced = ["--rounds", "1", "--trainer.max_epochs", "1", "--logger", "null", "--run_dir", "run"]
    table = run(environment, "fl-lightning", "fit", "--config", "digits_fedskc.yaml", *reduced, cwd=tmp_path)
    assert "global acc" in table
    assert (tmp_path / "run" / "final" / "model.pt").exists()
