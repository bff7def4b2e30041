"""Options of callbacks and loggers: wrong ones are refused before a run folder is created, correct ones work."""

import json
import math
import os
import re
import shutil
from functools import partial
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import wandb
import yaml
from commands import TINY, contents, run, tiny
from experiments import check_metric_names, client_series, digits, experiment, same_bytes
from methods import FEW_QUICK, METHODS
from torch import nn

from fl_lightning.algorithms import FedAvg, FedBABU, FedNH, FedPer, Local, PeerFedPer, Proximal
from fl_lightning.algorithms.aggregators import WeightedMean
from fl_lightning.callbacks import (
    AggregationWeights,
    BytesByRound,
    Checkpointing,
    ClassRelations,
    ClientDrift,
    ClusterNorms,
    CommunicationMeter,
    EarlyStopping,
    KnowledgeMap,
    RoundCallback,
    RowNorms,
    UnitDivergence,
)
from fl_lightning.callbacks.figures import trained_model
from fl_lightning.callbacks.monitor import round_metrics
from fl_lightning.core.errors import ConfigError
from fl_lightning.data import IID, Digits, Dirichlet, Scenario, Table
from fl_lightning.evaluation.evaluation import Evaluation
from fl_lightning.evaluation.round_metrics import RoundMetrics
from fl_lightning.loggers.wandb import NOTE, Labels, WandbRoundLogger, add_checksum
from fl_lightning.models import Backbone

FIT = ["fit", "--config", "tiny.yaml", "--run_dir", "run", "--rounds", "1"]
WANDB = [*FIT, "--logger", "WandbRoundLogger"]
CSV = [*FIT, "--logger", "CSVLogger"]


def callback(name, **options):
    """Return a command line with a callback."""
    callbacks = yaml.safe_dump([{"class_path": name, "init_args": options}], default_flow_style=True, width=999)
    return [*FIT, "--callbacks", callbacks]


def case(name, words, *fragments, **env):
    """Return a case of bad input: its name, the command, parts of the message, and the environment."""
    return pytest.param(words, fragments, env, id=name)


