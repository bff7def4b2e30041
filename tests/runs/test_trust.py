"""The config of a run folder chooses no code unless it is signed or trusted."""

import copy
import gc
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchvision
import yaml
from commands import TINY, contents, run, table, tiny
from jsonargparse import _typehints
from refusals import check_refused_command

from fl_lightning.cli import allowed_objects, catalogue
from fl_lightning.cli.experiment import experiment_parser, instantiate, open_run, run_keys
from fl_lightning.cli.experiment_parser import config_argument
from fl_lightning.core import trusted_imports
from fl_lightning.core.config import parse_config
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import trainer
from fl_lightning.models import FromModule
from fl_lightning.runs import trust
from fl_lightning.runs.fingerprint import Fingerprint

MARK = "import pathlib\npathlib.Path({mark!r}).write_text('it was run')\n"
OWN = """
import own_sibling
from fl_lightning.callbacks import RoundCallback
from fl_lightning.models import MLP

class Net(MLP):
    pass

class Watcher(RoundCallback):
    pass
"""


def forget_modules(here):
    """Forget imported modules, as a new process would."""
    sys.path[:] = [place for place in sys.path if place != str(here)]
    for name in [name for name in sys.modules if name.startswith(("own", "evil"))]:
        del sys.modules[name]
    _typehints._cached_class_parsers.clear()
    gc.collect()


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Change to an empty working folder that is not in `sys.path`, as a user without a key."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place not in ("", str(folder))])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    passing = SimpleNamespace(collect=gc.collect, freeze=lambda: None, unfreeze=lambda: None)
    monkeypatch.setattr(trainer, "gc", passing)  # classes of modules that are gone must be gone
    yield folder
    forget_modules(folder)


@pytest.fixture
def theirs(finished, here, tmp_path, monkeypatch):
    """Return another user's run; modules `evil` are in and beside it, `evil_installed` is in `sys.path`."""
    shutil.copytree(finished, here / "theirs")
    mark = MARK.format(mark=str(tmp_path / "mark"))
    installed = tmp_path / "installed"
    installed.mkdir()
    monkeypatch.syspath_prepend(installed)
    for place in (here / "evil.py", here / "theirs" / "evil.py", installed / "evil_installed.py"):
        place.write_text(mark)
    (here / "file.yaml").write_text("class_path: evil_installed.Net\n")
    monkeypatch.setattr(Fingerprint, "check_config", lambda *given: None)  # its author can also edit the fingerprint
    return here / "theirs"


