"""`warnings.txt`, the file with the warnings of a run."""

import errno
import warnings
from pathlib import Path

import pytest
from commands import contents
from experiments import experiment

from fl_lightning.callbacks import RoundCallback
from fl_lightning.core.errors import ConfigError
from fl_lightning.loggers import collection as loggers
from fl_lightning.runs import record
from fl_lightning.runs.folder import refuse_existing_run
from fl_lightning.runs.warnings_txt import WarningsTxt


class Warner(RoundCallback):
    """Warn at the end of each round, and when the run begins and ends."""

    def on_fit_start(self, run):
        warnings.warn("begins", stacklevel=2)

    def on_round_end(self, run, metrics):
        warnings.warn(f"after {run.round}:\nµ is\tlow", stacklevel=2)

    def on_fit_end(self, run):
        warnings.warn("ends", stacklevel=2)


class Breaks(RoundCallback):
    """End the run with an error in round 3."""

    def on_round_start(self, run, participants):
        if run.round == 2:
            raise RuntimeError("broken off")


@pytest.fixture
def shown():
    """Return the list of the warnings that are shown. As on the command line, they are no errors."""
    texts = []
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *args, **kwargs: texts.append(str(message))
        yield texts


def lines(folder: Path) -> list[str]:
    return (folder / "warnings.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.thorough
def test_warnings_are_recorded_with_their_round_and_shown(tmp_path, shown):
    before = warnings.showwarning
    for name, callbacks in (("quiet", []), ("warned", [Warner()])):
        experiment(tmp_path / name, rounds=2, callbacks=callbacks).fit()
    assert warnings.showwarning is before
    assert contents(tmp_path / "warned").keys() - contents(tmp_path / "quiet").keys() == {"warnings.txt"}
    assert lines(tmp_path / "warned") == [
        "round 1: begins",
        "round 2: after 1: µ is low",  # metrics are on disk: the round is over
        "round 3: after 2: µ is low",
        "round 3: ends",
    ]
    assert shown == ["begins", "after 1:\nµ is\tlow", "after 2:\nµ is\tlow", "ends"]


@pytest.mark.thorough
def test_resumed_run_records_the_same_warnings(tmp_path, shown):
    class Once(Warner):
        on_fit_start = on_fit_end = lambda self, run: None

    before = warnings.showwarning
    experiment(tmp_path / "whole", rounds=4, callbacks=[Once()]).fit()
    with pytest.raises(RuntimeError, match="broken off"):
        experiment(tmp_path / "cut", rounds=4, callbacks=[Once(), Breaks()]).fit()
    assert warnings.showwarning is before
    with (tmp_path / "cut" / "warnings.txt").open("ab") as file:  # a round that is computed again, and half a line
        file.write(b"round 4: of a round that is not over\nsomething else\nround 2: cut sh")
    experiment(tmp_path / "cut", rounds=4, callbacks=[Once()]).fit(resume=True)
    # A warning at the end of round 2 is recorded for round 3, which is computed again.
    expected = [line for line in lines(tmp_path / "whole") if not line.startswith("round 3")]
    assert lines(tmp_path / "cut") == expected


def test_warnings_before_the_folder_exists_are_recorded(tmp_path, shown, monkeypatch):
    monkeypatch.setattr(loggers, "FEW_CLIENTS", 5)
    experiment(tmp_path / "run", rounds=1).fit()
    (line,) = lines(tmp_path / "run")
    assert line.startswith("round 1: log_clients: metrics of single clients")


@pytest.mark.thorough
def test_a_warning_of_an_evaluation_belongs_to_its_round(tmp_path, shown):
    """So it is still in the file after a resume from this round."""

    class Measures(RoundCallback):
        def on_round_metrics(self, run, metrics):
            warnings.warn(f"measured after {run.round}", stacklevel=2)

    for rounds in (1, 2):
        experiment(tmp_path, rounds=rounds, callbacks=[Measures()]).fit(resume=rounds > 1)
        assert [line for line in lines(tmp_path) if "measured" in line] == [
            f"round {n}: measured after {n}" for n in range(1, rounds + 1)
        ]


def test_damaged_checkpoint_is_recorded_in_the_resumed_round(tmp_path, shown):
    experiment(tmp_path, rounds=3).fit()
    (tmp_path / "checkpoints" / "round-000003" / "state.pt").write_bytes(b"")
    experiment(tmp_path, rounds=3).fit(resume=True)
    (line,) = lines(tmp_path)
    assert line.startswith("round 3: ")
    assert "round-000003" in line


def test_refused_run_records_no_warnings_in_another_run(tmp_path, shown, monkeypatch):
    (tmp_path / "metrics.csv").write_text("round\n1\n")
    before = contents(tmp_path)
    refused = experiment(tmp_path)

    def refuse(folder):
        warnings.warn("looked at the data", stacklevel=2)
        refuse_existing_run(folder)

    monkeypatch.setattr(record, "refuse_existing_run", refuse)
    with pytest.raises(ConfigError, match="holds a run already"):
        refused.fit()
    assert shown == ["looked at the data"]
    assert contents(tmp_path) == before


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("failing", ["open", "exists"])
def test_full_disk_for_warnings_does_not_end_the_run(failing, tmp_path, shown, monkeypatch):
    works = getattr(Path, failing)

    def refuses(self, *args, **kwargs):
        if self.name.strip(".").startswith("warnings.txt"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return works(self, *args, **kwargs)

    monkeypatch.setattr(Path, failing, refuses)
    run = experiment(tmp_path / "run", rounds=2, callbacks=[Warner()])
    assert run.fit().summary["rounds"] == 2
    assert len(shown) == 4


def record_warnings(path: Path, texts: list[str], round: int = 0) -> WarningsTxt:
    """Return a file with these warnings, one per round from `round` + 1 on."""
    now = round
    file = WarningsTxt(path, lambda: now)
    with file:
        file.rewind(round)
        for now, text in enumerate(texts, round + 1):  # noqa: B007, what `file` looks at
            warnings.warn(text, stacklevel=2)
    return file


def test_file_holds_the_newest_thousand_warnings(tmp_path, shown):
    path = tmp_path / "warnings.txt"
    record_warnings(path, [f"text {i}" for i in range(1, 2001)])
    assert path.read_text() == "".join(f"round {i}: text {i}\n" for i in range(1, 2001))
    record_warnings(path, ["one more"], round=2000)
    assert path.read_text() == "".join(f"round {i}: text {i}\n" for i in range(1002, 2001)) + "round 2001: one more\n"
    record_warnings(path, [f"text {i}" for i in range(2002, 3002)], round=2001)
    assert len(path.read_text().splitlines()) == 2000


def test_long_warning_is_cut_and_invalid_text_replaced(tmp_path, shown):
    path = tmp_path / "warnings.txt"
    record_warnings(path, ["x" * 10_000, "a file \udcff"])
    assert path.read_bytes() == b"round 1: " + b"x" * 500 + "\nround 2: a file \N{REPLACEMENT CHARACTER}\n".encode()
    WarningsTxt(path, lambda: 1).rewind(0)
    assert not path.exists()