UNKNOWN = "callbacks: Checkpointing.monitor: metric 'xyzzy' not found. Available: global/acc, global/loss, "
NO_ACCURACY = "callbacks: EarlyStopping: no round will have global/acc or client/acc_mean"
LOCAL = ["--algorithm", "Local", "--scenario.local_test", "0"]
PAIRS = "callbacks: UnitDivergence.pairs: [0, 4] is not a pair of different clients from 0 to 3"
TWO_DRIFTS = "callbacks: ClientDrift: another callback logs client_<id>/drift_cosine too. List it once."
NO_TEAM = "logger.entity: 'my team' is not the name of a W&B user or team"
CASES = [
    # Monitors
    case(
        "misspelled metric",
        callback("EarlyStopping", monitor="global/accuracy"),
        "callbacks: EarlyStopping.monitor: metric 'global/accuracy' not found. Did you mean global/acc?",
    ),
    case(
        "unknown metric",
        callback("Checkpointing", monitor="xyzzy"),
        *(UNKNOWN, "client/train_ce", "client_<id>/acc", "comm/total_bytes"),
    ),
    case("round", callback("EarlyStopping", monitor="round"), "metric 'round' not found"),
    case("unknown client", callback("EarlyStopping", monitor="client_4/acc"), "not found. Clients are 0 to 3"),
    case("no accuracy", [*callback("EarlyStopping"), *LOCAL], NO_ACCURACY, "scenario.local_test"),
    case("mode", callback("EarlyStopping", mode="best"), "mode: got 'best', expected auto | max | min"),
    # Numbers
    case("patience", callback("EarlyStopping", patience=-3), "callbacks: EarlyStopping.patience: -3 is below 1"),
    *(
        case(f"min_delta {value}", callback("EarlyStopping", min_delta=value), "callbacks: EarlyStopping.min_delta: ")
        for value in (-0.1, float("nan"), float("inf"))
    ),
    case("samples", callback("KnowledgeMap", samples=9), "callbacks: KnowledgeMap.samples: 9 is below 10"),
    case("client", callback("KnowledgeMap", client=4), "KnowledgeMap.client: no client 4. Clients are 0 to 3"),
    case("pair", callback("UnitDivergence", pairs=[[0, 1], [0, 4]]), PAIRS),
    # A class listed twice
    case("checkpointing", [*FIT, "--callbacks", "[Checkpointing, Checkpointing]"], "Checkpointing is listed twice."),
    case("figure", [*FIT, "--callbacks", "[ClientDrift, ClientDrift]"], TWO_DRIFTS),
    case("logger", [*FIT, "--logger=[CSVLogger, CSVLogger]"], "logger: CSVLogger is listed twice. List it once."),
    # W&B
    case("project", [*WANDB, "--logger.project", "a/b"], "logger.project: Invalid project name 'a/b'"),
    case("long project", [*WANDB, "--logger.project", "p" * 129], "logger.project: ", "128 characters"),
    case("job type", [*WANDB, "--logger.job_type", "j" * 65], "job_type: 65 characters", "accepts at most 64"),
    case("entity", [*WANDB, "--logger.entity", "my team"], NO_TEAM),
    case("WANDB_MODE", WANDB, "WANDB_MODE: Input should be 'online', 'offline'", WANDB_MODE="garbage"),
    case("long WANDB_RUN_ID", WANDB, "WANDB_RUN_ID: 129 characters", WANDB_RUN_ID="i" * 129),
    case("WANDB_BASE_URL", WANDB, "WANDB_BASE_URL: Input should be a valid URL", WANDB_BASE_URL="garbage"),
    # Other loggers
    case("save_dir", [*FIT, "--logger=lightning.pytorch.loggers.CSVLogger"], "logger: save_dir must be"),
    case("version", [*CSV, "--logger.version=1"], "logger.version: ", "which is not given. Give both or neither"),
    case("unknown option", [*CSV, "--logger.bad=1"], "CSVLogger has no key 'bad'. Available: save_dir"),
]


@pytest.fixture(autouse=True)
def no_wandb_variables(tmp_path, monkeypatch):
    """Redirect W&B's own folders, and remove its variables from the environment."""
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "wandb's"))


def refusal(words, folder):
    """Return the one line that a command prints for bad input, after checking that it changed no file."""
    before = contents(folder)
    code, out, err = run(*words)
    assert code == 2
    (line,) = err.splitlines()
    assert line.startswith("fl-lightning: error: ")
    assert "Traceback" not in out + err
    assert contents(folder) == before
    return line


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(("words", "fragments", "env"), CASES)
def test_bad_input_is_one_line_and_leaves_no_file(words, fragments, env, tmp_path, monkeypatch):
    (folder := tmp_path / "here").mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(folder)
    with monkeypatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        line = refusal(words, folder)
    for fragment in fragments:
        assert fragment in line


# --- Each callback and each method -----------------------------------------------------------------------------------