def change_config(run_dir, change):
    """Change a run's config by a function, and return it."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    change(config)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return config


def set_key(key, value):
    """Return a function that sets a dotted key of a config."""

    def change(config):
        *way, last = key.split(".")
        for part in way:
            if not isinstance(config.get(part), dict):
                config[part] = {}
            config = config[part]
        config[last] = value

    return change


# --- What an untrusted run may not name ---

PATHS = [
    "subprocess.Popen",
    "builtins.exec",
    "torch.os.system",
    "torchvision.models.get_model",
    "fl_lightning.runs.trust.os.system",
    "fl_lightning.core.errors.ConfigError",
    "evil_installed.Net",
    "nowhere.Net",
]


def from_module(**options):
    return {"class_path": "FromModule", "init_args": {"head": "fc", **options}}


def logger(name, **options):
    return {"class_path": name, "init_args": options}


PLACES = [
    ("rounds", "evil.Net"),
    ("optimizer.dict_kwargs.x", "evil.Net"),
    ("algorithm.init_args.loss_terms", ["Proximal", {"class_path": "evil.Net"}]),
    ("algorithm.init_args.loss_terms", [{"x": {"init_args": {"y": "evil.Net"}}}]),
    ("trainer.accelerator.class_path", "evil.Net"),
    ("model", from_module(module="evil.Net")),
    ("model", from_module(module="torch.nn.Linear", module_args={"x": "evil.Net"})),
    ("evaluation.metrics", ["evil.Metric"]),
    ("client_callbacks", [{"class_path": "lightning.pytorch.callbacks.LambdaCallback"}]),
    # text that jsonargparse parses like a file
    ("model", "{class_path: evil.Net}"),
    ("algorithm.init_args.loss_terms", "[evil.Net]"),
    ("model", "#" * 20_000),
    # another config file
    ("scenario", "file.yaml"),
    ("model.init_args.head", "/dev/stdin"),
    ("model.init_args.head", {"a.b": 1}),
]
ONLY_IN_FIT = [
    ("callbacks", ["evil.Net"]),
    ("engine", {"class_path": "RayEngine", "init_args": {"address": "ray://far:1"}}),
    ("engine", {"class_path": "RayEngine", "init_args": {"runtime_env": {"pip": ["evil"]}}}),
    ("engine", {"class_path": "RayEngine", "init_args": {"data_dir": "/"}}),
    ("logger", "nowhere.WandbRoundLogger"),
    ("logger", ["CSVLogger", "MLFlowLogger"]),
    ("logger", logger("lightning.pytorch.loggers.CSVLogger", save_dir="/")),
    ("logger", logger("CSVLogger", save_dir="/")),
    ("logger", [logger("TensorBoardLogger", save_dir="x")]),
    ("logger", logger("WandbRoundLogger", offline=False)),
]
KEYS = ["config", "run_dir", "trust", "model.class_path", "__path__"]


def check_refused_silently(words, messages):
    assert check_refused_command(words, messages) == ""


def check_is_refused(message, words, tmp_path):
    check_refused_silently(words, [message])
    assert not (tmp_path / "mark").exists()
    assert not {"evil", "evil_installed"} & sys.modules.keys()


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("words", [["test", "theirs"], ["fit", "--resume", "theirs"]], ids=["test", "resume"])
@pytest.mark.parametrize("path", PATHS)
def test_an_untrusted_run_names_only_known_objects(path, words, theirs, tmp_path):
    change_config(theirs, set_key("model.class_path", path))
    check_is_refused(f"theirs/config.yaml: model: {path} is not allowed", words, tmp_path)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize(("place", "value"), PLACES)
def test_an_untrusted_run_names_code_in_no_place(place, value, theirs, tmp_path):
    change_config(theirs, set_key(place, value))
    check_is_refused("", ["test", "theirs"], tmp_path)
    with pytest.raises(ConfigError):
        open_run(theirs)
    assert not trusted_imports.is_untrusted()


@pytest.mark.thorough
@pytest.mark.parametrize(("place", "value"), [PLACES[0], *ONLY_IN_FIT])
def test_an_untrusted_run_names_code_in_no_place_of_a_resumed_fit(place, value, theirs, tmp_path):
    change_config(theirs, set_key(place, value))
    check_is_refused("", ["fit", "--resume=theirs", "--rounds", "4"], tmp_path)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("key", KEYS)
def test_untrusted_run_with_unknown_keys_is_refused(key, theirs, tmp_path):
    change_config(theirs, lambda config: config.update({key: "file.yaml"}))
    for words in (["test", "theirs"], ["fit", "--resume", "theirs"]):
        check_is_refused(f"theirs/config.yaml: {key}: ", words, tmp_path)


def test_config_replaced_during_verification_is_not_parsed(theirs, tmp_path, monkeypatch):
    def swap(content, path):
        change_config(theirs, set_key("model.class_path", "evil_installed.Net"))
        return parse_config(content, path)

    monkeypatch.setattr(trust, "parse_config", swap)
    assert run("test", "theirs").code == 0
    assert not (tmp_path / "mark").exists()


def test_text_of_a_config_is_never_taken_as_a_path(theirs):
    """Another user may have created a file with this name."""
    (theirs / "config.yaml").write_text("rounds: 3\n")
    Path("rounds: 3\n").write_text("model: evil_installed.Net\n")
    with pytest.raises(OSError, match="too long"):
        os.stat(config_argument(copy_context().run(trust.restrict_and_load_config, theirs, run_keys(), dict)))


def test_settings_replaced_on_the_command_line_do_not_matter(theirs, tmp_path):
    change_config(theirs, set_key("callbacks", ["evil.Net"]))
    change_config(theirs, set_key("logger", "CSVLogger"))
    code, _, err = run("fit", "--resume", "theirs", "--rounds", "4", "--callbacks", "[EarlyStopping]", "--logger=null")
    assert (code, err.count("warning")) == (0, 0), err
    assert not (tmp_path / "mark").exists()


@pytest.mark.thorough
def test_test_command_ignores_engine_logger_and_callbacks(theirs, tmp_path):
    before = table(run("test", "theirs").out)
    for place, value in ONLY_IN_FIT[:4]:
        change_config(theirs, set_key(place, value))
        code, out, err = run("test", "theirs")
        assert (code, err) == (0, ""), place
        assert table(out) == before
    assert not (tmp_path / "mark").exists()


# --- What an untrusted run may name ---


def import_paths():
    """Yield the import path of every class that a config can name."""
    for kind in catalogue.BASES:
        for cls in catalogue.classes(kind):
            yield f"{cls.__module__}.{cls.__name__}"
    for module in (torch.optim, torch.optim.lr_scheduler):
        bases = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        kinds = {name: getattr(module, name) for name in module.__all__}
        yield from (f"{module.__name__}.{n}" for n, c in kinds.items() if isinstance(c, type) and issubclass(c, bases))
    yield from (f"torchvision.models.{name}" for name in ("resnet18", "vgg11", "vit_b_16"))
    yield from ("torch.nn.Linear", "fl_lightning.FedSKC", "fl_lightning.loggers.wandb.WandbRoundLogger")
    yield from (f"lightning.pytorch.callbacks.{name}" for name in allowed_objects.CLIENT_CALLBACKS)


def test_all_listed_classes_are_allowed():
    paths = list(import_paths())
    assert len(paths) > 100
    assert [path for path in paths if path not in allowed_objects.allowed_objects()] == []


@pytest.mark.thorough
def test_shipped_configs_pass_the_gate(monkeypatch):
    named = set()
    find = trusted_imports.find_object
    monkeypatch.setattr(trusted_imports, "find_object", lambda path: named.add(path) or find(path))
    configs = sorted((Path(trust.__file__).parents[2] / "configs").glob("*.yaml"))
    assert len(configs) > 50
    with trusted_imports.untrusted(trusted_imports.Untrusted({}, "", "", allowed=allowed_objects.allowed_objects)):
        parser = experiment_parser()
        for config in configs:
            content = yaml.safe_load(config.read_text())
            content.pop("baselines", None)
            instantiate(parser.parse_args(["--config", config_argument(content)]), parser)
    assert len(named) > 50


# --- The user's own runs ---


def write_own_modules(folder):
    (folder / "own.py").write_text(OWN)
    (folder / "own_sibling.py").write_text("")


@pytest.fixture
def own(finished, here, monkeypatch):
    """Return a signed run that names a class of a module in the working folder."""
    write_own_modules(here)
    shutil.copytree(finished, here / "run")
    config = change_config(here / "run", set_key("model.class_path", "own.Net"))
    trust.sign(here / "run", (here / "run" / "config.yaml").read_text(), config)
    for method in ("check_config", "warn_of_edits"):  # the checkpoints name another class
        monkeypatch.setattr(Fingerprint, method, lambda *given: None)
    return here / "run"


def create_key(folder):
    trust.sign(folder, "", {})


def is_own(run_dir):
    """Load the config of a run, and return whether it may name modules of the user."""

    def load():
        trust.restrict_and_load_config(run_dir, run_keys(), dict)
        return not trusted_imports.is_untrusted()

    return copy_context().run(load)


def key_of(tmp_path):
    return tmp_path / "config" / "fl-lightning" / "key"


@pytest.mark.thorough
def test_own_run_needs_no_trust(own, here, tmp_path):
    forget_modules(here)
    assert run("test", "run").code == 0
    forget_modules(here)
    code, _, err = run("fit", "--resume", "run", "--rounds", "4", "--callbacks", "[own.Watcher]")
    assert (code, err) == (0, "")
    shutil.move(own, tmp_path / "moved")
    forget_modules(here)
    assert is_own(tmp_path / "moved")
    assert str(here) in sys.path
    about = key_of(tmp_path).stat()
    assert (stat.S_IMODE(about.st_mode), about.st_size) == (0o600, 32)
    assert [place.name for place in key_of(tmp_path).parent.iterdir()] == ["key"]


@pytest.mark.thorough
def test_own_module_may_be_in_a_namespace_package(here):
    (here / "own").mkdir()
    (here / "own" / "nets.py").write_text("from fl_lightning.models import MLP\n\nclass Net(MLP):\n    pass\n")
    tiny(here / "run", "--model", "own.nets.Net")
    forget_modules(here)
    assert run("test", "run").code == 0


def test_config_may_name_modules_in_the_working_folder(here):
    write_own_modules(here)
    (here / "configs").mkdir()
    tiny(here / "configs" / "run", text=TINY.replace("class_path: MLP", "class_path: own.Net"))
    assert run("partition", "--config", "configs/run.yaml").code == 0


def test_resumed_run_of_another_user_is_not_signed(theirs, tmp_path):
    assert (theirs / ".signature").exists()
    create_key(tmp_path / "first")
    assert run("fit", "--resume", "theirs", "--rounds", "4").code == 0
    assert not is_own(theirs)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    "change",
    [
        set_key("model.class_path", "own_sibling.Net"),
        set_key("model.init_args.hidden", [9]),
        set_key("callbacks", ["own.Watcher"]),
    ],
)
def test_signature_is_invalid_after_an_edit(change, own, here):
    forget_modules(here)
    change_config(own, change)
    check_refused_silently(["test", "run"], ["signed by another user"])
    assert "own" not in sys.modules


def test_signature_is_invalid_for_another_user(own, here, tmp_path, monkeypatch):
    forget_modules(here)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another's"))
    check_refused_silently(["test", "run"], ["run/config.yaml: model: own.Net is not allowed", "not signed as yours"])
    create_key(tmp_path / "first")
    check_refused_silently(["test", "run"], ["signed by another user"])
    (own / ".signature").unlink()
    check_refused_silently(["test", "run"], ["not signed as yours"])
    assert "own" not in sys.modules


def test_signature_is_invalid_if_modules_moved(own, here, tmp_path, monkeypatch):
    """A published run may come back with its signature and another module."""
    forget_modules(here)
    back = tmp_path / "back"
    shutil.copytree(here, back)
    monkeypatch.chdir(back)
    check_refused_silently(["test", "run"], ["this is not the working folder"])
    assert "own" not in sys.modules


@pytest.mark.thorough
def test_resumed_trusted_run_is_signed(own, here):
    (own / ".signature").unlink()
    forget_modules(here)
    before = contents(own)
    assert run("test", "run", "--trust").code == 0
    assert contents(own) == before
    forget_modules(here)
    assert open_run(own, trust=True).round == 3
    forget_modules(here)
    assert run("fit", "--resume", "run", "--trust", "--rounds", "4").code == 0
    assert "trust" not in yaml.safe_load((own / "config.yaml").read_text())
    forget_modules(here)
    assert run("test", "run").code == 0


def test_config_on_the_command_line_needs_no_signature(own, here):
    (own / ".signature").unlink()
    forget_modules(here)
    Path("mine.yaml").write_text((own / "config.yaml").read_text())
    assert run("fit", "--resume", "run", "--config", "mine.yaml", "--rounds", "4").code == 0


def make_group_readable(key):
    key.chmod(0o640)


def lengthen(key):
    key.write_bytes(key.read_bytes() + b"x")


def make_link(key):
    key.rename(key.with_name("elsewhere"))
    key.symlink_to("elsewhere")


def make_pipe(key):
    key.unlink()
    os.mkfifo(key, 0o600)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (make_group_readable, "is accessible to other users"),
        (lengthen, "is damaged"),
        (make_link, "it is a link"),
        (make_pipe, "is no file"),
    ],
)
def test_exposed_or_damaged_key_is_refused(damage, message, own, here, tmp_path):
    damage(key_of(tmp_path))
    forget_modules(here)
    check_refused_silently(["test", "run"], ["cannot be checked (", message])


@pytest.mark.thorough
@pytest.mark.parametrize("damage", [make_link, make_pipe, lengthen])
def test_special_or_large_signature_file_is_refused(damage, own, here):
    damage(own / ".signature")
    forget_modules(here)
    check_refused_silently(["test", "run"], [])


@pytest.mark.thorough
@pytest.mark.filterwarnings("always")
def test_run_is_not_signed_without_a_home_folder(here, tmp_path, monkeypatch):
    write_own_modules(here)
    (tmp_path / "config").write_text("no folder")
    Path("tiny.yaml").write_text(TINY)
    code, _, err = run("fit", "--config", "tiny.yaml", "--run_dir", "run", "--model", "own.Net")
    assert code == 0
    assert "warning: config.yaml cannot be signed" in err
    assert "--trust" in err
    assert not (here / "run" / ".signature").exists()
    check_refused_silently(["test", "run"], ["--trust"])
    assert run("test", "run", "--trust").code == 0


def test_concurrent_creation_gives_one_key(here, tmp_path):
    for _ in range(20):
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: create_key(tmp_path / str(number)), range(8)))
        assert len({(tmp_path / str(number) / ".signature").read_text() for number in range(8)}) == 1
        assert [place.name for place in key_of(tmp_path).parent.iterdir()] == ["key"]
        key_of(tmp_path).unlink()


# --- Imports from the working folder ---


@pytest.mark.parametrize(
    ("value", "let"),
    [
        ("--model=own.Net", True),
        (["fit", "--callbacks", "[{class_path: own.Net}]"], True),
        ({"callbacks": ["Progress", {"x": ["spread.nets.Net"]}]}, True),
        ("spread.npz", False),
        ("own", False),
        ("own.py", True),  # it may be an import path
        ("nowhere.Net", False),
        ("torch.Net", False),
        (3, False),
    ],
)
def test_working_folder_is_searched_only_for_named_modules(value, let, here):
    (here / "own.py").write_text("raise SystemExit")
    (here / "torch.py").write_text("")
    (here / "spread").mkdir()
    (here / "spread" / "nets.py").write_text("")
    before = list(sys.path)
    trust.allow_local_modules(value)
    trust.allow_local_modules(value)
    assert sys.path == before + [str(here)] * let
    assert "own" not in sys.modules


SWEEP = """
program: fl-lightning
method: grid
metric: {name: global/acc, goal: maximize}
parameters: {seed: {values: [1, 2]}}
command: ["${program}", fit, --config, tiny.yaml, "${args}"]
"""
PLANTED = ("torch_xla", "numpy", "wandb", "ray", "optuna", "tpu", "sitecustomize", "usercustomize", "yaml", "evil")
ALL_COMMANDS = """
import sys
from fl_lightning.cli.main import main
for words in {commands}:
    assert main(words) == 0, words
