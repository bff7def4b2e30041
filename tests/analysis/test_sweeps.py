"""The shipped sweep files: W&B accepts them, and the command lines of its agent run."""

import json
import os
import re
from importlib import metadata
from itertools import product
from pathlib import Path

import jsonschema
import pytest
import wandb
import yaml
from commands import rows, run, summary
from reduced import reduced
from wandb import wandb_agent
from wandb_files import Logged, of_kind, summary_of, values

from fl_lightning.analysis.study.sweep_file import parse_sweep, sweep_path
from fl_lightning.cli.experiment import experiment_parser, plain_config
from fl_lightning.core.config import flatten
from fl_lightning.core.config_files import config_path

try:
    from wandb.apis.public.sweeps import _validate_config_and_fill_distribution as checked_by_wandb
except ImportError:  # W&B before 0.30
    from wandb.sdk.internal.internal_api import Api

    checked_by_wandb = Api._validate_config_and_fill_distribution

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "sweeps").glob("*.yaml"))
ENVIRONMENT = {"FL_CONFIG": "digits_fedskc.yaml"}  # the config of sweeps that take it from the environment
KEYS = {"program", "project", "name", "command", "method", "metric", "parameters"}


@pytest.fixture(params=SWEEPS, ids=lambda path: path.stem)
def sweep(request):
    return request.param


@pytest.fixture
def agent_folder(tmp_path, monkeypatch):
    """Change to an empty folder, with the environment that W&B's agent sets."""
    monkeypatch.chdir(tmp_path)
    wandb.teardown()  # otherwise it would end in the copied environment, and the real one would still name its service
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ |= {"WANDB_DIR": str(tmp_path), "WANDB_SWEEP_ID": "sweep1", **ENVIRONMENT}
    return tmp_path


class CapturedProcess:
    """Replaces the process that the agent would start."""

    def __init__(self, command, env, forward_signals):
        self.command, self.env = command, env


def content_of(sweep):
    return yaml.safe_load(sweep.read_text())


def trials(sweep):
    """Yield every trial of a grid, in W&B's form."""
    parameters = content_of(sweep)["parameters"]
    for chosen in product(*(parameter["values"] for parameter in parameters.values())):
        yield {name: {"value": value} for name, value in zip(parameters, chosen, strict=True)}


def agent_process(sweep, trial, monkeypatch):
    """Return the process that W&B's agent starts for a trial: its command line and environment."""
    monkeypatch.setattr(wandb_agent, "AgentProcess", CapturedProcess)
    given = content_of(sweep)
    agent = wandb_agent.Agent(api=None, queue=None)
    agent._sweep_command = given["command"]
    order = {"type": "run", "run_id": "run1", "program": given["program"], "args": trial}
    response = agent._process_command(order)
    assert "exception" not in response, response
    return agent._run_processes["run1"]


def config_of(sweep):
    name = content_of(sweep)["command"][3]
    return ENVIRONMENT["FL_CONFIG"] if name == "${envvar:FL_CONFIG}" else name


def test_each_parameter_of_the_papers_has_a_sweep():
    swept = {
        (Path(config_of(path)).stem.split("_")[1], name) for path in SWEEPS for name in content_of(path)["parameters"]
    }
    assert swept >= {
        ("fedskc", "algorithm.tau"),
        ("fedskc", "algorithm.similar_clients"),
        ("feddw", "algorithm.mu"),
        ("fedsiam", "algorithm.mu"),
        ("ua", "algorithm.mu"),
        ("ua", "algorithm.th_i"),
        ("cwfedavg", "algorithm.lam"),
        ("fedskc", "scenario.partition.alpha"),
        ("fedskc", "seed"),
    }


def test_a_sweep_file_follows_wandbs_schema(sweep):
    """Only the schema file of W&B's package `sweeps` is read, because the package needs an older numpy."""
    try:
        schema = metadata.distribution("sweeps").locate_file("sweeps/config/schema.json")
    except metadata.PackageNotFoundError:
        pytest.skip("needs W&B's schema: pip install --no-deps sweeps")
    validator = jsonschema.Draft7Validator(json.loads(Path(str(schema)).read_text()))
    assert [error.message for error in validator.iter_errors(content_of(sweep))] == []
    assert list(validator.iter_errors({**content_of(sweep), "method": "girdle"}))


def test_wandbs_client_accepts_a_sweep_file(sweep):
    given = content_of(sweep)
    assert checked_by_wandb(given) == given
    assert given.keys() == KEYS
    assert given["name"] == sweep.stem
    assert (given["program"], given["method"], given["metric"]["goal"]) == ("fl-lightning", "grid", "maximize")
    for parameter in given["parameters"].values():
        assert parameter.keys() == {"values"}
        assert len(parameter["values"]) == len(set(parameter["values"])) >= 2
        assert None not in parameter["values"]  # W&B would write the word None


