"""Fuzz resume: kill runs, damage one of their files, and check what a resume does.

    python tests/helpers/fuzzing.py --cases 400 --truncations 10 --seed 0 --jobs 2

Small runs of several methods are killed in their fourth round of five. Each case damages one file of a run or its data,
in a new copy: it flips a random bit, truncates, empties, removes or lengthens the file, or replaces it by a folder or a
link. Then `fl-lightning fit --resume` continues the run. The verdict is one of:

- refused: exit code 2 and one line that names the file or the difference. The folder does not change, so the run can
  be resumed when the file is restored;
- warned: a warning names the file, and the run ends like one that was not killed;
- identical: the run ends like one that was not killed, without a warning, and the damaged file is as it should be;
- WRONG: anything else, such as other results, a traceback, another exit code, or more than a minute.

Prints a table of the verdicts by file, then each WRONG case. The exit code is 1 if there is one. W&B's own files below
`wandb/` are left out, except `run.json`, which we write.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import yaml
from commands import Outcome, run, untimed_rows
from methods import elements

from fl_lightning.algorithms.server import Server
from fl_lightning.core.config import flatten
from fl_lightning.core.errors import CheckpointError
from fl_lightning.engines import trainer
from fl_lightning.runs.checkpoint import CheckpointFolder
from fl_lightning.runs.record import Record

PATIENCE = 60.0  # seconds a case
KILLED_IN = 4
VERDICTS = ("refused", "warned", "identical", "WRONG")
LOCKS = (".lock", ".owner")  # a refused command may leave these files

CONFIG = """# A method on three classes of eight numbers, in a second.
rounds: 5
batch_size: 16
scenario:
  dataset: {class_path: Arrays, init_args: {path: data.npz}}
  partition: {class_path: Dirichlet, init_args: {alpha: 0.5, min_samples: 10}}
  clients: 4
model: {class_path: MLP, init_args: {hidden: [8]}}
algorithm: FedAvg
optimizer: {class_path: SGD, init_args: {lr: 0.1, momentum: 0.9}}
trainer: {max_epochs: 1, accelerator: cpu}
callbacks: [{class_path: Checkpointing, init_args: {every: 1}}]
logger: null
"""
SIAMESE = '{"projection": 8, "prediction": 8}'
RUNS = {
    "little with clients": ["--algorithm=FedSKC", "--callbacks=[{class_path: Checkpointing, init_args: {every: 2}}]"],
    "memories, on disk": ["--algorithm=FedSiamDA", f"--model.head={SIAMESE}", "--client_store=disk"],
    "peers": ["--algorithm=UAPDFL", "--algorithm.n_com=2", "--clients_per_round=3"],
    "figures": [
        "--algorithm=CwFedAvg",
        "--callbacks+={class_path: AggregationWeights, init_args: {every: 2}}",
        "--optimizer_state=kept",
    ],
    "W&B": ["--logger=fl_lightning.loggers.wandb.WandbRoundLogger", "--optimizer_state=kept"],
}


class Case(NamedTuple):
    """A file of a run, by its path below the folder of run and data, and how it is damaged."""

    run: str
    file: str
    harm: str
    place: int = 0

    def __str__(self) -> str:
        return f"{self.run}: {self.file}: {self.harm} {self.place}"


class Verdict(NamedTuple):
    """The verdict on a case, and the message of the command or the reason."""

    kind: str
    why: str


# --- Harm ---


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def remove(path: Path, _: int) -> None:
    path.unlink()


def lengthen(path: Path, size: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content + content[-size:])


def make_folder(path: Path, _: int) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path, _: int) -> None:
    path.rename(path.parent / "elsewhere") if path.name == "data.npz" else path.rename("elsewhere")
    path.symlink_to(Path("elsewhere").absolute())


HARMS: dict[str, Callable[[Path, int], None]] = {
    f.__name__: f for f in (flip, truncate, remove, lengthen, make_folder, link)
}


def files_of(folder: Path) -> list[str]:
    """Return the files that a resume reads, with the data, without W&B's own files."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in LOCKS]
    found = [str(path.relative_to(folder)) for path in paths]
    return [file for file in found if not file.startswith("run/wandb/") or file == "run/wandb/run.json"]