"""


def plant_modules(folder, mark):
    for name in PLANTED:
        (folder / f"{name}.py").write_text(MARK.format(mark=str(mark)))


def python(*words, cwd):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.thorough
def test_planted_modules_are_not_imported(finished, tmp_path):
    here, mark = tmp_path / "here", tmp_path / "mark"
    shutil.copytree(finished, here / "run")
    shutil.copytree(finished, tmp_path / "other")
    change_config(tmp_path / "other", set_key("model.class_path", "evil.Net"))
    (here / "tiny.yaml").write_text(TINY)
    plant_modules(here, mark)
    plant_modules(here / "run", mark)
    commands = [
        ["list"],
        ["test", "run"],
        ["fit", "--resume", "run", "--rounds", "4"],
        ["partition", "--config", "tiny.yaml"],
        ["report", "run", "../other", "--out", "page.html"],
        ["compare", "run", "../other", "--by", "rounds"],
        ["plot", "run", "../other", "--by", "rounds"],
        ["watch", "run", "--once"],
        ["watch", "../other", "--once"],
    ]
    script = tmp_path / "bin" / "script.py"
    script.parent.mkdir()
    script.write_text(ALL_COMMANDS.format(commands=commands))
    python(script, cwd=here)
    assert not mark.exists()


@pytest.mark.slow
def test_worker_processes_do_not_import_planted_modules(tmp_path):
    plant_modules(tmp_path, tmp_path / "mark")
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    script = ["-m", "fl_lightning"]
    python(*script, "fit", "--config", "tiny.yaml", "--engine", "processes", "--run_dir", "run", cwd=tmp_path)
    python(*script, "sweep", "sweep.yaml", cwd=tmp_path)
    assert not (tmp_path / "mark").exists()


@pytest.mark.slow
def test_worker_processes_find_own_modules(tmp_path):
    write_own_modules(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY.replace("class_path: MLP", "class_path: own.Net"))
    (tmp_path / "sweep.yaml").write_text(SWEEP)
    script = ["-m", "fl_lightning"]
    python(*script, "fit", "--config", "tiny.yaml", "--engine", "processes", "--run_dir", "run", cwd=tmp_path)
    python(*script, "sweep", "sweep.yaml", cwd=tmp_path)
    for place in [tmp_path / "run", *(tmp_path / "runs/sweeps/sweep/trials").iterdir()]:
        assert (place / "final" / "summary.json").exists()
        assert (place / ".signature").exists()
    python(*script, "test", "run", cwd=tmp_path)


# --- FromModule ---


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("subprocess.Popen", "neither an nn.Module class nor a function"),
        ("os.system", "a built-in function"),
        ("builtins.exec", "a built-in function"),
        ("os.environ", "neither an nn.Module class nor a function"),
        ("os", "os is not an import path"),
    ],
)
def test_objects_that_build_no_module_are_not_called(module, message, tmp_path):
    arguments = {"command": f"touch {tmp_path}/mark", "args": ["touch", f"{tmp_path}/mark"]}
    for given in ({name: value} for name, value in arguments.items()):
        with pytest.raises(ConfigError, match=message):
            FromModule((1, 8, 8), 10, module, "fc", given)
    assert not (tmp_path / "mark").exists()


def test_path_without_a_class_is_not_imported(tmp_path, monkeypatch):
    (tmp_path / "looked_at.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="looked_at is not an import path"):
        FromModule((1, 8, 8), 10, "looked_at", "fc")


def test_torchvision_models_need_no_trust(theirs):
    model = {
        "class_path": "fl_lightning.models.FromModule",
        "init_args": {"module": "torchvision.models.resnet18", "module_args": {"num_classes": 10}, "head": "fc"},
    }
    config = copy.deepcopy(change_config(theirs, set_key("model", model)))
    with trusted_imports.untrusted(trusted_imports.Untrusted(config, "", "", allowed=allowed_objects.allowed_objects)):
        FromModule((3, 32, 32), 10, **config["model"]["init_args"])
        with pytest.raises(ConfigError, match=r"model.module_args.weights: DEFAULT is not allowed"):
            FromModule((3, 32, 32), 10, "torchvision.models.resnet18", "fc", {"weights": "DEFAULT"})
    assert torchvision.models.resnet18.__module__.startswith("torchvision.models")
