"""How `fit` becomes the server of a run on a SuperLink."""

import threading
from types import SimpleNamespace

import pytest

from fl_lightning.core.errors import ConfigError
from fl_lightning.engines.flower_adapter import RunStopped, acquire_run, serve_run
from fl_lightning.flower.server_run import APP_FILES

pytest.importorskip("flwr")
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern")  # Flower's


@pytest.fixture
def superlink(monkeypatch):
    """A SuperLink with runs that wait for their server. `StartRun` adds run 7."""
    from flwr.supercore.runtime import RuntimeHttpClient

    waiting = []

    def start(request):
        waiting.append(7)
        return SimpleNamespace(run_id=7)

    def acquire(request):
        run = waiting.pop(0) if waiting else 0
        return SimpleNamespace(token=f"token of {run}" if run else "", task=SimpleNamespace(run_id=run))

    runtime = SimpleNamespace(AcquireTask=acquire, close=lambda: None)
    monkeypatch.setattr(RuntimeHttpClient, "from_server_address", lambda *address, **options: runtime)
    return SimpleNamespace(waiting=waiting, StartRun=start)


ADDRESS = ("127.0.0.1:8000", True, None)


def test_the_run_that_was_started_is_served(superlink):
    superlink.waiting += [5, 6]  # their processes were killed
    assert acquire_run(superlink, ADDRESS, APP_FILES) == "token of 7"


def test_a_superlink_that_starts_the_server_itself_is_refused(superlink):
    superlink.StartRun = lambda request: SimpleNamespace(run_id=7)  # and the run is not waiting any more
    message = (
        r"^engine.superlink: the SuperLink has started the server of the run itself. Start it with --isolation proc"
    )
    with pytest.raises(ConfigError, match=message):
        acquire_run(superlink, ADDRESS, APP_FILES)


@pytest.fixture
def grid(monkeypatch):
    """A grid that notes how its run ended."""
    from flwr.proto.runtime_pb2 import PullTaskInputResponse, SendTaskHeartbeatResponse
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, None)
    ends = []
    client = SimpleNamespace(
        PullTaskInput=lambda request: PullTaskInputResponse(task_id=3),
        PushTaskOutput=ends.append,
        SendTaskHeartbeat=lambda request: SendTaskHeartbeatResponse(success=True),
    )
    invoker = SimpleNamespace(should_giveup=None)
    return SimpleNamespace(_runtime_client=client, _retry_invoker=invoker, set_run=lambda run: None, ends=ends)


def test_the_superlink_learns_how_the_run_ended(grid):
    with serve_run(grid):
        assert not grid.ends
    with pytest.raises(ConfigError), serve_run(grid):
        raise ConfigError("rounds: wrong")
    assert [(end.sub_status, end.details) for end in grid.ends] == [("completed", ""), ("failed", "rounds: wrong")]


def test_a_run_that_the_superlink_has_ended_is_one_line(grid):
    from flwr.supercore.run import RunNotRunningException
    from httpx import HTTPStatusError

    errors = {"it is not running": RunNotRunningException(), "401": HTTPStatusError("401", request=None, response=None)}
    for reason, error in errors.items():
        message = f"^the SuperLink has ended the run: {reason}. Continue it with fl-lightning fit --resume"
        with pytest.raises(RunStopped, match=message), serve_run(grid):
            raise error


def test_a_run_ends_while_the_superlink_is_away(grid):
    from httpx import ConnectError

    def away(request):
        raise ConnectError("refused")

    grid._runtime_client.PushTaskOutput = away
    with serve_run(grid):
        pass
    assert grid._retry_invoker.should_giveup(ConnectError("refused"))


def test_no_heartbeat_follows_the_end_of_a_run(grid):
    """Flower answers a heartbeat that is refused with SIGINT, which would hide the run's own message."""
    beating = []
    grid._runtime_client.PushTaskOutput = lambda request: beating.extend(
        thread.name for thread in threading.enumerate() if "(_run)" in thread.name
    )
    with serve_run(grid):
        assert [thread.name for thread in threading.enumerate() if "(_run)" in thread.name]
    assert not beating
