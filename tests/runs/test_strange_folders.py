"""Folders that hold somebody else's files, or lead elsewhere: nothing that is not the run's own is touched."""

import os
import shutil
import signal
from pathlib import Path

import pytest
from commands import TINY, contents, run, tiny

pytestmark = pytest.mark.filterwarnings("always")  # what a command warns of is no error of it

FIT = ["fit", "--config", "tiny.yaml", "--run_dir", "run"]
RESUME = ["fit", "--resume", "run", "--rounds", "5"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run that keeps something of everything."""
    folder = tmp_path_factory.mktemp("done") / "run"
    tiny(folder, "--algorithm=FedSiamDA", '--model.head={"projection": 8, "prediction": 8}')
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    return tmp_path


@pytest.fixture(autouse=True)
def _no_waiting():
    """A command that waits for a pipe would wait for ever."""

    def ring(number, frame):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


# --- Files of somebody's own ---


OTHER_FILES = [
    "config.yaml",
    "final/model.pt",
    "metrics.csv",
    "clients/client-000001-round-000001.safetensors",
    "checkpoints/round-000007/state.pt",
    "checkpoints/epoch-3.ckpt",
    "figures/plan.png",
    "log.txt",
]


@pytest.mark.parametrize("name", OTHER_FILES)
def test_a_new_run_changes_no_other_files_in_its_folder(name, here):
    Path("run", name).parent.mkdir(parents=True)
    for each in ("notes.txt", ".hidden", name):
        Path("run", each).write_text("mine")
    before = contents(here)
    outcome = run(*FIT)
    after = contents(here)
    assert {name: after.get(name) for name in before} == before
    if outcome.code:
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
        assert set(after) - set(before) <= {"run/.lock", "run/.owner"}
    else:
        assert (here / "run/final/summary.json").exists()


@pytest.mark.parametrize("form", ["run/../run", "{}"])
def test_the_config_that_a_run_is_started_from_is_not_replaced_by_its_own(form, here):
    Path("run").mkdir()
    Path("tiny.yaml").rename("run/config.yaml")
    before = contents(here)
    outcome = run("fit", "--config", "run/config.yaml", "--run_dir", form.format(here / "run"))
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
    assert "config.yaml" in outcome.err
    assert {name: content for name, content in contents(here).items() if name in before} == before


@pytest.mark.thorough
@pytest.mark.parametrize("missing", ["metrics.csv", "checkpoints", "config.yaml"])
def test_a_run_of_which_a_part_is_missing_is_not_begun_anew_over_the_rest(missing, here, done):
    shutil.copytree(done, "run")
    Path("run", missing).rename("elsewhere")
    before = contents(here)
    for words in (FIT, RESUME):
        outcome = run(*words)
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
        assert contents(here) == before


# --- Links ---

FILES = [
    "config.yaml",
    "metrics.csv",
    "clients.csv",
    "partition.csv",
    "warnings.txt",
    "final/model.pt",
    "final/summary.json",
    "checkpoints/round-000003/state.pt",
    "checkpoints/round-000003/manifest.json",
    "clients/client-000000-round-000003.safetensors",
    ".lock",
    ".owner",
]
FOLDERS = ["checkpoints", "clients", "final", "checkpoints/round-000003", "checkpoints/round-000004", "figures"]


def linked(place, to):
    """Have a link at a place in a run's folder, whatever is there moved to where it leads."""
    link = Path("run", place)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        to.rmdir() if to.is_dir() else to.unlink()
        link.rename(to)
    link.symlink_to(to.absolute())


def everywhere(folder):
    """All below a folder, less what lies behind its links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("place", [*FILES, *FOLDERS])
@pytest.mark.parametrize("begun", [False, True], ids=["fit", "resume"])
def test_nothing_is_written_where_a_link_leads(begun, place, here, done):
    victim = here / "victims" / "victim"
    victim.parent.mkdir()
    victim.mkdir() if place in FOLDERS else victim.write_text("mine")
    shutil.copytree(done, "run") if begun else Path("run").mkdir()
    linked(place, victim)
    before = everywhere(victim.parent)
    for words in (["test", "run"], RESUME) if begun else (FIT,):
        outcome = run(*words)
        assert everywhere(victim.parent) == before
        errors = [line for line in outcome.err.splitlines() if not line.startswith("fl-lightning: warning: ")]
        assert (outcome.code, len(errors)) in ((0, 0), (2, 1)), outcome.err


@pytest.mark.thorough
def test_a_folder_that_is_itself_a_link_is_a_run_like_any_other(here, done):
    """A quota on one disk and room on another: the usual reason for one."""
    Path("room").mkdir()
    Path("run").symlink_to(Path("room").absolute())
    assert run(*FIT).code == 0
    assert run(*RESUME).code == 0
    assert Path("run").is_symlink()
    assert Path("room/final/summary.json").exists()


@pytest.mark.parametrize("place", ["metrics.csv", "clients/client-000000-round-000002.safetensors"])
def test_a_folder_in_a_files_place_is_refused_before_the_first_write(place, here, done):
    shutil.copytree(done, "run")
    Path("run", place).unlink(missing_ok=True)
    Path("run", place).mkdir()
    before = contents(here)
    outcome = run(*RESUME)
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
    assert place in outcome.err
    assert contents(here) == before
