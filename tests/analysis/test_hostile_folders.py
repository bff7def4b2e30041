"""Changed folders of many runs: nothing outside is read or written, nothing hangs, no code runs."""

import os
import shutil
import signal
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from commands import TINY, run, tiny
from matplotlib.figure import Figure

from fl_lightning.analysis.study.executor import JobResult
from fl_lightning.cli import jobs, sweep_metric
from fl_lightning.cli.commands import benchmark as benchmark_command
from fl_lightning.cli.commands import sweep as sweep_command

pytestmark = pytest.mark.filterwarnings("always")

VALUES = [0.5, 1e30]  # a finished run, and one that has failed
FILES = {
    "tiny.yaml": TINY.replace("rounds: 3", "rounds: 1"),
    "sweep.yaml": yaml.safe_dump(
        {
            "program": "fl-lightning",
            "command": ["${program}", "fit", "--config", "tiny.yaml", "${args}"],
            "method": "grid",
            "metric": {"name": "global/acc", "goal": "maximize"},
            "parameters": {"optimizer.lr": {"values": VALUES}},
        }
    ),
    "table.yaml": yaml.safe_dump(
        {
            "paper": "tiny",
            "title": "Tiny, Table 1",
            "metric": "global/acc_last",
            "unit": "percent",
            "seeds": [0],
            "columns": {"tiny": {"config": "tiny.yaml"}},
            "rows": {f"lr {value}": {"optimizer.lr": value} for value in VALUES},
            "paper_values": {f"lr {value}": [50] for value in VALUES},
        }
    ),
    "benchmark.yaml": yaml.safe_dump(
        {
            "config": "tiny.yaml",
            "tables": {"one": {"metric": "global/acc", "methods": ["FedAvg"]}},
            "search": {"optimizer.lr": {"values": [0.5]}},
            "tuning": {"trials": 1, "seeds": [9]},
            "seeds": [0],
        }
    ),
}
COMMANDS = {
    "sweep": ["sweep", "sweep.yaml", "--out", "many", "--threads", "1"],
    "multirun": ["fit", "--config", "tiny.yaml", "--multirun", "optimizer.lr=0.5,1e30", "--out", "many"],
    "reproduce": ["reproduce", "table.yaml", "--out", "many", "--threads", "1"],
    "benchmark": ["benchmark", "benchmark.yaml", "--out", "many", "--threads", "1"],
    "deploy": ["fit", "--config", "many/experiment.yaml", "--fast"],
}
READERS = (["compare", "many"], ["watch", "many", "--once"])

RUN = (
    *("", "config.yaml", "metrics.csv", "clients.csv", "partition.csv", "warnings.txt", "log.txt", "failed.txt"),
    *("final", "final/summary.json", "final/model.pt", "figures", "clients", ".lock", ".owner", ".signature"),
    *("checkpoints", "checkpoints/round-000001", "checkpoints/round-000001/manifest.json"),
    "checkpoints/round-000001/state.pt",
)
"""The files and folders of a run; the first is the folder of the run itself."""
SWEEP = (
    *("study.yaml", "trials.json", "study.db", "study.db-journal", "trials.csv", "best.yaml", ".lock", ".owner"),
    "trials",
)


USED = ("", "config.yaml", "metrics.csv", "log.txt", "failed.txt", "final", "final/summary.json", ".lock")
"""Those that all commands read or write."""


def with_run(run: str, *others: str, names: Sequence[str] = USED) -> list[str]:
    """Return the places to attack in a folder of many runs: those of one run, and others."""
    return [*others, ".lock", ".owner", *(f"{run}/{name}".rstrip("/") for name in names)]


PLACES = {
    "sweep": with_run("trials/0000/run-*", *SWEEP, "trials/0000", "trials/0001/run-*/failed.txt"),
    "multirun": with_run("lr-0.5/seed_*", "study.yaml", "lr-0.5", "lr-1e30/seed_*/failed.txt", names=RUN),
    "reproduce": with_run("tiny/lr-0.5/seed_*", "study.yaml", "tiny", "tiny/lr-0.5", "tiny/lr-1e+30/seed_*/failed.txt"),
    "benchmark": [
        *("study.yaml", "results.md", "results.csv", "report.html", "ranks-one.pdf", "ranks-one.svg", "untuned"),
        *("tuning", "tuning/one", "tuning/one/FedAvg", "tuning/one/FedAvg/trials.json"),  # more of them: "sweep"
        *with_run("runs/one/FedAvg/seed_0-*", "runs", "runs/one", "runs/one/FedAvg"),
    ],
    "deploy": ["", "experiment.yaml", "pyproject.toml", "server_app.py", "client_app.py", "certificates.sh"],
}
ESCAPES = "\x1b]0;title\x07\x1b[2J\x9b31m\r\u202e\u2028"

