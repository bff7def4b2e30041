import hashlib
import json
import os
import pickle
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from refusals import Trap

from fl_lightning.core.errors import CheckpointError, Damaged
from fl_lightning.core.files import write_atomically
from fl_lightning.core.interrupt import DeferredSignals
from fl_lightning.runs.checkpoint import Checkpoint, CheckpointFolder
from fl_lightning.runs.fingerprint import Fingerprint

STATE: dict[str, Any] = {
    "round": 3,
    "state": {"model": {"w": torch.tensor([0.1, float("nan"), -0.0, float("inf")]), "n": torch.tensor(7)}},
    "memory": {0: {"c": {"half": torch.tensor([0.3], dtype=torch.bfloat16)}}, 12: {}},
    "callbacks": {"Checkpointing": {"best": 0.1 + 0.2, "best_round": None, "names": ["µ", "a\nb"], "on": True}},
}


def fail(message: str) -> None:
    raise AssertionError(message)


def flatten(value: Any) -> Any:
    """Return a value that `==` compares by type and every bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).tolist()
    if isinstance(value, dict):
        return [(flatten(key), flatten(item)) for key, item in value.items()]
    if isinstance(value, list):
        return list(map(flatten, value))
    return type(value), value


def three_checkpoints(path: Path) -> CheckpointFolder:
    checkpoints = CheckpointFolder(path)
    for round in (1, 2, 3):
        checkpoints.write(round, {"round": round, "w": torch.full((4,), float(round))})
    return checkpoints


# --- Valid checkpoints ---


def test_checkpoint_is_restored_bit_for_bit(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "run" / "checkpoints")
    folder = checkpoints.write(3, STATE)
    assert folder == tmp_path / "run" / "checkpoints" / "round-000003"
    assert flatten(checkpoints.read(3).state) == flatten(STATE)
    newest = checkpoints.read_newest(fail)
    assert newest
    assert (newest.round, flatten(newest.state)) == (3, flatten(STATE))


def test_files_are_flushed_before_and_the_parent_folder_after_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut, only flushed content remains."""
    steps: list[tuple[str, str]] = []
    rename = Path.rename

    def flushed(handle: int) -> None:
        steps.append(("flush", Path(os.readlink(f"/proc/self/fd/{handle}")).name))

    def renamed(path: Path, target: Path) -> Path:
        steps.append(("rename", target.name))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(Path, "rename", renamed)
    CheckpointFolder(tmp_path / "checkpoints").write(3, STATE)
    place = steps.index(("rename", "round-000003"))
    assert {name for _, name in steps[:place]} == {"state.pt", "manifest.json", ".writing-round-000003"}
    assert steps[place + 1 :] == [("flush", "checkpoints")]


def test_manifest_holds_round_and_sha256_of_each_file(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path).write(12, STATE)
    assert sorted(path.name for path in folder.iterdir()) == ["manifest.json", "state.pt"]
    digest = hashlib.sha256((folder / "state.pt").read_bytes()).hexdigest()
    manifest = json.loads((folder / "manifest.json").read_text())
    own = manifest.pop("checksum")
    assert manifest == {
        "round": 12,
        "files": {"state.pt": f"sha256:{digest}"},
        "outside": {},
        "seal": {"config": {}, "data": {}, "rows": {}, "made_with": {}, "fixed": ""},
    }
    assert own == f"sha256:{hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()}"