WATCHERS = {
    "AggregationWeights": partial(AggregationWeights, every=2),
    "BytesByRound": partial(BytesByRound, every=2),
    "ClassRelations": partial(ClassRelations, every=2),
    "ClientDrift": partial(ClientDrift, every=2),
    "ClusterNorms": ClusterNorms,
    "CommunicationMeter": CommunicationMeter,
    "EarlyStopping": EarlyStopping,
    "KnowledgeMap": partial(KnowledgeMap, every=2, samples=20),
    "RowNorms": partial(RowNorms, every=2),
    "UnitDivergence": partial(UnitDivergence, every=2),
}
FEW_SHOT = {"ProtoNet", "FedSKC with ProtoNet"}  # whose test samples have other classes
SKC = {"FedSKC", "received", "FedSKC with ProtoNet"}
WEIGHING = {*SKC, "AFL", "FedDGGA", "FedSiamDA", "CwFedAvg", "QFFL", "class shares", "cwFedAVG's code"}
HIDDEN = {  # the server does not receive a client's model as it was trained
    *("APPLE", "CriticalFL", "DisPFL", "FLoRA", "FLoRA with ranks", "FedExLoRA", "FedKD", "FlexLoRA"),
    *("FlexLoRA with ranks", "RoLoRA"),
}
UNSHARED = {"FedDistill", "FedProto", "FedTGP", "Local"}
WITHOUT_ONE_MODEL = {
    *UNSHARED,
    *("APPLE", "CFL", "DisPFL", "FedAMP", "FedBN", "FedFomo", "FedGH", "FedPAC", "FedPer", "FedRep", "FedSALoRA"),
    *("HeurFedAMP", "IFCA", "LGFedAvg", "PeerFedPer"),
}
REFUSED = {
    "AggregationWeights": METHODS.keys() - WEIGHING,
    "ClassRelations": {*WITHOUT_ONE_MODEL, "FedNH", *FEW_SHOT},  # FedNH's head is no linear layer
    "ClientDrift": HIDDEN | UNSHARED,
    "ClusterNorms": METHODS.keys() - {"CFL"},
    "KnowledgeMap": {*HIDDEN, *FEW_SHOT},
    "RowNorms": HIDDEN,
    "UnitDivergence": HIDDEN,
}


def refusals(one):
    """Return the messages of the callbacks that refuse a run before it begins, by class."""
    watchers, one.callbacks = one.callbacks, []
    one.check()
    messages, one.callbacks = {}, watchers
    for watcher in watchers:
        try:
            watcher.check(one)
        except ConfigError as error:
            messages[type(watcher).__name__] = str(error)
    return messages


def check_known_metrics(one):
    """Run an experiment, and compare the metrics of its rounds with those that were known beforehand."""
    one.fit()
    check_metric_names(one)


@pytest.mark.thorough
@pytest.mark.parametrize("name", FEW_QUICK)
def test_each_callback_works_with_a_method_or_refuses_it(tmp_path, name):
    """The metrics of the rounds are exactly those that were known beforehand."""
    method, options = METHODS[name]
    make = partial(experiment, tmp_path / "run", rounds=2, **options)
    messages = refusals(make(method(), callbacks=[watcher() for watcher in WATCHERS.values()]))
    assert messages.keys() == {watcher for watcher, names in REFUSED.items() if name in names}
    assert all(re.match(rf"callbacks: {watcher}: .+\. Leave it out", line) for watcher, line in messages.items())
    assert not (tmp_path / "run").exists()
    one = make(method(), callbacks=[watcher() for name, watcher in WATCHERS.items() if name not in messages])
    check_known_metrics(one)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {"evaluation": Evaluation("received", personal_on_global=True, max_clients=2)},
        {"on_client_failure": "drop", "evaluate_every": 2, "algorithm": Local()},
        {"scenario": Scenario(Digits(), Dirichlet(1.0, min_samples=20), 4, local_test=0.0)},
        {"scenario": Scenario(Digits(), Dirichlet(1.0, min_samples=20), 4, local_test="official")},
        {"algorithm": FedAvg(loss_terms=[Proximal(0.0)])},
    ],
    ids=["received", "drop", "no test data", "official", "a term that is off"],
)
def test_metrics_are_known_beforehand_for_every_option(tmp_path, options):
    check_known_metrics(experiment(tmp_path, rounds=2, **options))


class Convolved(Backbone):
    """A model whose head has no row of weights for each class."""

    def __init__(self, in_shape, num_classes):
        super().__init__(nn.Flatten(2), nn.Sequential(nn.Conv1d(1, num_classes, 64), nn.Flatten()), 64)


@pytest.mark.thorough
def test_callbacks_of_the_class_layer_refuse_a_model_without_one(tmp_path):
    make = partial(experiment, tmp_path, rounds=2, model=Convolved)
    watchers = [RowNorms, ClassRelations, UnitDivergence, ClientDrift, KnowledgeMap]
    refused = refusals(make(callbacks=[watcher() for watcher in watchers]))
    assert refused.keys() == {"RowNorms", "ClassRelations"}
    assert all(line.startswith(f"callbacks: {name}: ") for name, line in refused.items())
    make(callbacks=[watcher() for watcher in watchers[2:]]).fit()


