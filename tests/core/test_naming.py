"""Names of runs and groups: runs that differ only in the seed share a group, other runs do not."""

import re

import pytest
from commands import TINY

from fl_lightning.cli.commands.fit import config_name, names
from fl_lightning.cli.experiment import plain_config
from fl_lightning.cli.options import command_parser
from fl_lightning.core.config_files import read_configs
from fl_lightning.loggers.naming import changes, run_names


@pytest.fixture(scope="module")
def parser():
    return command_parser("fit")


def parsed(parser, words):
    """Return the parsed command line with the contents of its config files, as `main` of the command gets it."""
    line = read_configs(words)
    given = parser.parse_args(line.words)
    given.config = line.configs
    return given


@pytest.fixture
def named(parser, tmp_path):
    """A function that returns the name and group of a command line with the tiny config or another text."""

    def of(*words, text=TINY):
        (tmp_path / "tiny.yaml").write_text(text)
        given = parsed(parser, [f"--config={tmp_path / 'tiny.yaml'}", *words])
        return names(given, parser, plain_config(given, parser))

    return of


def test_runs_that_differ_in_the_seed_share_a_group(named):
    (name, group), (other, same) = named(), named("--seed", "12")
    assert (name, other) == ("tiny-seed0", "tiny-seed12")
    assert group == same
    assert re.fullmatch(r"tiny-[0-9a-f]{6}", group)


@pytest.mark.parametrize(
    "words",
    [
        ["--engine", "stacked"],
        ["--logger", "CSVLogger", "--logger.save_dir", "x"],
        ["--callbacks", "[RowNorms]"],
        ["--evaluation.target_accuracies", "[0.1]"],
        ["--trainer.accelerator", "auto"],
        ["--run_dir", "x"],
        ["--algorithm.tau", "0.08"],  # as it is
    ],
)
@pytest.mark.fast_cases(1)
def test_loggers_engines_and_folders_do_not_change_the_name(named, words):
    assert named(*words) == named()


def test_the_folder_of_the_data_does_not_change_the_name(named):
    text = TINY.replace("Digits", "MNIST")
    assert named("--scenario.dataset.data_dir", "elsewhere", text=text) == named(text=text)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (["--algorithm.tau", "0.1"], "tau=0.1"),
        (["--rounds", "7"], "rounds=7"),
        (["--scenario.partition.alpha", "1", "--algorithm.tau", "1e-3"], "alpha=1,tau=0.001"),
        (["--scenario.partition", "IID"], "partition=IID"),
        (["--algorithm", "MOON", "--algorithm.mu", "2.5"], "algorithm=MOON,mu=2.5"),
        (["--optimizer.weight_decay", "0.1"], "weight_decay=0.1"),
        (["--trainer.deterministic", "true", "--trainer.max_epochs", "null"], "max_epochs=null,deterministic=true"),
        (
            ["--algorithm.loss_terms", "[{class_path: Proximal, init_args: {mu: 1}}, {class_path: DistillingWeights}]"],
            "loss_terms=Proximal+DistillingWeights",
        ),
    ],
)
def test_the_name_has_the_settings_of_the_command_line(named, words, settings):
    name, group = named(*words)
    assert name == f"tiny-{settings}-seed0"
    assert re.fullmatch(re.escape(f"tiny-{settings}-") + "[0-9a-f]{6}", group)


def test_the_name_omits_defaults_of_a_class(named):
    """A class with required arguments has all of them in the name."""
    assert named("--algorithm", "MOON")[0] == "tiny-algorithm=MOON-seed0"
    name, _ = named("--round_lr_scheduler", "ExponentialLR", "--round_lr_scheduler.gamma", "0.9")
    assert name.startswith("tiny-round_lr_scheduler=ExponentialLR,gamma=0.9")


def test_an_edited_config_has_another_group(named):
    edited = TINY.replace("batch_size: 16", "batch_size: 8")
    (name, group), (same, other) = named(), named(text=edited)
    assert name == same
    assert group != other