def flips(root: Path, runs: Iterable[str], count: int, seed: int) -> list[Case]:
    """Return cases that flip random bits: a random file, then a random bit of it."""
    chance = random.Random(seed)
    files = [(name, file) for name in runs for file in files_of(root / name / "half")]
    sized = [(name, file, size) for name, file in files if (size := (root / name / "half" / file).stat().st_size)]
    drawn = (chance.choice(sized) for _ in range(count))
    return [Case(name, file, "flip", chance.randrange(8 * size)) for name, file, size in drawn]


def whole_files(root: Path, runs: Iterable[str], truncations: int, others: bool = True) -> list[Case]:
    """Return cases that truncate each file at several places, and with `others` all other kinds of damage."""
    cases = []
    for name in runs:
        for file in files_of(root / name / "half"):
            size = (root / name / "half" / file).stat().st_size
            sizes = {size * k // truncations for k in range(1, truncations)} | {size - 1}
            cases += [Case(name, file, "truncate", cut) for cut in sorted(sizes) if 0 < cut < size]
            if others:
                harms = {"truncate": 0, "remove": 0, "make_folder": 0, "link": 0, "lengthen": 512}
                cases += [Case(name, file, harm, place) for harm, place in harms.items()]
    return cases


# --- Runs ---


def prepare(root: Path, runs: Iterable[str], jobs: int) -> None:
    """Run each experiment twice with its data, below its name: `half` is killed, `whole` is not."""
    rng = np.random.default_rng(0)
    y = np.arange(300) % 3
    x = (rng.normal(size=(300, 8)) + 2 * y[:, None]).astype(np.float32)
    for name in runs:
        for part in ("half", "whole"):
            (folder := root / name / part).mkdir(parents=True)
            np.savez(folder / "data.npz", x_train=x[:240], y_train=y[:240], x_test=x[240:], y_test=y[240:])
    parts = [(name, root / name / part, part == "half") for name in runs for part in ("half", "whole")]
    codes = each_apart(begin, parts, jobs)
    assert codes == [-signal.SIGKILL, 0] * (len(parts) // 2), codes


def begin(name: str, folder: Path, killed: bool) -> int:
    """Run an experiment, or kill it between a row of metrics and its checkpoint."""
    os.chdir(folder)
    os.environ["WANDB_RUN_ID"] = "chosen"
    config = folder.parent / "tiny.yaml"  # both runs are named after it
    config.write_text(CONFIG)
    outcome = fit("--config", config, "--run_dir", "run", *RUNS[name], killed=killed)
    assert outcome.code == 0, outcome.err
    del os.environ["WANDB_RUN_ID"]
    return outcome.code


def fit(*words: str | Path, killed: bool = False) -> Outcome:
    """Run `fit`, with a warning in the second round."""
    begin_round, log = Server.begin_round, Record.log

    def warned(server: Server, round: int) -> None:
        if round == 2:
            warnings.warn("the second round begins", stacklevel=2)
        begin_round(server, round)

    def logged(record: Record, metrics: Any) -> None:
        log(record, metrics)
        if killed and metrics["round"] == KILLED_IN:
            record.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(Server, "begin_round", warned), mock.patch.object(Record, "log", logged):
        return run("fit", *words)


def each_apart(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], jobs: int) -> list[Any]:
    """Call a function in other processes and return the results.

    A process that does not survive a call is replaced. The result of the call is then the exit code of the process, or
    None if it took too long.
    """
    context: Any = get_context("forkserver")
    context.set_forkserver_preload(["fl_lightning.cli.commands.fit", __name__])
    results: list[Any] = [None] * len(arguments)

    def one_after_another(first: int) -> None:
        process = None
        for i in range(first, len(arguments), jobs):
            if process is None:
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs, work), daemon=True)
                process.start()
                theirs.close()
            ours.send(arguments[i])
            late = not ours.poll(PATIENCE)
            try:
                results[i] = None if late else ours.recv()
            except EOFError:
                process.join()
                results[i] = process.exitcode
            if late or not process.is_alive():
                process.kill()
                process = None
        if process:
            ours.close()
            process.join()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one_after_another, range(jobs)))
    return results


