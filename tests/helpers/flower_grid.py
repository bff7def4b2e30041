"""A Flower grid whose machines are nodes in this process, for tests without a SuperLink."""

from dataclasses import replace
from threading import Lock

import pytest
from experiments import experiment

from fl_lightning.data import ByClient, Dataset, RemoteClients, Scenario
from fl_lightning.engines.flower import ClientLink, FlowerEngine
from fl_lightning.flower.node import Node, Site


class Held(Dataset):
    """The samples of one client of a simulation, or the global test set."""

    def __init__(self, data, train, test):
        self.arguments = data, train, test

    def load(self):
        data, train, test = self.arguments
        parts = data.x_train[train], data.y_train[train], data.x_train[test], data.y_train[test]
        return replace(data, **dict(zip(("x_train", "y_train", "x_test", "y_test"), parts, strict=True)))


class TestSet(Dataset):
    """The global test set of a simulation."""

    __test__ = False

    def __init__(self, data):
        self.data = data

    def load(self):
        return replace(self.data, x_train=self.data.x_test[:1], y_train=self.data.y_test[:1])


class LocalGrid:
    """Nodes by the ids of their machines. A message is answered when its answer is pulled.

    Attributes:
        away: Machines that answer nothing.
        lost: Machines that lose the next message.
        unreachable: Machines whose next task Flower answers with an error.
        reason: The text of that error.
        change: Called with the records of each answer but the last; returns those that arrive.
        kinds: The kinds of the messages: `query`, `train`, or `model` for those with the final models.
    """

    def __init__(self, nodes):
        self.nodes = {100 + number: node for number, node in enumerate(nodes)}
        self.away, self.lost, self.unreachable = set(), set(), set()
        self.reason = "the node is away"
        self.change = lambda machine, records: records
        self.messages, self.count = {}, 0
        self.lock = Lock()
        self.kinds = []

    def get_node_ids(self):
        return [machine for machine in self.nodes if machine not in self.away]

    def push_messages(self, messages):
        names = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"m{self.count}"
            self.kinds.append("model" if is_last(message) else message.metadata.message_type)
            names.append(f"m{self.count}")
            machine = message.metadata.dst_node_id
            if machine in self.lost and message.metadata.message_type == "train":
                self.lost.remove(machine)
            else:
                self.messages[names[-1]] = message
        return names

    def pull_messages(self, names):
        with self.lock:  # the engine pulls in several threads, and clients use the process's random state
            return self._pull(names)

    def _pull(self, names):
        from flwr.app import Error, Message

        answers = []
        for name in names:
            message = self.messages.get(name)
            if message and message.metadata.dst_node_id not in self.away:
                del self.messages[name]
                machine = message.metadata.dst_node_id
                if machine in self.unreachable and message.metadata.message_type == "train":
                    self.unreachable.remove(machine)
                    answers.append(Message(Error(code=3, reason=self.reason), reply_to=message))
                    continue
                records = self.nodes[machine].answer(message.content)
                records = records if is_last(message) else self.change(machine, records)
                answers.append(Message(records, reply_to=message))
        return answers


def is_last(message):
    """Return whether a message has the client's final model."""
    return dict(message.content["values"]).get("keep_model", False)


def nodes_of(data, folder, build):
    """Return a node for each client of a simulation's data."""
    sites = [Site(k, Held(data.data, shard.train, shard.test)) for k, shard in enumerate(data.shards)]
    return [Node(site, folder / f"node-{site.client}", build) for site in sites]


def remote_experiment(run_dir, simulated, method, grid=None, folder=None, test=True, engine=None, **options):
    """Return an experiment on the data of a simulation, held by nodes in this process, and its grid.

    Args:
        run_dir: The run's folder.
        simulated: A simulation that is built.
        method: Returns a new object of the method.
        grid: The grid of an earlier experiment. By default a new one.
        folder: Folder of new nodes.
        test: Whether the server has the global test set.
        engine: The engine; by default one without limits.
        **options: Further options of the experiment. A scenario is that of the simulation.
    """
    options.pop("scenario", None)
    data, clients = simulated.data, simulated.clients
    described = []

    def scenario():
        remote = RemoteClients(clients, described, TestSet(data.data) if test else None)
        return Scenario(remote, ByClient(), clients, objective=data.objective)

    def build(text, trusted):
        return experiment(folder / "unused", method(), scenario=scenario(), **options)

    grid = grid or LocalGrid(nodes_of(data, folder, build))
    link = ClientLink(grid)
    described += link.find(clients, 5, print)
    link.expected = link.find(clients, 0, print)
    engine = engine or FlowerEngine()
    run = experiment(run_dir, method(), scenario=scenario(), engine=engine, **options)
    engine.connect(link, "the experiment")
    return run, grid


@pytest.fixture
def flower(monkeypatch):
    """Flower, outside of an app, without waiting for machines."""
    pytest.importorskip("flwr")
    from flwr.supercore.task_identity import TaskIdentity

    import fl_lightning.engines.flower as module

    monkeypatch.setattr(TaskIdentity, "_run_id", 1)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 1)
    monkeypatch.setattr(module, "POLL", 0.0)
    monkeypatch.setattr(module, "ASK", 0.05)
    monkeypatch.setattr(module, "ASK_AGAIN", 0.1)
