"""Run folders with other files, links and special files."""

import os
import shutil
from pathlib import Path

import pytest
from commands import contents, run, tiny
from refusals import check_refused_command, time_limit  # noqa: F401

pytestmark = pytest.mark.filterwarnings("always")  # a command's warnings are not errors

FIT = ["fit", "--config", "tiny.yaml", "--run_dir", "run"]
RESUME = ["fit", "--resume", "run", "--rounds", "5"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Return the folder of a run that writes every kind of file."""
    folder = tmp_path_factory.mktemp("done") / "run"
    tiny(folder, "--algorithm=FedSiamDA", '--model.head={"projection": 8, "prediction": 8}')
    return folder


# --- Files of the user ---


OTHER_FILES = [
    "config.yaml",
    "checkpoints/round-000007/state.pt",
    "checkpoints/epoch-3.ckpt",
    "final/model.pt",
    "metrics.csv",
    "clients/client-000001-round-000001.safetensors",
    "figures/plan.png",
    "log.txt",
]


@pytest.mark.fast_cases(3)
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


@pytest.mark.parametrize("folder", ["~/run", "~/runs/run", "$HOME/run", "${SCRATCH_1}/run"])
def test_a_folder_that_the_shell_has_not_replaced_is_refused(folder, here):
    first = Path(folder).parts[0]
    command = ["fit", "--config", "tiny.yaml", "--run_dir", folder]
    check_refused_command(command, [f"{folder}: {first} is not replaced"])
    Path(first).mkdir()
    assert run(*command).code == 0


def test_a_broken_link_is_no_run_folder(here):
    Path("run").symlink_to("nowhere")
    check_refused_command(FIT, ["run cannot be written to: it is a file or a broken link"])


@pytest.mark.parametrize("form", ["run/../run", "{}"])
def test_config_in_the_run_folder_is_not_replaced(form, here):
    Path("run").mkdir()
    Path("tiny.yaml").rename("run/config.yaml")
    before = contents(here)
    outcome = run("fit", "--config", "run/config.yaml", "--run_dir", form.format(here / "run"))
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
    assert "config.yaml" in outcome.err
    assert {name: content for name, content in contents(here).items() if name in before} == before


@pytest.mark.thorough
@pytest.mark.parametrize("missing", ["metrics.csv", "checkpoints", "config.yaml"])
def test_incomplete_run_is_not_overwritten(missing, here, done):
    shutil.copytree(done, "run")
    Path("run", missing).rename("elsewhere")
    for words in (FIT, RESUME):
        check_refused_command(words, [])


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


def put_link(place, to):
    """Put a link in a run folder; an existing file is moved to its target."""
    link = Path("run", place)
    link.parent.mkdir(parents=True, exist_ok=True)
    if link.exists():
        to.rmdir() if to.is_dir() else to.unlink()
        link.rename(to)
    link.symlink_to(to.absolute())


def read_tree(folder):
    """Return the content of a folder without following links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        found[str(path)] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
    return found


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("place", [*FILES, *FOLDERS])
@pytest.mark.parametrize("begun", [False, True], ids=["fit", "resume"])
def test_nothing_is_written_through_links(begun, place, here, done):
    victim = here / "victims" / "victim"
    victim.parent.mkdir()
    victim.mkdir() if place in FOLDERS else victim.write_text("mine")
    shutil.copytree(done, "run") if begun else Path("run").mkdir()
    put_link(place, victim)
    before = read_tree(victim.parent)
    for words in (["test", "run"], RESUME) if begun else (FIT,):
        outcome = run(*words)
        assert read_tree(victim.parent) == before
        errors = [line for line in outcome.err.splitlines() if not line.startswith("fl-lightning: warning: ")]
        assert (outcome.code, len(errors)) in ((0, 0), (2, 1)), outcome.err


@pytest.mark.parametrize("place", ["metrics.csv", "clients/client-000000-round-000002.safetensors"])
def test_folder_in_place_of_a_file_is_refused(place, here, done):
    shutil.copytree(done, "run")
    Path("run", place).unlink(missing_ok=True)
    Path("run", place).mkdir()
    check_refused_command(RESUME, [place])