def _serve(connection: Connection, work: Callable[..., Any]) -> None:
    gc.freeze()
    trainer.gc = SimpleNamespace(collect=gc.collect, freeze=gc.freeze, unfreeze=lambda: None)  # type: ignore[attr-defined]  # as in conftest.py
    with suppress(EOFError):
        while True:
            connection.send(work(*connection.recv()))
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # its own process would outlive this one


# --- Verdicts ---


def fuzz(root: Path, cases: Sequence[Case], jobs: int = 2) -> list[Verdict]:
    """Return the verdict on each case, for runs that `prepare` wrote below a folder."""
    ends = each_apart(carry_out, [(root, case, i) for i, case in enumerate(cases)], jobs)
    return [end if isinstance(end, Verdict) else Verdict("WRONG", lost(end)) for end in ends]


def lost(code: int | None) -> str:
    """Describe how the process of a case ended."""
    return f"was not over after {PATIENCE:.0f} s" if code is None else f"its process ended with {code}"


def carry_out(root: Path, case: Case, number: int) -> Verdict:
    """Run a case and return its verdict."""
    folder = root / f"case-{number}"
    shutil.copytree(root / case.run / "half", folder)
    os.chdir(folder)
    before = (folder / case.file).read_bytes()
    HARMS[case.harm](folder / case.file, case.place)
    verdict = resumed(root / case.run / "whole", case, before)
    os.chdir(root)
    shutil.rmtree(folder)
    return verdict


def resumed(whole: Path, case: Case, unharmed: bytes) -> Verdict:
    """Resume the run in the working folder and return the verdict."""
    before = snapshot(Path())
    code, out, err = fit("--resume", "run")
    lines = err.splitlines()
    told = [line for line in lines if line.startswith("fl-lightning: warning: ")]
    errors = [line for line in lines if line not in told]
    if "Traceback" in out + err:
        return Verdict("WRONG", f"a traceback: {errors[-1]}")
    named = [line for line in lines if names_the_file(line, case, unharmed)]
    if code:
        return judge_refusal(code, errors, named, _differing(before, snapshot(Path())))
    if errors:
        return Verdict("WRONG", f"exit code 0, and {errors[0]!r}")
    if different := other_ends(Path("run"), whole / "run", case.file if named else "", bool(told)):
        said = f" (it said: {'; '.join(told)})" if told else ", silently"
        return Verdict("WRONG", f"ended with other {', '.join(different)}{said}")
    return Verdict("warned", named[0]) if named else Verdict("identical", "")


def judge_refusal(code: int, errors: Sequence[str], named: Sequence[str], changed: Sequence[str]) -> Verdict:
    said = "; ".join(errors)
    if code != 2 or len(errors) != 1:
        return Verdict("WRONG", f"exit code {code}: {said}")
    if changed:
        return Verdict("WRONG", f"refused, but {', '.join(changed)} had changed: {said}")
    if not named:
        return Verdict("WRONG", f"refused, not saying why: {said}")
    return Verdict("refused", said)


def names_the_file(line: str, case: Case, unharmed: bytes) -> bool:
    """Return whether a line names the file, its checkpoint, or a setting that differs."""
    path = Path(case.file)
    if path.name in line or (path.parent.name.startswith("round-") and path.parent.name in line):
        return True
    return path.name == "config.yaml" and bool(set(re.findall(r"\w+", line)) & _other_keys(path, unharmed))


def _other_keys(path: Path, unharmed: bytes) -> set[str]:
    """Return all parts of the keys of settings that differ."""
    was = flatten(yaml.safe_load(unharmed))
    try:
        now = flatten(yaml.safe_load(path.read_bytes()))
    except (OSError, ValueError, yaml.YAMLError):
        return set()
    return {part for key in _differing(was, now) for part in str(key).split(".")}


def snapshot(folder: Path) -> dict[str, Any]:
    """Return the content of everything below a folder, and the targets of links."""
    return {str(path): _content(path) for path in folder.rglob("*") if path.name not in LOCKS}


