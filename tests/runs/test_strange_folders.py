"""Folders that hold somebody else's files, or lead elsewhere: nothing that is not the run's own is touched."""

import hashlib
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from commands import TINY, contents, run, tiny, untimed_rows
from killed_runs import left

pytestmark = pytest.mark.filterwarnings("always")  # what a command warns of is no error of it

FIT = ["fit", "--config", "tiny.yaml", "--run_dir", "run"]
RESUME = ["fit", "--resume", "run", "--rounds", "5"]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A run that keeps something of everything."""
    folder = tmp_path_factory.mktemp("done") / "run"
    tiny(folder, "--algorithm=FedSiamDA", '--model.head={"projection": 8, "prediction": 8}')
    return folder


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    """The same with the rounds that a resume goes on to."""
    folder = tmp_path_factory.mktemp("longer") / "run"
    tiny(folder, "--algorithm=FedSiamDA", '--model.head={"projection": 8, "prediction": 8}', "--rounds=5")
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


def own_config():
    Path("run/config.yaml").write_text("# mine, with what I think of it\n" + TINY)


def own_final():
    Path("run/final").mkdir()
    Path("run/final/model.pt").write_text("the best I ever had")
    Path("run/final/summary.json").write_text("{}")


def own_metrics():
    Path("run/metrics.csv").write_text("round,weight\n1,80\n")


def own_clients():
    Path("run/clients").mkdir()
    Path("run/clients/client-000001.txt").write_text("ACME")
    Path("run/clients/client-000001-round-000001.safetensors").write_text("ACME")


def own_checkpoints():
    Path("run/checkpoints/round-000007").mkdir(parents=True)
    Path("run/checkpoints/round-000007/state.pt").write_text("another program's")
    Path("run/checkpoints/epoch-3.ckpt").write_text("another program's")


def own_figures():
    Path("run/figures").mkdir()
    Path("run/figures/plan.png").write_text("a house")


def own_partition():
    Path("run/partition.csv").write_text("disk,size\nsda1,80\n")


def own_warnings():
    Path("run/warnings.txt").write_text("beware of the dog\n")


def own_log():
    Path("run/log.txt").write_text("dear diary\n")


OWN = [value for name, value in sorted(globals().items()) if name.startswith("own_")]


@pytest.mark.parametrize("put", OWN, ids=lambda put: put.__name__)
def test_a_run_among_somebodys_files_changes_none_of_them(put, here):
    Path("run").mkdir()
    Path("run/notes.txt").write_text("to do")
    Path("run/.hidden").write_text("secret")
    put()
    before = contents(here)
    outcome = run(*FIT)
    after = contents(here)
    assert {name: after.get(name) for name in before} == before
    if outcome.code:
        assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
        assert set(after) - set(before) <= {"run/.lock", "run/.owner"}
    else:
        assert (here / "run/final/summary.json").exists()


@pytest.mark.parametrize("form", ["run", "./run", "run/", "run/../run", "{}"])
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
    ".config.yaml.writing",
    ".metrics.csv.writing",
    ".partition.csv.writing",
    ".clients.csv.writing",
    "final/.model.pt.writing",
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


@pytest.mark.fast_cases(4)
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


@pytest.mark.parametrize(
    "place",
    ["metrics.csv", "clients.csv", "partition.csv", "warnings.txt", "clients/client-000000-round-000002.safetensors"],
)
def test_a_folder_in_a_files_place_is_refused_before_the_first_write(place, here, done):
    shutil.copytree(done, "run")
    Path("run", place).unlink(missing_ok=True)
    Path("run", place).mkdir()
    before = contents(here)
    outcome = run(*RESUME)
    assert (outcome.code, len(outcome.err.splitlines())) == (2, 1), outcome.err
    assert place in outcome.err
    assert contents(here) == before


# --- Manifests that somebody has made up ---


def forge(folder, change):
    """Change a checkpoint's manifest, and have its own checksum fit."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest.pop("checksum", None)
    change(manifest)
    manifest["checksum"] = "sha256:" + hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(manifest))


OUTSIDE = {
    "device": "/dev/zero",
    "absolute": "{}/secret",
    "above": "../secret",
    "above from within": "clients/../../secret",
    "pipe": "pipe",
    "pipe in clients": "clients/pipe",
    "folder": "clients",
    "link": "link",
    "nothing": "",
    "itself": ".",
    "null byte": "a\0b",
    "long": "x" * 5000,
}


@pytest.mark.thorough
@pytest.mark.fast_cases(10)
@pytest.mark.parametrize("key", ["outside", "files"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_manifest_that_leads_out_of_its_folder_or_nowhere_is_refused_at_once(name, key, here, done):
    shutil.copytree(done, "run")
    Path("secret").write_text("mine")
    checksum = "sha256:" + hashlib.sha256(b"mine").hexdigest()
    os.mkfifo("run/pipe")
    if name == "pipe in clients":
        os.mkfifo("run/clients/pipe")
    Path("run/link").symlink_to(Path("secret").absolute())
    named = OUTSIDE[name].format(here)
    shutil.rmtree("run/checkpoints/round-000002")
    for folder in Path("run/checkpoints").iterdir():
        forge(folder, lambda manifest: manifest[key].update({named: checksum}))
    outcome = run("test", "run")
    if key == "outside":
        assert outcome.code == 2, outcome.out
        assert len([line for line in outcome.err.splitlines() if "error" in line]) == 1
        assert ("clients/pipe is neither" if name == "pipe in clients" else "round-000003") in outcome.err
    assert outcome.code in (0, 2)
    assert Path("secret").read_text() == "mine"


NO_MANIFESTS = ["", "5", "null", "[]", "{}", '"seal"', "[" * 100_000, '{"round": 3}', "\0", '{"files": 5, "seal": 1}']


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("text", NO_MANIFESTS, ids=range(len(NO_MANIFESTS)))
def test_a_manifest_that_is_none_is_passed_over(text, here, done, longer):
    shutil.copytree(done, "run")
    Path("run/checkpoints/round-000003/manifest.json").write_text(text)
    outcome = run(*RESUME)
    assert outcome.code == 0, outcome.err
    assert "round-000003" in outcome.err
    assert left(Path("run")) == left(longer)
    assert untimed_rows(Path("run")) == untimed_rows(longer)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "place", ["config.yaml", "metrics.csv", "clients.csv", "warnings.txt", "checkpoints/round-000003/state.pt"]
)
@pytest.mark.parametrize("words", [RESUME, ["test", "run"]], ids=["resume", "test"])
def test_a_pipe_in_a_files_place_keeps_nobody_waiting(words, place, here, done):
    shutil.copytree(done, "run")
    Path("run", place).unlink(missing_ok=True)
    os.mkfifo(Path("run", place))
    outcome = run(*words)
    assert "it waits" not in outcome.err
    assert outcome.code in (0, 2), outcome.err
    if place in ("config.yaml", "metrics.csv") and words is RESUME:
        assert outcome.code == 2