class Trained(RoundCallback):
    """Compares the model that callbacks see after a client's round with the model that the client trained."""

    def __init__(self, algorithm):
        self.models, self.compared = [], 0
        upload = algorithm.upload

        def wandb_run(module, *args):
            self.models.append({name: value.clone() for name, value in module.backbone.state_dict().items()})
            return upload(module, *args)

        algorithm.upload = wandb_run

    def on_round_start(self, run, participants):
        self.models.clear()  # peers upload their initial models before round 1

    def on_client_end(self, run, result):
        found, trained = trained_model(run, result), self.models.pop(0)
        assert same_bytes({name: found[name] for name in trained}, trained)
        self.compared += 1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("method", [FedPer, FedAvg, FedBABU, FedNH, Local, partial(PeerFedPer, n_com=2)])
def test_callbacks_see_the_clients_model_as_trained(tmp_path, method):
    """Also a head that stays on the client or is common to all clients is the trained one."""
    watcher = Trained(algorithm := method())
    experiment(tmp_path, algorithm, rounds=2, callbacks=[watcher]).fit()
    assert watcher.compared == 8


# --- Monitors --------------------------------------------------------------------------------------------------------


class Score(RoundCallback):
    """Adds a metric without declaring it."""

    values = (1.0, 2.0, 3.0)

    def on_round_metrics(self, run, metrics):
        metrics["score"] = self.values[run.round - 1]


class DeclaredScore(Score):
    def metrics(self, run):
        return ["score"]


class Accuracy(Score):
    """Declares metrics whose names resemble others."""

    def metrics(self, run):
        return ["acc", "mine/train_acc", "mine/accidents"]


class Half(DeclaredScore):
    """Adds the metric only in the second round."""

    def on_round_metrics(self, run, metrics):
        if run.round == 2:
            super().on_round_metrics(run, metrics)


@pytest.mark.parametrize("own", [Score, DeclaredScore])
def test_a_users_own_metric_can_be_monitored(tmp_path, own):
    """The order of the callbacks does not matter."""
    watcher = EarlyStopping("score", patience=9)
    experiment(tmp_path, callbacks=[watcher, own()]).fit()
    assert watcher.best == 3.0


def test_an_unknown_metric_is_refused_at_the_latest_after_the_first_round(tmp_path):
    with pytest.raises(ConfigError, match=r"metric 'scor' not found\. Available: client/train_loss, .*score, "):
        experiment(tmp_path / "a", callbacks=[EarlyStopping("scor"), Score()]).fit()
    assert (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match=r"'scor' .* score"):
        experiment(tmp_path / "b", callbacks=[EarlyStopping("scor"), DeclaredScore()]).fit()
    assert not (tmp_path / "b").exists()


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("watcher", [EarlyStopping, Checkpointing])
def test_rounds_without_the_metric_do_not_count_and_give_one_warning(tmp_path, watcher):
    one = experiment(tmp_path, callbacks=[watcher(monitor="score"), Half()])
    line = f"callbacks: {watcher.__name__}.monitor: round 1 has no 'score'. Only rounds that have it count."
    with pytest.warns(UserWarning, match=re.escape(line)) as messages:
        one.fit()
    assert [str(warning.message) for warning in messages] == [line]


def test_rounds_without_an_evaluation_give_no_warning(tmp_path):
    watcher = EarlyStopping("global/acc", patience=9)
    experiment(tmp_path, rounds=4, evaluate_every=2, callbacks=[watcher]).fit()
    assert watcher.best is not None


