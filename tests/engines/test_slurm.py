"""The sbatch file of the examples with stand-ins for Slurm and Ray: killed and requeued, with the same bytes."""

import signal
import sys
from pathlib import Path

import pytest
from commands import TINY, untimed_rows
from killed_runs import results_of
from ray_nodes import environment, kill_tree, start, wait_for

from fl_lightning.cli.main import main

SBATCH = Path(__file__).parents[2] / "examples" / "slurm_ray.sbatch"
JOB = 4711
PROGRAMS = {
    "srun": 'while [[ "$1" == --* ]]; do shift; done; exec "$@"',
    "scontrol": 'case "$1" in show) printf "localhost\\nlocalhost\\n" ;; requeue) echo "$2" >> requeued ;; esac',
    "ray": f"""
        echo "$*" >> started
        for word in "$@"; do
            case $word in --port=*) exec {sys.executable} -m http.server "${{word#--port=}}" ;; esac
        done
        exec sleep 1000
    """,
    "fl-lightning": f"""
        words=()
        while [ $# -gt 0 ]; do
            case "$1" in --engine*) shift 2 ;; *) words+=("$1"); shift ;; esac
        done
        exec {sys.executable} -m fl_lightning "${{words[@]}}"
    """,
}
"""Stand-ins: `srun` runs a command on this machine, `ray` only listens, and `fit` trains one client after another."""


def start_job(folder: Path):
    """Start the sbatch file as Slurm does, on two machines without GPUs."""
    job = {"SLURM_JOB_ID": str(JOB), "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "localhost"}
    variables = environment(**job)
    variables["PATH"] = f"{folder / 'bin'}:{variables['PATH']}"
    return start(["bash", SBATCH, "tiny.yaml", "--rounds", "60"], folder / "job.log", variables)


@pytest.mark.thorough
@pytest.mark.usefixtures("one_thread")
def test_a_job_is_killed_and_requeued(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    every_round = "callbacks: [{class_path: Checkpointing, init_args: {every: 1}}]\n"
    (tmp_path / "tiny.yaml").write_text(TINY + every_round)
    assert main(["fit", "--config", "tiny.yaml", "--rounds", "60", "--run_dir", "whole"]) == 0
    run = tmp_path / "runs" / f"slurm-{JOB}"
    for end in ("kill", "requeue", "finish"):
        job = start_job(tmp_path)
        try:
            if end == "finish":
                assert job.wait(300) == 0, (tmp_path / "job.log").read_text()
                break
            reached = len(untimed_rows(run)) if (run / "metrics.csv").exists() else 0
            wait_for(run / "checkpoints" / f"round-{reached + 2:06}", job)
            if end == "requeue":  # what Slurm sends before the time limit
                job.send_signal(signal.SIGUSR1)
                assert job.wait(120) == 0
        finally:
            kill_tree(job)
    assert (tmp_path / "requeued").read_text() == f"{JOB}\n"
    begun = (tmp_path / "started").read_text().splitlines()
    assert sorted("--head" in line for line in begun) == [False] * 3 + [True] * 3
    assert results_of(run) == results_of(tmp_path / "whole")
    assert untimed_rows(run) == untimed_rows(tmp_path / "whole")