def _content(path: Path) -> Any:
    return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name, ...) != other.get(name, ...))


WATCHING = re.compile(r"run/(warnings\.txt|figures/.*|wandb/.*)")
"""Files that do not affect results. They may stay damaged if a warning names them."""


def other_ends(run: Path, whole: Path, told_of: str, told: bool) -> list[str]:
    """Return the names of results that differ from those of the run that was not killed.

    An older checkpoint may stay damaged, as long as reading it raises an error.

    Args:
        run: The run's folder.
        whole: The folder of the run that was not killed.
        told_of: The damaged file, if a warning named it.
        told: Whether there was a warning. It is then in warnings.txt, too.
    """
    found, expected = end(run), end(whole)
    newest = f"checkpoint {max(CheckpointFolder(whole / 'checkpoints').rounds())}"
    names = [name for name in _differing(found, expected) if name == newest or found.get(name) != "unreadable"]
    if told and "warnings.txt" in names and expected["warnings.txt"] <= found.get("warnings.txt", Counter()):
        names.remove("warnings.txt")
    return [name for name in names if f"run/{name}" != told_of or not WATCHING.fullmatch(told_of)]


def end(run: Path) -> dict[str, Any]:
    """Return the results of a run, without times."""
    apart = re.compile(
        r"(metrics\.csv|warnings\.txt|checkpoints/.*|clients/.*|wandb/(?!run\.json$).*|\.lock|\.owner|\.signature)"
    )
    names = {str(path.relative_to(run)): path for path in run.rglob("*")}
    left = {name: _content(path) for name, path in names.items() if not path.is_dir() and not apart.fullmatch(name)}
    left |= {"metrics.csv": untimed_rows(run)}
    if (warned := run / "warnings.txt").exists():
        left["warnings.txt"] = Counter(warned.read_bytes().splitlines())
    checkpoints = CheckpointFolder(run / "checkpoints")
    return left | {f"checkpoint {round}": _checkpoint(checkpoints, round) for round in checkpoints.rounds()}


def _checkpoint(checkpoints: CheckpointFolder, round: int) -> Any:
    try:
        checkpoints.read(round)
    except CheckpointError:
        return "unreadable"
    run = checkpoints.path.parent
    state = elements(checkpoints.path / f"round-{round:06d}" / "state.pt")
    return [state, {file: (run / file).read_bytes() for file in checkpoints.files(round)}]


# --- The command ---


def kind_of(file: str) -> str:
    """Return the name of a file without the numbers of rounds and clients, as the table counts it."""
    return re.sub(r"\d{2,}", "N", file.removeprefix("run/"))


def show(cases: Sequence[Case], verdicts: Sequence[Verdict]) -> int:
    """Print the table and the WRONG cases. Return the number of WRONG cases."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for case, verdict in zip(cases, verdicts, strict=True):
        for row in (kind_of(case.file), "in all"):
            counts[row][verdict.kind] += 1
    width = max(map(len, counts))
    print(f"{'':{width}}" + "".join(f"{kind:>11}" for kind in VERDICTS))
    for row in sorted(counts, key=lambda name: (name == "in all", name)):
        print(f"{row:{width}}" + "".join(f"{counts[row][kind]:11}" for kind in VERDICTS))
    wrong = [(case, verdict.why) for case, verdict in zip(cases, verdicts, strict=True) if verdict.kind == "WRONG"]
    for case, why in wrong:
        print(f"WRONG  {case}: {why}")
    return len(wrong)


def main() -> int:
    """Run the fuzzing and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=400, help="random bits to flip")
    parser.add_argument(
        "--truncations", type=int, default=10, help="places to cut each file off at; 0: nothing but flips"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root, started = Path(folder), time.monotonic()
        prepare(root, given.runs, given.jobs)
        cases = flips(root, given.runs, given.cases, given.seed)
        cases += whole_files(root, given.runs, given.truncations) if given.truncations else []
        verdicts = fuzz(root, cases, given.jobs)
        print(f"{len(cases)} cases in {time.monotonic() - started:.0f} s, seed {given.seed}")
        return 1 if show(cases, verdicts) else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
