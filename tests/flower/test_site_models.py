"""At the end of a run, each client's model is written on the client's own machine, if its site names a file."""

import pytest
import torch
import yaml
from experiments import experiment, same_bytes
from flower_grid import flower, remote_experiment  # noqa: F401
from flower_tables import start, table_node, use_method
from methods import METHODS

from fl_lightning import ClientModule, TableSchema
from fl_lightning.cli.commands.node import read_site
from fl_lightning.core.errors import ConfigError

pytestmark = [pytest.mark.usefixtures("flower", "one_thread"), pytest.mark.filterwarnings("ignore:scenario.dataset.f")]


@pytest.mark.parametrize("name", ["FedRep", "PerFedAvg", "UAPDFL"])
def test_each_machine_gets_the_model_that_the_simulation_gives_its_client(tmp_path, name):
    method, own = METHODS[name]
    alone = experiment(tmp_path / "alone", method(), rounds=2, **own)
    alone.fit()
    remote, grid = remote_experiment(tmp_path / "remote", alone, method, folder=tmp_path, rounds=2, **own)
    written = {}
    for node in grid.nodes.values():
        node.write = lambda module, data, text, _, client=node.site.client: written.update({client: (module, text)})
    remote.fit()
    for client in range(alone.clients):
        module, text = written[client]
        assert same_bytes(module.backbone.state_dict(), alone.client_module(client).backbone.state_dict())
        assert module.context.round == 2
        assert text == "the experiment"


def test_a_site_names_a_file_in_any_format(tmp_path, app, capsys):
    use_method(app, "FedRep")
    start(app, [table_node(app, 0, export="model.ts"), table_node(app, 1, export="model.ckpt")])
    assert "wrote model.ts: this client's model after round 1" in capsys.readouterr().out
    assert not (tmp_path / "run" / "final" / "model.pt").exists()  # FedRep has no global model
    module = ClientModule.load_from_checkpoint(tmp_path / "model.ckpt")
    assert module.backbone.state_dict()["encoder.1.weight"].shape == (5, 5)
    rows = TableSchema.from_json((app / "schema.json").read_text()).examples(4)
    assert torch.jit.load(tmp_path / "model.ts")(rows).shape == (4, 2)  # raw rows


def test_a_resumed_run_that_had_ended_writes_the_model_again(tmp_path, app):
    nodes = [table_node(app, 0, export="model.pt"), table_node(app, 1)]
    start(app, nodes)
    before = torch.load(tmp_path / "model.pt")
    (tmp_path / "model.pt").unlink()
    start(app, nodes, resume=True)
    assert same_bytes(before, torch.load(tmp_path / "model.pt"))
    assert (tmp_path / "model.schema.json").read_bytes() == (app / "schema.json").read_bytes()


def test_a_model_that_cannot_be_written_does_not_end_the_run(tmp_path, app):
    message = r"^client 1: its model was not stored there: export: client-0\.csv/model\.pt cannot be"
    with pytest.warns(UserWarning, match=message):
        start(app, [table_node(app, 0), table_node(app, 1, export="client-0.csv/model.pt")])
    assert (tmp_path / "run" / "final" / "summary.json").exists()


def test_an_unknown_format_is_refused_before_the_node_connects(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "client.yaml").write_text(yaml.safe_dump({"client": 0, "dataset": "Digits", "export": "model.bin"}))
    with pytest.raises(ConfigError, match=r"^export: model\.bin .*\.pt"):
        read_site(tmp_path / "client.yaml")