def test_the_documented_file_with_seeds_is_valid_here_and_passes_wandbs_client():
    """W&B's server warns of `seeds`, a key that its schema does not have."""
    given = yaml.safe_load(
        re.findall(r'```yaml title="lr.yaml"\n(.*?)```', (ROOT / "docs/sweeps.md").read_text(), re.S)[0]
    )
    assert parse_sweep(given, Path("lr.yaml")).seeds == (0, 1, 2)
    assert checked_by_wandb(given) == given


def test_the_first_line_of_a_sweep_file_describes_it(sweep):
    assert re.fullmatch(r"# \S.{20,117}[.]", sweep.read_text().splitlines()[0])


@pytest.mark.thorough
@pytest.mark.fast_cases(1)
def test_each_trial_is_a_valid_config(sweep, agent_folder, monkeypatch):
    """Each parameter is a key of the resolved config, with the trial's value."""
    parser = experiment_parser()
    for trial in trials(sweep):
        program, command, *words = agent_process(sweep, trial, monkeypatch).command
        assert (program, command, words[0]) == ("fl-lightning", "fit", "--config")
        taken = flatten(plain_config(parser.parse_args(["--config", config_path(words[1]), *words[2:]]), parser))
        assert {name: taken[name] for name in trial} == {name: chosen["value"] for name, chosen in trial.items()}
        assert taken["logger.offline"] is False


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:.*W&B sweep")  # the run has no logger
@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.slow), -1], ids=["first", "last"])
def test_the_command_line_of_wandbs_agent_runs(sweep, which, agent_folder, monkeypatch):
    chosen = list(trials(sweep))[which]
    command = agent_process(sweep, chosen, monkeypatch).command
    small = reduced(config_of(sweep), agent_folder, monkeypatch)
    if "scenario.partition.alpha" in chosen:
        small.remove("--scenario.clients=2")  # the digits suffice for the config's number of clients
    outcome = run(*command[1:], *small, "--run_dir", agent_folder / "run")
    assert outcome.code == 0, outcome.err
    columns = rows(agent_folder / "run")[0].keys() | summary(agent_folder / "run").keys()
    assert content_of(sweep)["metric"]["name"] in columns


@pytest.mark.fast_cases(1)
def test_a_local_sweep_has_the_command_lines_of_wandbs_agent(sweep, agent_folder, monkeypatch):
    """The only difference is that W&B is offline."""
    ours, theirs = parse_sweep(content_of(sweep), sweep), list(trials(sweep))
    assert len(ours.grid()) == len(theirs)
    for params, trial in zip(ours.grid(), theirs, strict=True):
        _, command, *words = agent_process(sweep, trial, monkeypatch).command
        place = words.index("--logger.offline") + 1
        assert (command, words[place]) == ("fit", "false")
        assert list(ours.command(params)) == [*words[:place], "true", *words[place + 1 :]]


def test_a_file_in_the_working_folder_is_preferred_to_a_shipped_sweep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = sweep_path("fedskc_tau.yaml")
    assert shipped == sweep_path("fedskc_tau") != Path("fedskc_tau.yaml")
    assert shipped.read_text() == (ROOT / "sweeps" / "fedskc_tau.yaml").read_text()
    Path("fedskc_tau.yaml").write_text("{}")
    assert sweep_path("fedskc_tau.yaml") == Path("fedskc_tau.yaml")


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:unclosed file.*config-run1:ResourceWarning")  # W&B leaves its own file open
@pytest.mark.filterwarnings("ignore:.*W&B sweep")  # the run is offline
def test_a_trial_is_logged_as_a_run_of_the_wandb_sweep(agent_folder, monkeypatch):
    """The run has the agent's id, and the metric and parameters under the sweep's names."""
    sweep = ROOT / "sweeps" / "heterogeneity.yaml"
    process = agent_process(sweep, {"scenario.partition.alpha": {"value": 0.5}, "seed": {"value": 2}}, monkeypatch)
    for name, text in process.env.items():
        monkeypatch.setitem(os.environ, name, text)
    small = [word for word in reduced("digits_fedskc.yaml", agent_folder, monkeypatch) if word != "--logger=null"]
    wandb.teardown()  # W&B reads the environment only at its start
    try:
        outcome = run(*process.command[1:], *small, "--logger.offline", "true", "--run_dir", agent_folder / "run")
    finally:
        wandb.teardown()
    assert outcome.code == 0, outcome.err
    logged = Logged(agent_folder / "run")
    (begun,) = of_kind(logged.records, "run")
    assert (begun.run_id, begun.sweep_id) == ("run1", "sweep1")
    config = values(begun.config.update)
    assert (config["scenario.partition.alpha"], config["seed"]) == (0.5, 2)
    assert config["scenario"]["partition"]["alpha"] == 0.5  # nested, as in other runs
    assert isinstance(summary_of(logged.records)[content_of(sweep)["metric"]["name"]], float)
    assert re.fullmatch("digits_fedskc-alpha=0.5,.+-seed2", begun.display_name)
    assert (agent_folder / "run" / "config.yaml").read_text().count("seed: 2") == 1