def test_arguments_of_loss_terms_change_the_group_but_not_the_name(named):
    groups = {named("--algorithm.loss_terms", f"[{{class_path: Proximal, init_args: {{mu: {mu}}}}}]") for mu in (1, 2)}
    assert len(groups) == 2
    assert len({name for name, _ in groups}) == 1


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([TINY, "algorithm: {init_args: {tau: 0.2}}"], "file0-tau=0.2"),
        ([TINY, "rounds: 7", "batch_size: 8"], "file0-rounds=7,batch_size=8"),
        (["batch_size: 8\nrounds: 2", TINY], "file1"),  # the first one is a base
        (["batch_size: 8", TINY, "rounds: 7"], "file1-rounds=7"),
        (["algorithm: FedAvg", "batch_size: 8"], "file1"),  # the command line completes it
    ],
)
def test_a_run_is_named_after_the_experiment_and_not_after_later_files(texts, expected, parser, tmp_path):
    words = []
    for number, text in enumerate(texts):
        (tmp_path / f"file{number}.yaml").write_text(text)
        words.append(f"--config={tmp_path / f'file{number}.yaml'}")
    if TINY not in texts:
        words += ["--model=MLP", "--scenario.dataset=Digits", "--scenario.partition=IID", "--scenario.clients=3"]
    given = parsed(parser, words)
    name, _ = names(given, parser, plain_config(given, parser))
    assert name == f"{expected}-seed0"
    assert config_name(given, parser) == expected.partition("-")[0]


def test_incomplete_configs_have_names(named):
    part = "\n".join(line for line in TINY.splitlines() if not line.startswith(("model", "algorithm")))
    rest = ["--model", "MLP", "--algorithm", "FedAvg"]
    assert named(*rest, text=part)[0] == "tiny-seed0"
    assert named(*rest, text=part)[1] != named(*rest, "--rounds", "9", text=part)[1]


def test_without_a_config_the_name_begins_with_run(parser):
    words = ["--scenario.dataset", "Digits", "--scenario.partition", "IID", "--scenario.clients", "3"]
    given = parser.parse_args([*words, "--model", "MLP", "--algorithm", "FedAvg", "--seed", "3"])
    assert names(given, parser, plain_config(given, parser))[0] == "run-seed3"


def test_keys_are_shortened_as_far_as_they_stay_unique():
    setting = {"algorithm.mu": 1, "model.head.mu": 2, "algorithm.tau": 0.5}
    assert changes(setting, {}) == "algorithm.mu=1,model.head.mu=2,tau=0.5"
    assert changes(setting, {"algorithm.mu": 1}) == "mu=2,tau=0.5"


@pytest.mark.parametrize(
    ("value", "text"),
    [(True, "true"), (None, "null"), (2.0, "2"), (1e-7, "1e-07"), (0.0123, "0.0123"),
     ("some.where.Thing", "Thing"), ("a/b.npz", "a/b.npz"),
     ([1, 2], "1+2"), ([[3, 1], "x"], "3+1+x"), ("0.5", "0.5")],
)  # fmt: skip
def test_values_are_short(value, text):
    assert changes({"key": value}, {"key": "before"}) == f"key={text}"


def test_names_are_no_longer_than_wandb_allows():
    setting = {f"key{i}": i for i in range(100)}
    name, group = run_names("tiny", 12, setting, {})
    assert len(name) == len(group) == 128
    assert name.startswith("tiny-key0=0,key1=1,")
    assert name.endswith("-seed12")
    assert run_names("tiny", 12, setting | {"key99": 0}, {})[1] != group


def test_the_order_of_keys_does_not_matter():
    assert run_names("tiny", 0, {"a": 1, "b": 2}, {}) != run_names("tiny", 0, {"a": 2, "b": 1}, {})
    stated = {"b": 2, "a": 1}
    assert run_names("tiny", 0, {"a": 1, "b": 2}, stated) == run_names("tiny", 0, stated, stated)


def test_a_new_key_does_not_change_groups_while_it_is_null():
    stated = {"a": 1, "new": None}
    assert run_names("tiny", 0, stated, stated) == run_names("tiny", 0, {"a": 1}, {"a": 1})
    assert run_names("tiny", 0, stated | {"new": 0}, stated)[1] != run_names("tiny", 0, stated, stated)[1]
