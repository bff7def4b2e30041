"""Runs that were killed half-way, harmed in one place each and then resumed: what becomes of them.

    python tests/helpers/fuzzing.py --cases 400 --truncations 10 --seed 0 --jobs 2

Small runs of several methods are killed in their fourth round of five. Then, each time in a fresh copy, a random bit of
one of their files or of their data is flipped, or a file is cut off, emptied, removed, made longer, or replaced by a
folder or a link; and `fl-lightning fit --resume` goes on with it. It may do one of these:

- refused: exit code 2 and one line that names the file, or what of it differs; the folder stays as it was, so that the
  file put back is all it takes to go on;
- warned: a warning names the file, and the run ends like one that was never killed;
- identical: it ends like that without a word, the harmed file included.

All else is WRONG: another end, a traceback, another exit code, more than a minute. Prints a table of the verdicts by
file, then each case that is WRONG, and exits with 1 if there is one. W&B's own files below `wandb/` are left out: all
but `run.json`, which is ours.
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

from fl_lightning.core.config import flatten
from fl_lightning.core.errors import CheckpointError
from fl_lightning.engines import trainer
from fl_lightning.orchestrator import FederatedOrchestrator
from fl_lightning.runs.checkpoint import CheckpointFolder
from fl_lightning.runs.record import Record

PATIENCE = 60.0  # seconds a case
KILLED_IN = 4
VERDICTS = ("refused", "warned", "identical", "WRONG")
LOCKS = (".lock", ".owner")  # what a refused command may leave, too

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
logger: null
"""
SIAMESE = '{"projection": 8, "prediction": 8}'
RUNS = {
    "little with clients": ["--algorithm=FedSKC", "--callbacks+=Checkpointing", "--callbacks.every=2"],
    "memories, on disk": ["--algorithm=FedSiamDA", f"--model.head={SIAMESE}", "--client_store=disk"],
    "peers": ["--algorithm=UAPDFL", "--algorithm.n_com=2", "--clients_per_round=3"],
    "figures": [
        "--algorithm=CwFedAvg",
        "--callbacks=[{class_path: AggregationWeights, init_args: {every: 2}}]",
        "--optimizer_state=kept",
    ],
    "W&B": ["--logger=fl_lightning.loggers.wandb.WandbRoundLogger", "--optimizer_state=kept"],
}


class Case(NamedTuple):
    """A file of a run, from the folder that holds run and data, and what is done to it."""

    run: str
    file: str
    harm: str
    place: int = 0

    def __str__(self) -> str:
        return f"{self.run}: {self.file}: {self.harm} {self.place}"


class Verdict(NamedTuple):
    """What became of a case, and what the command said or what is wrong."""

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
    """The files that a run goes on from, data included, less W&B's own."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in LOCKS]
    found = [str(path.relative_to(folder)) for path in paths]
    return [file for file in found if not file.startswith("run/wandb/") or file == "run/wandb/run.json"]


def flips(root: Path, runs: Iterable[str], count: int, seed: int) -> list[Case]:
    """Random bits: each file is as likely as any other, then each of its bits."""
    chance = random.Random(seed)
    files = [(name, file) for name in runs for file in files_of(root / name / "half")]
    sized = [(name, file, size) for name, file in files if (size := (root / name / "half" / file).stat().st_size)]
    drawn = (chance.choice(sized) for _ in range(count))
    return [Case(name, file, "flip", chance.randrange(8 * size)) for name, file, size in drawn]


def whole_files(root: Path, runs: Iterable[str], truncations: int, others: bool = True) -> list[Case]:
    """Each file cut off at several places, the last byte's among them; and, with `others`, all else."""
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
    """Below each run's name: `half`, killed, and `whole`, which was not; both with the data that they are of."""
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
    """Run one; killed between a row of metrics and its checkpoint."""
    os.chdir(folder)
    os.environ["WANDB_RUN_ID"] = "chosen"
    config = folder.parent / "tiny.yaml"  # both runs are named after it
    config.write_text(CONFIG)
    outcome = fit("--config", config, "--run_dir", "run", *RUNS[name], killed=killed)
    assert outcome.code == 0, outcome.err
    del os.environ["WANDB_RUN_ID"]
    return outcome.code


def fit(*words: str | Path, killed: bool = False) -> Outcome:
    """A run's command; the run warns of something in its second round."""
    run_round, log = FederatedOrchestrator._run_round, Record.log

    def warned(run: FederatedOrchestrator, round: int) -> Any:
        if round == 2:
            warnings.warn("the second round begins", stacklevel=2)
        return run_round(run, round)

    def logged(record: Record, metrics: Any) -> None:
        log(record, metrics)
        if killed and metrics["round"] == KILLED_IN:
            record.writer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    with mock.patch.object(FederatedOrchestrator, "_run_round", warned), mock.patch.object(Record, "log", logged):
        return run("fit", *words)


