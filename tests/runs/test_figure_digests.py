"""Digests of figure files: a resumed run writes the same figures, and warns of changed ones."""

import os
import shutil
import warnings

import numpy as np
import pytest
from commands import contents, run, tiny
from experiments import ONE_EPOCH, experiment
from matplotlib.figure import Figure

from fl_lightning.algorithms import FedSKC
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
from fl_lightning.core.errors import ConfigError


def figures():
    """Return a figure of most classes, and a second one of `BytesByRound`."""
    kinds = [AggregationWeights, ClassRelations, ClientDrift, UnitDivergence, RowNorms, BytesByRound]
    return [*(kind(every=2) for kind in kinds), BytesByRound(every=1)]


def fedskc_run(run_dir, rounds, callbacks):
    options = {"clients_per_round": 6, "trainer": ONE_EPOCH}
    return experiment(run_dir, FedSKC(), rounds=rounds, callbacks=callbacks, **options)


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    """Return the folder of a run of two rounds."""
    run_dir = tmp_path_factory.mktemp("halved") / "run"
    fedskc_run(run_dir, 2, figures()).fit()
    return run_dir


@pytest.fixture
def half(halved, tmp_path):
    """Return a copy of the run to change."""
    return shutil.copytree(halved, tmp_path / "run")


def figure_files(run_dir):
    """Return the content of the figure files by path."""
    return {path: content for path, content in contents(run_dir / "figures").items() if content is not None}


def check_figures(run):
    """Call what looks at the figures before a loaded run goes on."""
    for callback in run.callbacks:
        callback.check(run)


def resume_warnings(run_dir, callbacks):
    """Return the warnings before a run is resumed, without the folder's name."""
    one = fedskc_run(run_dir, 3, callbacks)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        one.load()
        check_figures(one)
    return [str(one.message).replace(f"{run_dir}/", "") for one in warned]


@pytest.mark.thorough
def test_resumed_run_draws_the_same_figures(half, tmp_path):
    def callbacks():
        return [*figures(), KnowledgeMap(every=4, samples=20)]

    fedskc_run(tmp_path / "whole", 4, callbacks()).fit()
    fedskc_run(half, 4, callbacks()).fit(resume=True)
    assert figure_files(half) == figure_files(tmp_path / "whole")
    assert len(figure_files(half)) == 2 * (6 * 2 + 4 + 1)


def test_two_figures_of_one_class_have_separate_folders(halved):
    names = [sorted(path.name for path in (halved / "figures" / name).glob("*.png")) for name in ("bytes", "bytes-2")]
    assert names == [["round-000002.png"], ["round-000001.png", "round-000002.png"]]


def test_changed_and_missing_figure_files_are_warned_of(half):
    for place, damage in {
        "row_norms/round-000002.png": lambda path: path.write_bytes(path.read_bytes()[:-1]),
        "drift/round-000002.npz": lambda path: path.write_bytes(b"\0" + path.read_bytes()[1:]),
        "divergence/round-000002.png": lambda path: path.unlink(),
        "bytes-2/round-000002.npz": lambda path: path.unlink(),
    }.items():
        damage(half / "figures" / place)
    os.mkfifo(half / "figures" / "divergence" / "round-000002.png")
    linked = half / "figures" / "class_relations" / "round-000002.png"
    linked.rename(half / "elsewhere.png")
    linked.symlink_to(half / "elsewhere.png")
    shutil.rmtree(half / "figures" / "bytes")
    assert [line.partition(". ")[0] for line in resume_warnings(half, figures())] == [
        "figures/class_relations/round-000002.png was changed",
        "figures/drift/round-000002.npz was changed",
        "figures/divergence/round-000002.png was changed",
        "figures/row_norms/round-000002.png was changed",
        "figures/bytes not found, with 2 files",
        "figures/bytes-2/round-000002.npz not found",
    ]


def test_unreadable_figure_file_is_warned_of(half, monkeypatch):
    def refuses(path):
        raise PermissionError(path)

    one = fedskc_run(half, 3, [RowNorms(2)])
    one.load()
    monkeypatch.setattr("pathlib.Path.read_bytes", refuses)
    with pytest.warns(UserWarning, match="round-000002.* was changed") as warned:
        check_figures(one)
    assert len(warned) == 2


def test_unchanged_figures_give_no_warning(half):
    assert resume_warnings(half, figures()) == []
    assert resume_warnings(half, []) == []


def test_other_files_in_the_figures_folder_are_ignored(half):
    (half / "figures" / "row_norms" / "round-000009.png").write_bytes(b"of a run that was killed")
    (half / "figures" / "notes.txt").write_text("mine")
    assert resume_warnings(half, figures()) == []


@pytest.mark.filterwarnings("always")
@pytest.mark.thorough
def test_command_line_warns_of_a_changed_figure(tmp_path):
    run_dir = tmp_path / "run"
    tiny(run_dir, "--rounds", "1", "--callbacks", "[RowNorms]")
    (run_dir / "figures" / "row_norms" / "round-000001.png").write_bytes(b"")
    code, _, err = run("fit", "--resume", run_dir, "--rounds", "2")
    assert code == 0
    line = err.removeprefix("fl-lightning: warning: ")
    assert line.startswith(f"{run_dir}/figures/row_norms/round-000001.png was changed")
    assert line.count("\n") == 1
    assert (run_dir / "warnings.txt").read_text() == f"round 2: {line}"
    assert run("test", run_dir).err == ""


class Counted(RoundFigure):
    """A figure with its own state and without digests."""

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


def test_figure_with_its_own_state_is_restored(tmp_path):
    fedskc_run(tmp_path, 2, [Counted()]).fit()
    again = Counted()
    assert resume_warnings(tmp_path, [again]) == []
    assert again.count == 2


def test_checkpoint_without_figure_digests_is_restored():
    figure = RowNorms()
    figure.load_state_dict({})
    assert figure.state_dict() == {"written": ""}


@pytest.mark.parametrize(("place", "what"), [("figures", "file"), ("figures/row_norms", "link")])
def test_figures_are_not_written_through_a_link(tmp_path, place, what):
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    victim.mkdir()
    (path := run_dir / place).parent.mkdir(parents=True)
    path.write_text("") if what == "file" else path.symlink_to(victim)
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r"run_dir: .* \(figures\)"):
        fedskc_run(run_dir, 1, [RowNorms()]).fit()
    assert contents(tmp_path) == before
    with pytest.raises(ConfigError, match=f"{place} is a {what}"):
        fedskc_run(run_dir, 1, [RowNorms()]).fit(resume=True)
    assert list(victim.iterdir()) == []
