"""Tables on the clients' own machines: one encoding everywhere, which the server's run has for exports."""

import pytest
import torch
import yaml
from commands import run
from flower_grid import flower  # noqa: F401
from flower_tables import start, table_node, use_method

from fl_lightning import open_run
from fl_lightning.cli.flower_app import client_experiment
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import TableSchema

pytestmark = [pytest.mark.usefixtures("flower"), pytest.mark.filterwarnings("ignore:scenario.dataset.features")]


def test_deploy_writes_the_schema_of_the_simulation(tmp_path, app):
    assert run("fit", "--config", "tables.yaml", "--run_dir", "simulation").code == 0
    assert (app / "schema.json").read_bytes() == (tmp_path / "simulation" / "schema.json").read_bytes()
    dataset = yaml.safe_load((app / "experiment.yaml").read_text())["scenario"]["dataset"]
    assert dataset["init_args"]["schema"] == str(app / "schema.json")
    again = run("deploy", "--config", "tables.yaml", "--out", "other")
    assert "ca.crt and other/schema.json" in again.out


def test_a_run_has_the_schema_and_its_model_takes_raw_rows(tmp_path, app):
    start(app, [table_node(app, client) for client in range(2)])
    schema = TableSchema.from_json((tmp_path / "run" / "schema.json").read_text())
    assert schema.digest == TableSchema.from_json((app / "schema.json").read_text()).digest
    assert "schema" in (tmp_path / "run" / "config.yaml").read_text()
    done = run("export", "run", "--prepare", "-o", "model.ts")
    assert done.code == 0, done.err
    assert "raw rows" in done.out
    rows, network = schema.examples(4), open_run("run").evaluator.global_module(1).backbone.eval()
    torch.testing.assert_close(torch.jit.load(tmp_path / "model.ts")(rows), network(schema.encode(rows)))


@pytest.mark.parametrize("wrong", [1, 0])
def test_another_encoding_is_refused(tmp_path, app, wrong):
    other = tmp_path / "other.json"
    other.write_text((app / "schema.json").read_text().replace("Bern", "Thun"))
    schemas = [app / "schema.json", other] if wrong else [other, other]
    who = (
        "client 1: its data are unlike those of client 0: " if wrong else "scenario.dataset.schema: the clients' tables"
    )
    with pytest.raises(ConfigError, match=f"^{who}.*another schema. Give the server and all clients the same schema"):
        start(app, [table_node(app, client, schema) for client, schema in enumerate(schemas)])
    assert not (tmp_path / "run").exists()


def test_the_schema_does_not_leave_the_server(tmp_path, app):
    nodes = [table_node(app, client) for client in range(2)]
    experiments = []
    for each in nodes:
        each.build = lambda text, trusted: experiments.append(text) or client_experiment(text, trusted)
    start(app, nodes)
    assert len(experiments) == 2
    assert all(yaml.safe_load(text)["scenario"]["dataset"]["init_args"]["schema"] is None for text in experiments)


@pytest.mark.parametrize(
    ("method", "words", "message"),
    [
        ("FedAvg", ("export", "run", "--client", "1", "-o", "m.onnx"), "Leave out --client to export the global model"),
        ("FedRep", ("export", "run", "-o", "m.onnx"), "client: the clients' models are on their own machines. FedRep"),
        ("FedRep", ("test", "run"), "algorithm: FedRep has no global model to test. The clients' metrics are"),
    ],
)
def test_what_only_the_clients_machines_have_is_named(tmp_path, app, method, words, message):
    use_method(app, method)
    start(app, [table_node(app, client) for client in range(2)])
    done = run(*words)
    assert done.code == 2
    assert message in done.err
