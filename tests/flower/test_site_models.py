"""At the end of a run, each client's model is written on the client's own machine, if its site names a file."""

from functools import partial

import pytest
import torch
import yaml
from commands import run
from experiments import experiment, same_bytes
from flower_grid import LocalGrid, flower, nodes_of, remote_experiment  # noqa: F401
from layouts import table, write_csv
from methods import METHODS

from fl_lightning import ClientModule
from fl_lightning.cli.commands.node import read_site, write_model
from fl_lightning.cli.flower_app import client_experiment, run_experiment
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import Table
from fl_lightning.flower.node import Node, Site

pytestmark = [pytest.mark.usefixtures("flower", "one_thread"), pytest.mark.filterwarnings("ignore:scenario.dataset.f")]

CONFIG = """
rounds: 2
scenario:
  dataset: {class_path: Table, init_args: {path: artificial.csv, label: label, features: [age, income, town]}}
  partition: IID
  clients: 2
model: {class_path: MLP, init_args: {hidden: [5]}}
algorithm: FedRep
optimizer: {class_path: SGD, init_args: {lr: 0.05}}
trainer: {accelerator: cpu, max_epochs: 2}
logger: null
"""


@pytest.mark.parametrize("name", ["FedRep", "PerFedAvg", "UAPDFL"])
def test_each_machine_gets_the_model_that_the_simulation_gives_its_client(tmp_path, name):
    method, own = METHODS[name]
    alone = experiment(tmp_path / "alone", method(), rounds=2, **own)
    alone.fit()
    remote, grid = remote_experiment(tmp_path / "remote", alone, method, folder=tmp_path, rounds=2, **own)
    written = {}
    for node in grid.nodes.values():
        node._write = lambda module, data, text, client=node.site.client: written.update({client: (module, text)})
    remote.fit()
    for client in range(alone.clients):
        module, text = written[client]
        assert same_bytes(module.backbone.state_dict(), alone.client_module(client).backbone.state_dict())
        assert module.round == 2
        assert text == "the experiment"


@pytest.fixture
def app(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("artificial", "client-0", "client-1")):
        write_csv(tmp_path / f"{name}.csv", table(seed=seed))
    (tmp_path / "tables.yaml").write_text(CONFIG)
    assert run("deploy", "--config", "tables.yaml").code == 0
    return tmp_path / "app"


def nodes(app, *exports):
    for client, export in enumerate(exports):
        site = Site(client, Table(f"client-{client}.csv", "label", schema=str(app / "schema.json")), export=export)
        yield Node(site, app.parent / f"state-{client}", client_experiment, partial(write_model, export))


def start(app, *exports, **options):
    grid = LocalGrid([*nodes(app, *exports)])
    run_experiment(app / "experiment.yaml", grid, {"run-dir": str(app.parent / "run"), **options})


def test_a_site_names_a_file_in_any_format(tmp_path, app, capsys):
    start(app, "model.ts", "model.ckpt")
    assert "wrote model.ts: this client's model after round 2" in capsys.readouterr().out
    assert not (tmp_path / "run" / "final" / "model.pt").exists()  # FedRep has no global model
    module = ClientModule.load_from_checkpoint(tmp_path / "model.ckpt")
    assert module.backbone.state_dict()["encoder.1.weight"].shape == (5, 5)
    rows = Table("client-0.csv", "label", schema=str(app / "schema.json")).checked().schema.examples(4)
    assert torch.jit.load(tmp_path / "model.ts")(rows).shape == (4, 2)  # raw rows


def test_a_resumed_run_that_had_ended_writes_the_model_again(tmp_path, app):
    start(app, "model.pt", None)
    before = torch.load(tmp_path / "model.pt")
    (tmp_path / "model.pt").unlink()
    start(app, "model.pt", None, resume=True)
    assert same_bytes(before, torch.load(tmp_path / "model.pt"))
    assert (tmp_path / "model.schema.json").read_bytes() == (app / "schema.json").read_bytes()


def test_a_model_that_cannot_be_written_does_not_end_the_run(tmp_path, app):
    with pytest.warns(
        UserWarning, match=r"^client 1: its model was not stored there: export: client-0\.csv/model\.pt cannot be"
    ):
        start(app, None, "client-0.csv/model.pt")
    assert (tmp_path / "run" / "final" / "summary.json").exists()


def test_an_unknown_format_is_refused_before_the_node_connects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client.yaml").write_text(yaml.safe_dump({"client": 0, "dataset": "Digits", "export": "model.bin"}))
    with pytest.raises(ConfigError, match=r"^export: model\.bin does not end in one of \.pt"):
        read_site(tmp_path / "client.yaml")
