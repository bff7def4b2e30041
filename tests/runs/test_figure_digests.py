"""Figures are written once: a resumed run's are an undisturbed run's, and one that was altered since is told of."""

import os
import shutil
import warnings

import numpy as np
import pytest
from commands import contents, run, tiny
from experiments import experiment
from fl_lightning.callbacks import (
    AggregationWeights,
    BytesByRound,
    ClassRelations,
    ClientDrift,
    KnowledgeMap,
    RoundFigure,
    RowNorms,
    UnitDivergence,
)
from matplotlib.figure import Figure

from fl_lightning.algorithms import FedSKC
from fl_lightning.core.errors import CheckpointError, ConfigError


def figures():
    """One of each kind, and a second of one."""
    every = {"every": 2}
    kinds = [AggregationWeights, ClassRelations, ClientDrift, UnitDivergence, RowNorms, BytesByRound]
    return [kind(**every) for kind in kinds] + [KnowledgeMap(client=client, samples=20, **every) for client in (0, 3)]


def skc(run_dir, rounds, callbacks):
    return experiment(run_dir, FedSKC(), rounds=rounds, clients_per_round=6, callbacks=callbacks)


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """A run of two rounds."""
    run_dir = tmp_path_factory.mktemp("halved") / "run"
    skc(run_dir, 2, figures()).fit()
    return run_dir


@pytest.fixture
def half(halved, tmp_path):
    """A copy of it to spoil."""
    return shutil.copytree(halved, tmp_path / "run")


def drawn(run_dir):
    """The figures' files and their bytes."""
    return {path: content for path, content in contents(run_dir / "figures").items() if content is not None}


def told(run_dir, callbacks):
    """What is warned of before a run goes on, less the folder's own name."""
    one = skc(run_dir, 3, callbacks)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        one.load()
        one._notify("check")
    return [str(one.message).replace(f"{run_dir}/", "") for one in warned]


@pytest.mark.thorough
def test_a_resumed_run_draws_what_an_undisturbed_one_does(half, tmp_path):
    skc(tmp_path / "whole", 4, figures()).fit()
    skc(half, 4, figures()).fit(resume=True)
    assert drawn(half) == drawn(tmp_path / "whole")
    assert len(drawn(half)) == 2 * 2 * len(figures())


def test_two_figures_of_a_kind_have_folders_of_their_own(halved):
    for name, client in {"knowledge_map": 0, "knowledge_map-2": 3}.items():
        with np.load(halved / "figures" / name / "round-000002.npz") as arrays:
            assert int(arrays["client"]) == client


def test_an_altered_or_lost_file_is_told_of_once(half):
    for place, spoil in {
        "row_norms/round-000002.png": lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "drift/round-000002.npz": lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]),
        "divergence/round-000002.png": lambda path: path.unlink(),
        "knowledge_map-2/round-000002.npz": lambda path: path.unlink(),
    }.items():
        spoil(half / "figures" / place)
    os.mkfifo(half / "figures" / "divergence" / "round-000002.png")
    linked = half / "figures" / "class_relations" / "round-000002.png"
    linked.rename(half / "elsewhere.png")
    linked.symlink_to(half / "elsewhere.png")
    shutil.rmtree(half / "figures" / "bytes")
    expected = [
        "figures/class_relations/round-000002.png was changed. It is not drawn again.",
        "figures/drift/round-000002.npz was changed. It is not drawn again.",
        "figures/divergence/round-000002.png was changed. It is not drawn again.",
        "figures/row_norms/round-000002.png was changed. It is not drawn again.",
        "figures/bytes not found, with 2 files. They are not drawn again.",
        "figures/knowledge_map-2/round-000002.npz not found. It is not drawn again.",
    ]
    assert told(half, figures()) == expected


def test_a_file_that_cannot_be_read_is_told_of(half, monkeypatch):
    def refuses(path):
        raise PermissionError(path)

    one = skc(half, 3, [RowNorms(2)])
    one.load()
    monkeypatch.setattr("pathlib.Path.read_bytes", refuses)
    with pytest.warns(UserWarning, match="round-000002.* was changed") as warned:
        one._notify("check")
    assert len(warned) == 2


def test_figures_as_they_were_are_no_news(half):
    assert told(half, figures()) == []
    assert told(half, []) == []


def test_files_of_other_makes_and_of_later_rounds_are_nobodys_business(half):
    (half / "figures" / "row_norms" / "round-000009.png").write_bytes(b"of a run that was killed")
    (half / "figures" / "notes.txt").write_text("mine")
    assert told(half, figures()) == []


@pytest.mark.filterwarnings("always")
def test_the_command_line_tells_too(tmp_path):
    run_dir = tmp_path / "run"
    tiny(run_dir, "--rounds", "1", "--callbacks", "[RowNorms]")
    (run_dir / "figures" / "row_norms" / "round-000001.png").write_bytes(b"")
    code, _, err = run("fit", "--resume", run_dir, "--rounds", "2")
    assert code == 0
    line = f"{run_dir}/figures/row_norms/round-000001.png was changed. It is not drawn again."
    assert err == f"fl-lightning: warning: {line}\n"
    assert (run_dir / "warnings.txt").read_text() == f"round 2: {line}\n"
    assert run("test", run_dir).err == ""


class Counted(RoundFigure):
    """Has a state of its own, as figures did before theirs was noted."""

    name = "counted"

    def __init__(self):
        super().__init__(every=1)
        self.count = 0

    def measure(self, run):
        self.count += 1
        return {"count": np.array(self.count)}

    def draw(self, arrays):
        return Figure()

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class CountedAndNoted(Counted):
    """Adds to the state that there is."""

    def state_dict(self):
        return RoundFigure.state_dict(self) | {"count": self.count}

    def load_state_dict(self, state):
        RoundFigure.load_state_dict(self, state)
        self.count = state["count"]


@pytest.mark.parametrize(("kind", "warned"), [(Counted, 0), (CountedAndNoted, 1)])
def test_a_figure_with_a_state_of_its_own_keeps_it(tmp_path, kind, warned):
    skc(tmp_path, 2, [kind()]).fit()
    (tmp_path / "figures" / "counted" / "round-000001.png").write_bytes(b"")
    again = kind()
    assert len(told(tmp_path, [again])) == warned
    assert again.count == 2


def test_a_checkpoint_of_before_figures_were_noted_is_taken_up():
    figure = RowNorms()
    figure.load_state_dict({})
    assert figure.state_dict() == {"written": ""}


@pytest.mark.parametrize(("place", "what"), [("figures", "file"), ("figures/row_norms", "link")])
def test_nothing_is_written_through_a_link(tmp_path, place, what):
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    (path := run_dir / place).parent.mkdir(parents=True)
    path.write_text("") if what == "file" else path.symlink_to(victim)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"run_dir: .* holds a run already, or part of one \(figures\)"):
        skc(run_dir, 1, [RowNorms()]).fit()
    assert contents(tmp_path) == before
    refusal = CheckpointError if what == "file" else ConfigError
    with pytest.raises(refusal, match=rf"{place} is a link|holds a run \(figures\), but no checkpoint"):
        skc(run_dir, 1, [RowNorms()]).fit(resume=True)
    assert list(victim.iterdir()) == []
