"""A deployed experiment on tables, whose clients are nodes in this process."""

from functools import partial

import yaml
from flower_grid import LocalGrid

from fl_lightning.cli.commands.node import write_model
from fl_lightning.cli.flower_app import client_experiment, run_experiment
from fl_lightning.data import Table
from fl_lightning.flower.node import Node, Site

CONFIG = """
rounds: 1
scenario:
  dataset: {class_path: Table, init_args: {path: artificial.csv, label: label, features: [age, income, town]}}
  partition: IID
  clients: 2
model: {class_path: MLP, init_args: {hidden: [5]}}
algorithm: FedAvg
optimizer: {class_path: SGD, init_args: {lr: 0.05}}
trainer: {accelerator: cpu, max_epochs: 2}
logger: null
"""


def use_method(app, method):
    """Change the method in the app's config."""
    config = yaml.safe_load((app / "experiment.yaml").read_text())
    (app / "experiment.yaml").write_text(yaml.safe_dump(config | {"algorithm": method}))


def table_node(app, client, schema=None, export=None):
    """Return the node of a client that trains on its table, encoded with the app's schema or another one."""
    dataset = Table(f"client-{client}.csv", "label", schema=str(schema or app / "schema.json"))
    folder = app.parent / f"state-{client}"
    return Node(Site(client, dataset, export=export), folder, client_experiment, partial(write_model, export))


def start(app, nodes, **options):
    """Run the app's experiment with these nodes in the folder `run`."""
    run_experiment(app / "experiment.yaml", LocalGrid(nodes), {"run-dir": str(app.parent / "run"), **options})