def each_apart(work: Callable[..., Any], arguments: Sequence[tuple[Any, ...]], jobs: int) -> list[Any]:
    """What a function returns for each of these, called in other processes.

    A process that does not survive a call is replaced; what is returned is then its exit code, or None where the call
    took too long.
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
    """What becomes of each case of the runs that `prepare` left below a folder."""
    ends = each_apart(carry_out, [(root, case, i) for i, case in enumerate(cases)], jobs)
    return [end if isinstance(end, Verdict) else Verdict("WRONG", lost(end)) for end in ends]


def lost(code: int | None) -> str:
    """How a case's process came to its end."""
    return f"was not over after {PATIENCE:.0f} s" if code is None else f"its process ended with {code}"


def carry_out(root: Path, case: Case, number: int) -> Verdict:
    """Do one case, and judge it."""
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
    """Resume the run in the working folder, and judge it."""
    before = snapshot(Path())
    code, out, err = fit("--resume", "run")
    lines = err.splitlines()
    told = [line for line in lines if line.startswith("fl-lightning: warning: ")]
    errors = [line for line in lines if line not in told]
    if "Traceback" in out + err:
        return Verdict("WRONG", f"a traceback: {errors[-1]}")
    named = [line for line in lines if _names(line, case, unharmed)]
    if code:
        return _refused(code, errors, named, _differing(before, snapshot(Path())))
    if errors:
        return Verdict("WRONG", f"exit code 0, and {errors[0]!r}")
    if different := other_ends(Path("run"), whole / "run", case.file if named else "", bool(told)):
        said = f" (it said: {'; '.join(told)})" if told else ", silently"
        return Verdict("WRONG", f"ended with other {', '.join(different)}{said}")
    return Verdict("warned", named[0]) if named else Verdict("identical", "")


def _refused(code: int, errors: Sequence[str], named: Sequence[str], changed: Sequence[str]) -> Verdict:
    said = "; ".join(errors)
    if code != 2 or len(errors) != 1:
        return Verdict("WRONG", f"exit code {code}: {said}")
    if changed:
        return Verdict("WRONG", f"refused, but {', '.join(changed)} had changed: {said}")
    if not named:
        return Verdict("WRONG", f"refused, not saying why: {said}")
    return Verdict("refused", said)


def _names(line: str, case: Case, unharmed: bytes) -> bool:
    """Whether a line says what is wrong: the file, its checkpoint, or a setting of it that is another."""
    path = Path(case.file)
    if path.name in line or (path.parent.name.startswith("round-") and path.parent.name in line):
        return True
    return path.name == "config.yaml" and bool(set(re.findall(r"\w+", line)) & _other_keys(path, unharmed))


def _other_keys(path: Path, unharmed: bytes) -> set[str]:
    """All parts of the names of settings that are not what they were."""
    was = flatten(yaml.safe_load(unharmed))
    try:
        now = flatten(yaml.safe_load(path.read_bytes()))
    except (OSError, ValueError, yaml.YAMLError):
        return set()
    return {part for key in _differing(was, now) for part in str(key).split(".")}


def snapshot(folder: Path) -> dict[str, Any]:
    """Everything below a folder, links as such."""
    return {str(path): _content(path) for path in folder.rglob("*") if path.name not in LOCKS}


def _content(path: Path) -> Any:
    return os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None


def _differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name, ...) != other.get(name, ...))


WATCHING = re.compile(r"run/(warnings\.txt|figures/.*|wandb/.*)")
"""Files that no result is worked out from: who was told that they were changed may find them so at the end."""


def other_ends(run: Path, whole: Path, told_of: str, told: bool) -> list[str]:
    """What of a run's end is not as if nobody had killed or harmed it.

    An older checkpoint may stay harmed, as long as reading it says so.

    Args:
        run: The run's folder.
        whole: That of the run to which nothing happened.
        told_of: The harmed file, if a warning named it.
        told: Whether anything was warned of: that is in warnings.txt then, beside what else stood there.
    """
    found, expected = end(run), end(whole)
    newest = f"checkpoint {max(CheckpointFolder(whole / 'checkpoints').rounds())}"
    names = [name for name in _differing(found, expected) if name == newest or found.get(name) != "unreadable"]
    if told and "warnings.txt" in names and expected["warnings.txt"] <= found.get("warnings.txt", Counter()):
        names.remove("warnings.txt")
    return [name for name in names if f"run/{name}" != told_of or not WATCHING.fullmatch(told_of)]


def end(run: Path) -> dict[str, Any]:
    """What a run has come to, less what a clock put there."""
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
    """A file as the table counts it: without numbers of rounds and clients."""
    return re.sub(r"\d{2,}", "N", file.removeprefix("run/"))


def show(cases: Sequence[Case], verdicts: Sequence[Verdict]) -> int:
    """Print the table, and what is wrong; how many are."""
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
    """Fuzz, and say what came of it."""
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