@pytest.mark.parametrize(
    ("monitor", "mode", "right"),
    [("client/acc_std", "max", "min"), ("client_3/train_loss", "max", "min"), ("global/acc", "min", "max")],
)
def test_a_mode_in_the_wrong_direction_gives_a_warning(tmp_path, monitor, mode, right):
    watchers = [EarlyStopping(monitor, mode), Checkpointing(monitor=monitor, mode=right)]
    one = experiment(tmp_path, callbacks=[*watchers, Accuracy()])
    with pytest.warns(UserWarning, match="takes the worst") as messages:
        one.check()
    (message,) = messages
    assert re.fullmatch(f"callbacks: EarlyStopping.mode: {mode} .*{monitor} .* mode: {right}.", str(message.message))


def test_a_mode_that_contradicts_the_default_metric_is_kept_with_a_warning(tmp_path):
    """Without an accuracy, the default metric is the loss."""
    pd.DataFrame({"dose": range(80), "cost": [number**0.5 for number in range(80)]}).to_csv(tmp_path / "t.csv")
    scenario = Scenario(Table(str(tmp_path / "t.csv"), "cost"), IID(), 4)
    watchers = [EarlyStopping(mode="max"), Checkpointing()]
    one = experiment(tmp_path / "run", scenario=scenario, callbacks=watchers)
    with pytest.warns(UserWarning, match="takes the worst") as messages:
        one.check()
    (message,) = messages
    assert re.fullmatch("callbacks: EarlyStopping.mode: max .*global/loss .* mode: min.", str(message.message))
    assert [(each.metric, each.mode) for each in watchers] == [("global/loss", "max"), ("global/loss", "min")]
    assert [each.watched(RoundMetrics({"global/loss": math.nan})) for each in watchers] == [-math.inf, math.inf]


@pytest.mark.parametrize(("monitor", "mode"), [("comm/total_bytes", "max"), ("mine/accidents", "min")])
def test_metrics_without_a_known_direction_take_any_mode(tmp_path, monitor, mode):
    one = experiment(tmp_path, callbacks=[EarlyStopping(monitor, mode), Accuracy()])
    one.check()


@pytest.mark.parametrize(("mode", "values", "best"), [("max", [1.0, 2.0], 2.0), ("min", [2.0, 1.0], -1.0)])
def test_nan_is_worse_than_any_number(mode, values, best):
    """A run whose first loss is NaN can still improve; one whose loss stays NaN stops."""
    watcher = EarlyStopping("global/loss", mode, patience=2)
    evaluated = SimpleNamespace(evaluation=Evaluation(), round=1, rounds=9)
    for value in (float("nan"), *values):
        watcher.on_round_metrics(evaluated, RoundMetrics({"global/loss": value, "global/acc": 0.5}))
    assert (watcher.best, watcher.waited) == (best, 0)
    for _ in range(2):
        assert not watcher.stops
        watcher.on_round_metrics(evaluated, RoundMetrics({"global/loss": float("nan"), "global/acc": 0.5}))
    assert watcher.stops


def test_a_mode_is_max_or_min():
    with pytest.raises(ConfigError, match=r"^callbacks: EarlyStopping.mode: 'maximum'"):
        EarlyStopping(mode="maximum")


def test_metrics_of_single_clients(tmp_path):
    for client, known in (("0", True), ("03", False), ("4", False), ("9" * 5000, False)):
        watcher = EarlyStopping(f"client_{client}/acc")
        messages = refusals(experiment(tmp_path, scenario=digits(4), callbacks=[watcher]))
        assert known == (not messages)
        assert known or re.search("metric .* not found", messages["EarlyStopping"])


def test_only_the_accuracy_of_evaluated_clients_can_be_monitored(tmp_path):
    evaluation = Evaluation("received", max_clients=2)
    one = experiment(tmp_path, evaluation=evaluation)
    one.check()
    scored = {name for name in round_metrics(one) if re.fullmatch(r"client_.+/acc", name)}
    assert scored == {f"client_{client}/acc" for client in one.evaluator.scored}
    unscored = min({*range(6)} - {*one.evaluator.scored})
    for monitor, words in {
        f"client_{unscored}/acc": "Only other clients have it: a client that is not evaluated, or has",
        f"client_{unscored}/ac": "Did you mean client_<id>/acc?",
        "xyzzy": r"client_<id>/train_loss, client_<id>/acc, comm/up_bytes, comm/down_bytes, comm/total_bytes.$",
    }.items():
        messages = refusals(experiment(tmp_path, evaluation=evaluation, callbacks=[EarlyStopping(monitor)]))
        assert re.search(re.escape(words).replace(r"\$", "$"), messages["EarlyStopping"])


