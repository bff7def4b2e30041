"""Damaged half-finished runs are refused, reported, or end with the same bytes; see fuzzing.py."""

import os
import time
from pathlib import Path

import fuzzing
import pytest
from fuzzing import RUNS, Case, Verdict, each_apart, flips, fuzz, prepare, whole_files

QUICK = ["figures"]
LOST = Case("W&B", "run/wandb/run.json", "remove")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return a folder with the quick runs, complete and half-finished."""
    root = tmp_path_factory.mktemp("fuzz")
    prepare(root, QUICK, 2)
    return root


def wrong(cases, verdicts):
    return [f"{case}: {verdict.why}" for case, verdict in zip(cases, verdicts, strict=True) if verdict.kind == "WRONG"]


@pytest.mark.thorough
def test_few_flipped_bits_and_truncated_files(root):
    cases = flips(root, QUICK, 8, seed=0) + whole_files(root, QUICK, 1, others=False)
    verdicts = fuzz(root, cases)
    assert wrong(cases, verdicts) == []
    assert {"refused", "warned", "identical"} <= {verdict.kind for verdict in verdicts}


@pytest.mark.slow
def test_many_flipped_bits_and_all_other_damage(tmp_path):
    prepare(tmp_path, RUNS, 2)
    cases = flips(tmp_path, RUNS, 400, seed=1) + whole_files(tmp_path, RUNS, 10)
    assert wrong(cases, fuzz(tmp_path, cases)) == []


@pytest.mark.slow
def test_missing_run_json_is_warned_of(tmp_path):
    prepare(tmp_path, [LOST.run], 1)
    assert wrong([LOST], fuzz(tmp_path, [LOST])) == []


# --- The judge of the fuzzing ---


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["final/summary.json", "clients.csv"])
def test_judge_finds_another_result(name, root, tmp_path):
    whole, run = root / "figures" / "whole" / "run", tmp_path / "run"
    fuzzing.shutil.copytree(whole, run)
    assert fuzzing.other_ends(run, whole, name, told=False) == []
    assert "metrics.csv" in fuzzing.other_ends(root / "figures" / "half" / "run", whole, "", told=True)
    fuzzing.flip(run / name, 8 * ((run / name).read_bytes().index(b"\n") + 4))
    assert fuzzing.other_ends(run, whole, name, told=True) == [name]


@pytest.mark.thorough
def test_judge_finds_a_damaged_newest_checkpoint(root, tmp_path):
    whole, run = root / "figures" / "whole" / "run", tmp_path / "run"
    fuzzing.shutil.copytree(whole, run)
    older, newest = sorted(run.glob("checkpoints/*"))[-2:]
    fuzzing.flip(older / "state.pt", 5000)
    assert fuzzing.other_ends(run, whole, "", told=False) == []
    fuzzing.flip(newest / "state.pt", 5000)
    assert fuzzing.other_ends(run, whole, "", told=False) == ["checkpoint 5"]


def test_judge_accepts_only_one_line_refusals():
    line = ["fl-lightning: error: metrics.csv is damaged"]
    assert fuzzing.judge_refusal(2, line, line, []) == Verdict("refused", line[0])
    for given in ((1, line, line, []), (2, line * 2, line, []), (2, line, [], []), (2, line, line, ["metrics.csv"])):
        assert fuzzing.judge_refusal(*given).kind == "WRONG"


@pytest.mark.parametrize(
    ("line", "named"),
    [("run/config.yaml is no config", True), ("seed (0 -> 4)", True), ("batch_size (16 -> 4)", False)],
)
def test_judge_accepts_the_changed_setting_as_the_name_of_its_file(line, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    Path("run/config.yaml").write_text("seed: 4\nbatch_size: 16\nmodel:\n")
    case = Case("figures", "run/config.yaml", "flip", 3)
    assert fuzzing.names_the_file(line, case, b"seed: 0\nbatch_size: 16\nmodel:\n") == named


def act(what):
    if what == "sleeps":
        time.sleep(600)
    if what == "ends":
        os._exit(3)
    return f"{what} in {os.getpid()}"


@pytest.mark.thorough
def test_case_that_hangs_or_exits_does_not_affect_others(monkeypatch):
    monkeypatch.setattr(fuzzing, "PATIENCE", 5.0)
    one, hung, other, ended, last = each_apart(act, [(what,) for what in ("a", "sleeps", "b", "ends", "c")], 1)
    assert (hung, ended) == (None, 3)
    assert [each.split()[0] for each in (one, other, last)] == ["a", "b", "c"]
    assert len({one.split()[-1], other.split()[-1], last.split()[-1]}) == 3
    assert [fuzzing.lost(end) for end in (hung, ended)] == ["was not over after 5 s", "its process ended with 3"]