def test_rounds_are_sorted_numerically_newest_first(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    for round in (9, 1_000_000, 10, 999_999):
        checkpoints.write(round, {})
    assert checkpoints.rounds() == [1_000_000, 999_999, 10, 9]


def test_second_write_of_a_round_replaces_the_first(tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    checkpoints.write(2, {"again": 1})
    assert checkpoints.read(2).state == {"again": 1}
    assert checkpoints.rounds() == [3, 2, 1]


def test_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path / "none")
    assert checkpoints.rounds() == []
    assert checkpoints.read_newest(fail) is None
    checkpoints.prune(set())


def test_folder_with_another_name_is_ignored_and_not_pruned(tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    shutil.copytree(tmp_path / "round-000003", tmp_path / "round-000003.bak")
    assert checkpoints.rounds() == [3, 2, 1]
    (tmp_path / ".writing-x" / "round-000004").mkdir(parents=True)  # as a killed process leaves it
    checkpoints.prune({2})
    assert sorted(os.listdir(tmp_path)) == ["round-000002", "round-000003.bak"]


@pytest.mark.parametrize("keep", [set(), {3, 77}])
def test_prune_keeps_the_given_rounds(keep: set[int], tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    checkpoints.prune(keep)
    assert set(checkpoints.rounds()) == keep & {1, 2, 3}


# --- Damaged checkpoints ---


def flip(path: Path, place: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def test_each_flipped_bit_of_the_state_is_detected(tmp_path: Path) -> None:
    checkpoints = CheckpointFolder(tmp_path)
    path = checkpoints.write(1, STATE) / "state.pt"
    size = path.stat().st_size
    for place in range(0, size, size // 50):
        flip(path, place, place % 8)
        with pytest.raises(CheckpointError, match=r"round-000001 is damaged: state\.pt "):
            checkpoints.read(1)
        flip(path, place, place % 8)
    assert flatten(checkpoints.read(1).state) == flatten(STATE)


def test_each_flipped_bit_of_the_manifest_is_detected(tmp_path: Path) -> None:
    """A flip of white space changes nothing."""
    checkpoints = CheckpointFolder(tmp_path)
    fingerprint = Fingerprint({"rounds": 3, "optimizer.lr": 0.5}, {"x_train": "sha256:0"}, {"metrics.csv": "sha256:1"})
    path = checkpoints.write(1, STATE, {}, fingerprint) / "manifest.json"
    noted = json.loads(path.read_text())
    for place in range(path.stat().st_size):
        flip(path, place, place % 8)
        with suppress(CheckpointError):
            assert (checkpoints.read(1).fingerprint, json.loads(path.read_text())) == (fingerprint, noted)
        flip(path, place, place % 8)
    assert checkpoints.read(1).fingerprint == fingerprint


def truncate(path: Path, size: int) -> None:
    os.truncate(path, size)


def write_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest, with a valid checksum."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["checksum"]
    change(manifest)
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest | {"checksum": f"sha256:{digest}"}))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda folder: truncate(folder / "state.pt", (folder / "state.pt").stat().st_size - 1),
    "one bit": lambda folder: flip(folder / "state.pt", 100),
    "no state": lambda folder: (folder / "state.pt").unlink(),
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "truncated manifest": lambda folder: truncate(folder / "manifest.json", 20),
    "manifest without state": lambda folder: write_manifest(folder, lambda manifest: manifest.update(files={})),
}
TEXTS = ["", "5", "[]", "{}", '"seal"', "[" * 100_000, '{"round": 3}', "\0", '{"files": 5, "seal": 1}']
DAMAGES |= {f"manifest {text[:9]!r}": lambda folder, t=text: (folder / "manifest.json").write_text(t) for text in TEXTS}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_newest_checkpoint_is_reported_and_the_previous_one_used(damage: str, tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    DAMAGES[damage](tmp_path / "round-000003")
    reports: list[str] = []
    found = checkpoints.read_newest(reports.append)
    assert found is not None
    assert found.round == found.state["round"] == 2
    (line,) = reports
    assert re.fullmatch(rf"checkpoint {tmp_path}/round-000003 is damaged: .*; resuming from round 2's", line)


def test_a_run_without_valid_checkpoints_cannot_be_resumed(tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    for round, damage in zip((1, 2, 3), DAMAGES.values(), strict=False):
        damage(tmp_path / f"round-00000{round}")
    with pytest.raises(CheckpointError, match=r"^checkpoint .*round-000003 is damaged: .* No earlier checkpoint"):
        checkpoints.read_newest(fail)


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    for round in (2, 3):
        (tmp_path / f"round-00000{round}" / "state.pt").unlink()
    found = checkpoints.read_newest(lambda _: None)
    assert found
    assert found.round == 1
    assert checkpoints.rounds() == [1]
    checkpoints.write(2, {"round": 2})
    assert checkpoints.rounds() == [2, 1]
    assert (tmp_path / "round-000003").exists()  # until there is something newer on disk
    checkpoints.prune({1, 2, 3})
    assert checkpoints.rounds() == [2, 1]
    checkpoints.prune({1, 2})
    assert sorted(os.listdir(tmp_path)) == ["round-000001", "round-000002"]


def test_checkpoint_that_does_not_fit_the_metrics_is_skipped(tmp_path: Path) -> None:
    def fits(found: Checkpoint) -> None:
        if found.round > 1:
            raise Damaged(f"metrics.csv holds 1 of rounds 1 to {found.round}")

    reports: list[str] = []
    found = three_checkpoints(tmp_path).read_newest(reports.append, fits)
    assert found
    assert found.round == 1
    assert reports == [f"metrics.csv holds 1 of rounds 1 to {r}; resuming from round 1's" for r in (3, 2)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_checkpoint_without_read_permission_is_an_error(tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    (tmp_path / "round-000003" / "state.pt").chmod(0)
    with pytest.raises(CheckpointError, match=r"round-000003 cannot be read: .*Permission denied"):
        checkpoints.read_newest(fail)


@pytest.mark.parametrize(
    "name",
    ["/dev/zero", "{}", "../outside", "clients/../../outside", "pipe", "link", "link/file", "clients", "", ".", "a\0b"],
)
def test_manifest_cannot_name_files_outside_the_run_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoints = CheckpointFolder(folder / "checkpoints")
    (tmp_path / "outside").write_text("")
    nothing = f"sha256:{hashlib.sha256().hexdigest()}"
    checkpoints.write(1, STATE, {name.format(tmp_path / "outside"): nothing})
    os.mkfifo(folder / "pipe")
    (folder / "clients").mkdir()
    (folder / "link").symlink_to(tmp_path if name == "link/file" else tmp_path / "outside")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="round-000001 is damaged: "):
        checkpoints.read(1)


def test_checkpoint_of_another_round_is_damaged(tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    (tmp_path / "round-000003").rename(tmp_path / "round-000009")
    with pytest.raises(CheckpointError, match=r"round-000009 is damaged"):
        checkpoints.read(9)


def test_invalid_folder_names_and_links_are_no_checkpoints(tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path / "run")
    for name in ("round-1", "round-\N{SUPERSCRIPT TWO}", "round-0000007", "round-x"):
        (tmp_path / "run" / name).mkdir()
    shutil.move(tmp_path / "run" / "round-000002", tmp_path / "elsewhere")
    (tmp_path / "run" / "round-000002").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "run" / "round-000009").touch()
    assert checkpoints.rounds() == [3, 1]


def test_reading_a_missing_round_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="round-000009"):
        three_checkpoints(tmp_path).read(9)


@pytest.mark.parametrize("dump", [torch.save, lambda obj, path: path.write_bytes(pickle.dumps(obj))])
def test_code_in_a_checkpoint_is_refused_and_not_executed(dump: Any, tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    folder = tmp_path / "round-000003"
    dump({"round": 3, "w": Trap(tmp_path / "sprung")}, folder / "state.pt")
    digest = f"sha256:{hashlib.sha256((folder / 'state.pt').read_bytes()).hexdigest()}"
    write_manifest(folder, lambda manifest: manifest["files"].update({"state.pt": digest}))
    with pytest.raises(CheckpointError, match=r"round-000003 is damaged: (?!.*checksum)"):
        checkpoints.read(3)
    assert not (tmp_path / "sprung").exists()


# --- Out of space ---


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_gives_one_line_and_damages_nothing(tmp_path: Path) -> None:
    checkpoints = three_checkpoints(tmp_path)
    with (
        files_no_larger_than(20_000),
        pytest.raises(CheckpointError, match=r"^cannot write checkpoint .*round-000004: ") as caught,
    ):
        checkpoints.write(4, {"w": torch.zeros(50_000)})
    assert "\n" not in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == ["round-000001", "round-000002", "round-000003"]


def test_folder_that_cannot_be_created_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"^cannot write checkpoint .*round-000001: "):
        CheckpointFolder(tmp_path / "file" / "checkpoints").write(1, {})


# --- write_atomically ---


@pytest.mark.parametrize(("content", "expected"), [("µ\n1", "µ\n1".encode()), (b"\x00\xff", b"\x00\xff"), ("", b"")])
def test_write_atomically_leaves_only_the_complete_file(content: str | bytes, expected: bytes, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file.txt"
    write_atomically(path, "something longer that was there before")
    write_atomically(path, content)
    assert path.read_bytes() == expected
    assert os.listdir(path.parent) == ["file.txt"]


def test_open_reader_sees_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "old content")
    with path.open() as reader:
        write_atomically(path, "new")
        assert reader.read() == "old content"


def test_failed_write_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with files_no_larger_than(1000), pytest.raises(OSError, match="too large"):
        write_atomically(path, "new" * 1000)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file.txt"]
    write_atomically(path, "new")
    assert os.listdir(tmp_path) == ["file.txt"]


# --- DeferredSignals ---


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_first_signal_is_recorded_and_the_second_one_raises(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with DeferredSignals() as signals:
        assert signals.received is None
        os.kill(os.getpid(), number)
        assert signals.received == number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == number
    assert signal.getsignal(number) is before


def test_signals_are_not_handled_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    inside = []

    def work() -> None:
        with DeferredSignals():
            inside.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert inside == [before]