class OwnTerm(Proximal):
    """A user's loss term that may become active later."""

    def __init__(self):
        super().__init__(0.0)


def test_a_users_loss_term_may_become_active_later(tmp_path):
    for term, words in ((OwnTerm(), "A callback that adds"), (Proximal(0.0), "Did you mean client/train_loss")):
        monitor = f"client/train_{term.name}"
        one = experiment(tmp_path / term.name, FedAvg(loss_terms=[term]), callbacks=[EarlyStopping(monitor, "min")])
        with pytest.raises(ConfigError, match=words):
            one.fit()


class OwnAggregator(WeightedMean):
    """Records weights without declaring it."""

    def finish(self, folded, round, knowledge):
        weights = {"client": torch.tensor([0, 1]), "value": torch.tensor([0.25, 0.75])}
        return super().finish(folded, round, knowledge) | {"weights": weights}


def test_a_users_aggregator_may_have_weights_or_none(tmp_path):
    one = experiment(tmp_path / "a", FedAvg(aggregator=OwnAggregator()), rounds=1, callbacks=[AggregationWeights()])
    one.fit()
    assert client_series(tmp_path / "a", 1)["client_1/weight"] == 0.75

    class Plain(WeightedMean):
        pass

    with pytest.raises(ConfigError, match="AggregationWeights: Plain computes no weights"):
        experiment(tmp_path / "b", FedAvg(aggregator=Plain()), rounds=1, callbacks=[AggregationWeights()]).fit()


def test_early_stopping_and_checkpointing_come_last(tmp_path):
    watcher, keeper = EarlyStopping("drift/cosine_mean"), Checkpointing()
    kinds = [type(one) for one in experiment(tmp_path, callbacks=[keeper, watcher, ClientDrift()]).callbacks]
    assert kinds[-2:] == [EarlyStopping, Checkpointing]


# --- W&B -------------------------------------------------------------------------------------------------------------

LABELS = Labels("name", "group", ["FedSKC", "Digits"])


@pytest.fixture(scope="module")
def wandb_run(tmp_path_factory):
    """Return a finished run that W&B logged."""
    run_dir = tmp_path_factory.mktemp("wandb_run") / "run"
    tiny(run_dir, "--rounds", "1", "--logger", "WandbRoundLogger")
    return run_dir