# --- The attacks: each changes one file or folder of the folder `many` ---


def link(path: Path) -> None:
    victim = Path("victims/victim")
    if path.exists():
        path.rename(victim)
    else:
        victim.write_text("mine")
    path.symlink_to(victim.absolute())


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def pipe(path: Path) -> None:
    remove(path)
    os.mkfifo(path)


def other_kind(path: Path) -> None:
    """Put a folder in place of a file, and a file in place of a folder."""
    is_folder = path.is_dir()
    remove(path)
    path.write_text("text") if is_folder else path.mkdir()


def huge(path: Path) -> None:
    if not path.is_dir():
        path.touch()
        os.truncate(path, 2**40)


def escapes(path: Path) -> None:
    """Put control characters at the end of each line. A name with them is put beside a folder."""
    if path.is_dir():
        (path / f"a{ESCAPES}b").mkdir()
        (path / f"a{ESCAPES}b" / "metrics.csv").write_text("round\n1\n")
    elif path.suffix not in (".db", ".pt", ".pdf"):
        text = path.read_text() if path.exists() else "text\n"
        path.write_text(text.replace("\n", f"{ESCAPES}\n"))


def changed_byte(path: Path) -> None:
    if path.is_file() and path.stat().st_size:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0x10
        path.write_bytes(content)


ATTACKS = (link, pipe, other_kind, huge, escapes, changed_byte, remove)


RESULTS = {}


def in_this_process(function, command_lines, workers=1):
    """Call a function with command lines in this process, and each command line only once."""
    for words in command_lines:
        if (key := (function, *words)) not in RESULTS:
            RESULTS[key] = function(words, dict(os.environ))
        yield RESULTS[key]


def write_empty_image(figure, path, **options):
    """Write a file where a figure writes its own, which takes 0.2 s to draw."""
    Path(path).write_text("<svg></svg>")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Resolve configs in this process, and draw nothing."""
    monkeypatch.setattr(Figure, "savefig", write_empty_image)
    for module in (sweep_command, benchmark_command, jobs, sweep_metric):
        monkeypatch.setattr(module, "in_job_processes", in_this_process)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny(folder, text=FILES["tiny.yaml"])
    return folder


@pytest.fixture(scope="module")
def folders(finished, tmp_path_factory):
    """Return a folder with a working folder for each command, in which the command has written the folder `many`."""

    def run_jobs(jobs, *args, **options):
        for job in jobs:
            if "--optimizer.lr=1e+30" in job.words or "--optimizer.lr=1e30" in job.words:
                job.folder.mkdir(parents=True)
                (job.folder / "failed.txt").write_text("diverged\n")
                yield JobResult(job, 1, "diverged")
            else:
                shutil.copytree(finished, job.folder)
                (job.folder / "log.txt").write_text("round 1/1\n")
                yield JobResult(job, 0, "")

    root = tmp_path_factory.mktemp("folders")
    with pytest.MonkeyPatch.context() as patch:
        for module in (sweep_command, benchmark_command, jobs, sweep_metric):
            patch.setattr(module, "in_job_processes", in_this_process)
        for module in (sweep_command, benchmark_command, jobs):
            patch.setattr(module, "run_jobs", run_jobs)
        for kind, words in COMMANDS.items():
            (root / kind / "victims").mkdir(parents=True)
            patch.chdir(root / kind)
            for name, text in FILES.items():
                Path(name).write_text(text)
            words = ["deploy", "--config", "tiny.yaml", "--out", "many"] if kind == "deploy" else words
            outcome = run(*words)
            assert outcome.code in (0, 1), outcome.err
    return root


@pytest.fixture
def here(folders, tmp_path, monkeypatch):
    """Return a function that changes to a copy of a command's working folder."""

    def enter(kind: str) -> Path:
        shutil.rmtree(tmp_path / "here", ignore_errors=True)
        shutil.copytree(folders / kind, tmp_path / "here", symlinks=True)
        monkeypatch.chdir(tmp_path / "here")
        return tmp_path / "here"

    return enter