def damages(content):
    """Return damaged versions of a note."""
    flipped = [content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :] for i in range(0, len(content), 37)]
    cut = [content[: len(content) * n // 10] for n in (0, 5, 9)]
    others = [b"\xff" + content, b"[" * 100_000, b"[]", b"null", b"{}", b'{"sha256": 1}', content + b"\n", b"\0" * 99]
    return [*flipped, *cut, *others]


def test_a_damaged_note_is_refused_before_anything_is_written(wandb_run, tmp_path):
    content = (wandb_run / NOTE).read_bytes()
    (tmp_path / NOTE).parent.mkdir()
    logger = WandbRoundLogger()
    for damaged in damages(content):
        (tmp_path / NOTE).write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"run\.json is damaged"):
            logger.check(tmp_path)
    (tmp_path / NOTE).write_bytes(content)
    logger.check(tmp_path)


@pytest.mark.thorough
@pytest.mark.filterwarnings("always::UserWarning")
def test_a_run_resumes_without_a_note_but_not_with_a_damaged_one(wandb_run, tmp_path):
    folder = shutil.copytree(wandb_run, tmp_path / "run")
    (folder / NOTE).write_bytes((folder / NOTE).read_bytes()[:-9])
    before = contents(folder)
    line = refusal(["fit", "--resume", folder, "--rounds", "2"], tmp_path)
    assert "wandb/run.json is damaged" in line
    assert contents(folder) == before
    (folder / NOTE).unlink()
    code, _, err = run("fit", "--resume", folder, "--rounds", "2")
    assert code == 0
    assert "run.json not found" in err


def test_a_note_of_another_run_is_refused(wandb_run, tmp_path):
    folder = shutil.copytree(wandb_run, tmp_path / "run")
    note = json.loads((folder / NOTE).read_text())
    del note["sha256"]
    note["of"][-1] = 7
    (folder / NOTE).write_text(add_checksum(note))
    line = refusal(["fit", "--resume", folder, "--rounds", "1", "--rounds", "2"], folder / "wandb")
    assert all(fact in line for fact in ("run.json", "FedSKC Digits Dirichlet 7", "FedSKC Digits Dirichlet 0"))


def test_links_in_place_of_wandbs_folder_are_refused(tmp_path):
    logger = WandbRoundLogger()
    logger.check(tmp_path / "nowhere")
    (victim := tmp_path / "victim").mkdir()
    for name, make in {
        "link": lambda place: place.symlink_to(victim),
        "dangling": lambda place: place.symlink_to(tmp_path / "nothing"),
        "file": lambda place: place.write_text(""),
        "pipe": os.mkfifo,
    }.items():
        (run_dir := tmp_path / name).mkdir()
        make(run_dir / "wandb")
        with pytest.raises(ConfigError, match=r"wandb is not a folder. Move it away"):
            logger.check(run_dir)
        (inside := tmp_path / f"{name} inside" / "wandb").mkdir(parents=True)
        if name != "file":
            make(inside / "run.json")
            with pytest.raises(ConfigError, match=r"run.json is not a file. Restore it"):
                logger.check(inside.parent)
    (tmp_path / NOTE).mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run.json is not a file"):
        logger.check(tmp_path)


def test_a_failed_start_of_wandb_leaves_no_file(tmp_path, monkeypatch):
    def refuses(**options):
        (tmp_path / "wandb" / "offline-run").mkdir(parents=True)
        raise wandb.errors.CommError("no")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", refuses)
        with pytest.raises(wandb.errors.CommError):
            WandbRoundLogger().attach(tmp_path, {}, LABELS)
    assert list(tmp_path.glob("wandb*")) == []
    monkeypatch.setattr("fl_lightning.loggers.wandb.write_atomically", lambda *given: 1 / 0)
    logger = WandbRoundLogger()
    with pytest.raises(ZeroDivisionError):
        logger.attach(tmp_path, {}, LABELS)
    assert wandb.run is None
    assert list(tmp_path.glob("wandb")) == []


def test_a_failed_start_of_wandb_keeps_earlier_files(wandb_run, tmp_path, monkeypatch):
    folder = shutil.copytree(wandb_run, tmp_path / "run")
    before = contents(folder)
    monkeypatch.setattr(wandb, "init", lambda **options: 1 / 0)
    labels = Labels(None, None, ["FedSKC", "Digits", "Dirichlet"])
    with pytest.raises(ZeroDivisionError):
        WandbRoundLogger().attach(folder, {"seed": 0}, labels)
    assert contents(folder) == before


def test_a_missing_api_key_is_one_line(tmp_path, monkeypatch):
    """Without this check, W&B would ask for the key on a terminal."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "tiny.yaml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    code, _, err = run(*WANDB, "--logger.offline", "false")
    assert code == 2
    assert err.startswith("fl-lightning: error: logger.offline: No API key")
    assert err.count("\n") == 1
    assert not (tmp_path / "run" / "wandb").exists()


def test_a_long_class_name_is_cut_to_wandbs_limit(tmp_path):
    logger = WandbRoundLogger(offline=True)
    logger.attach(tmp_path, {}, Labels("name", "group", ["D" * 99]))
    assert logger.experiment.tags == ("D" * 64,)
    logger.finalize("success")