def read_tree(folder: Path) -> dict[str, object]:
    """Return the content of what is in a folder, without that of the folder `many`."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        if path.relative_to(folder).parts[0] != "many":
            is_small = path.is_file() and path.stat().st_size < 2**30
            found[str(path)] = path.read_bytes() if is_small else path.is_dir()
    return found


def check_outcome(outcome) -> None:
    errors = [line for line in outcome.err.splitlines() if line.startswith("fl-lightning: error: ")]
    assert outcome.code in (0, 1, 2), outcome
    assert len(errors) <= 1, outcome.err
    assert "--debug shows where" not in outcome.err
    printed = (outcome.out + outcome.err).replace("\n", "").replace("\t", "")
    assert printed.isprintable(), printed


def attack_and_check(folder: Path, attack, place: str, *commands) -> None:
    """Attack a place in the folder `many`, and check that commands neither hang nor change anything outside."""

    def ring(number, frame):
        raise AssertionError("it hangs")

    parent, _, name = place.rpartition("/")
    (base,) = Path("many").glob(parent) if parent else [Path("many")]
    (path,) = base.glob(name) if "*" in name else [base / name]
    attack(path)
    before = read_tree(folder)
    usual = signal.signal(signal.SIGALRM, ring)
    try:
        for words in commands:
            signal.alarm(120)  # some attacks make the command train again
            check_outcome(run(*words))
            assert read_tree(folder) == before
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, usual)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_changed_folder_is_harmless(kind, attack, here):
    failures = {}
    for place in PLACES[kind]:
        try:
            attack_and_check(here(kind), attack, place, COMMANDS[kind], *(READERS if kind == "multirun" else ()))
        except AssertionError as error:
            failures[place] = str(error)[:1000]
    assert failures == {}


SAMPLE = [
    ("sweep", link, "trials.json"),
    ("sweep", escapes, "trials/0001/run-*/failed.txt"),
    ("multirun", pipe, "lr-1e30/seed_*/failed.txt"),
    ("benchmark", link, "runs/one"),
    ("reproduce", huge, "tiny/lr-0.5/seed_*/final/summary.json"),
    ("deploy", pipe, "experiment.yaml"),
]


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(("kind", "attack", "place"), SAMPLE, ids=lambda each: getattr(each, "__name__", each))
def test_a_changed_file_is_harmless(kind, attack, place, here):
    attack_and_check(here(kind), attack, place, COMMANDS[kind])


# --- The files of a sweep ---


def test_the_journal_of_a_database_is_not_used(here):
    """SQLite would delete the file that a journal names."""
    folder = here("sweep")
    victim = str(folder / "tiny.yaml").encode()
    magic, pages = bytes.fromhex("d9d505f920a163d7"), Path("many/study.db").stat().st_size // 4096
    header = magic + struct.pack(">5I", 0, 0, pages, 512, 4096)
    end = struct.pack(">I", 1 + 0x40000000 // 4096) + victim + struct.pack(">2I", len(victim), sum(victim)) + magic
    Path("many/study.db-journal").write_bytes(header.ljust(512, b"\0") + end)
    before = read_tree(folder)
    assert run(*COMMANDS["sweep"]).code == 0
    assert read_tree(folder) == before


def test_the_best_config_is_that_of_the_command_line(here):
    """The config in the folder of a trial could be anyone's, but `--config` trusts its file."""
    here("sweep")
    config = next(Path("many/trials").glob("0000/*/config.yaml"))
    config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"model": "os.system", "rounds": 77}))
    outcome = run(*COMMANDS["sweep"])
    assert outcome.code == 0, outcome.err
    best = yaml.safe_load(Path("many/best.yaml").read_text())
    assert (best["model"]["class_path"], best["rounds"]) == ("fl_lightning.models.MLP", 1)
    assert best["optimizer"]["init_args"]["lr"] == 0.5
    assert run("fit", "--config", "many/best.yaml", "--fast").code == 0
