"""Hostile run folders: no command executes their code or writes outside of them."""

import os
import re
import shutil
import sys
import typing
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from commands import run
from jsonargparse import _typehints
from PIL import Image

from fl_lightning import runs
from fl_lightning.cli import catalogue
from fl_lightning.core import trusted_imports
from fl_lightning.core.arguments import argument_types
from fl_lightning.core.errors import ConfigError, FLError
from fl_lightning.runs.fingerprint import Fingerprint

pytestmark = pytest.mark.filterwarnings("always")

MARK = "import pathlib\npathlib.Path({mark!r}).write_text('executed')\nclass Net: pass\n"

# --- The configs: hostile values by dotted key ---

CODE = {
    "module": "evil.Net",
    "colon": "evil:Net",
    "newline": "subprocess:call\n",
    "look-alike": "ｅvil.Net",  # noqa: RUF001  # Python reads it as evil
    "inside": "fl_lightning.runs.trust.os.system",
}
CLASS_PLACES = (
    "model",
    "algorithm",
    "algorithm.init_args.aggregator",
    "algorithm.init_args.graph",
    "algorithm.init_args.loss_terms.0",
    "optimizer",
    "lr_scheduler",
    "round_lr_scheduler",
    "scenario.dataset",
    "scenario.partition",
    "scenario.objective",
    "evaluation.metrics.0",
    "engine",
    "logger.0",
    "callbacks.0",
    "client_callbacks.0",
)
CALLED = {"args": ["touch", "outside/mark"], "command": "touch outside/mark"}


def spec(kind, /, **options):
    return {"class_path": kind, "init_args": options}


def from_module(module, /, **arguments):
    return spec("FromModule", module=module, head="fc", module_args=arguments)


CASES = {f"{place} {name}": {place: spec(text, **CALLED)} for place in CLASS_PLACES for name, text in CODE.items()}
CASES |= {f"module {name}": {"model": from_module(text, **CALLED)} for name, text in CODE.items()}
CASES |= {f"any {name}": {"optimizer.init_args.fused": spec(text, **CALLED)} for name, text in CODE.items()}
for _data in ("train", "test"):
    for _name, _text in CODE.items():
        _options = {"train": _text, "test": _text, _data: spec(_text)}
        CASES[f"{_data} {_name}"] = {"scenario.dataset": spec("TorchDataset", **_options)}
OUTSIDE = {"absolute": "{root}/here/outside", "link": "theirs/link", "up": "theirs/../outside"}
for _name, _path in OUTSIDE.items():
    CASES |= {
        f"cache {_name}": {"scenario.dataset": spec("ImageFolder", path="images", size=8, cache=_path)},
        f"download {_name}": {"scenario.dataset": spec("MNIST", data_dir=_path, download=True)},
        f"csv {_name}": {"logger": spec("CSVLogger", save_dir=_path)},
        f"csv name {_name}": {"logger": spec("CSVLogger", save_dir="theirs", name=f"../{_path}")},
        f"csv version {_name}": {"logger": spec("CSVLogger", version=f"../{_path}")},
        f"tensorboard {_name}": {"logger": spec("TensorBoardLogger", save_dir=_path)},
        f"sub_dir {_name}": {"logger": spec("TensorBoardLogger", save_dir="theirs", sub_dir=f"../../../{_path}")},
        f"default_root_dir {_name}": {"trainer.default_root_dir": _path},
        f"wandb {_name}": {"logger": spec("WandbRoundLogger", dir=_path)},
        f"mlflow {_name}": {"logger": spec("MLFlowLogger", tracking_uri=f"file:{_path}")},
    }
CASES |= {
    "ray": {"engine": spec("RayEngine", address="ray://127.0.0.1:9")},
    "wandb online": {"logger": spec("WandbRoundLogger", offline=False)},
    "wandb settings": {"logger": spec("WandbRoundLogger", settings={"base_url": "http://127.0.0.1:9"})},
    "mlflow server": {"logger": spec("MLFlowLogger", tracking_uri="http://127.0.0.1:9")},
    "hub": {"scenario.dataset": spec("HuggingFace", path="somebody/evil", download=True)},
    "weights": {"model": from_module("torchvision.models.resnet18", weights="DEFAULT", num_classes=10)},
    "pretrained": {"model": from_module("torchvision.models.resnet18", pretrained=True, num_classes=10)},
    "get_model": {"model": from_module("torchvision.models.get_model", name="resnet18", weights="DEFAULT")},
    "hubconf": {"model": from_module("torch.hub.load", repo_or_dir="theirs", model="Net", source="local")},
    "yaml in text": {"model": "{class_path: evil.Net}"},
    "yaml key in text": {"model": "class_path: evil.Net"},
    "list in text": {"algorithm.init_args.loss_terms": "[evil.Net]"},
    "config file": {"evaluation": "file.yaml"},
    "trainer file": {"trainer": "theirs/file.yaml"},
    "head file": {"model.init_args.head": "file.yaml"},
    "stdin": {"scenario": "/dev/stdin"},
    "__path__": {"evaluation.__path__": "file.yaml"},
    "dots in keys": {"model.init_args.head": {"a.b": "evil.Net"}},
    **{
        f"{cls} {odd}": {"scenario.dataset": spec(cls, path=odd)}
        for cls in ("Arrays", "Table")
        for odd in ("/dev/zero", "pipe")
    },
    "graph pipe": {"algorithm": spec("DFedAvgM", graph=spec("Adjacency", path="pipe"))},
    "graph device": {"algorithm": spec("DFedAvgM", graph=spec("Adjacency", path="/dev/zero"))},
    "split pipe": {"scenario.partition": spec("PredefinedSplit", path="pipe.json")},
}


def text_arguments():
    """Yield hostile text for each text argument of each class that a config can name."""
    for kind, (_, _, key) in catalogue.BASES.items():
        place = re.sub(r"(?<=algorithm)\.", ".init_args.", key)
        place += ".0" if kind in ("loss_terms", "callbacks") else ""
        for cls in catalogue.classes(kind):
            for name, hint in argument_types(cls).items():
                needed = {"path": "images"} if name == "cache" else {}
                if str in (hint, *typing.get_args(hint)) and name != "return":
                    for what in ("evil:Net\n", "../outside/mark", "/dev/zero"):
                        yield f"{cls.__name__}.{name} {what!r}", {place: spec(cls.__name__, **needed, **{name: what})}


TEXT_CASES = dict(text_arguments())


# --- The audit hook ---

EVENTS: list[tuple[str, str]] = []
RUNS_CODE = {"os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.spawn", "pty.spawn", "socket.connect"}
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.link", "os.symlink", "os.truncate", "os.rmdir", "os.chmod"}
WATCHING: list[Path] = []


def watch(event, args):
    """Record forbidden events. Python calls this for every audit event."""
    if not WATCHING:
        return
    if event in RUNS_CODE or (event == "import" and args[0].startswith("evil")):
        EVENTS.append((event, str(args)))
    elif event == "open":
        if isinstance(args[0], str) and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            note_write(event, args[0])
    elif event in WRITES:
        folder = f"/proc/self/fd/{args[-1]}" if isinstance(args[-1], int) and args[-1] >= 0 else ""  # of its `dir_fd`
        note_write(event, os.path.join(folder, os.fsdecode(args[0])))


def note_write(event, path):
    place = Path(os.path.realpath(path))
    allowed = [*WATCHING, Path("/dev/null")]
    if not any(place.is_relative_to(one) for one in allowed):
        EVENTS.append((event, str(place)))


sys.addaudithook(watch)


@pytest.fixture
def theirs(finished, tmp_path, monkeypatch):
    """Return another user's run beside planted modules and files. Its fingerprint accepts any config."""
    here = tmp_path / "here"
    shutil.copytree(finished, here / "theirs")
    (here / "theirs" / ".signature").write_text("0" * 64 + "\n")
    (tmp_path / "installed").mkdir()
    (here / "outside").mkdir()
    (here / "theirs" / "link").symlink_to(here / "outside")
    for folder in (here, here / "theirs", tmp_path / "installed"):
        (folder / "evil.py").write_text(MARK.format(mark=str(tmp_path / "mark")))
        (folder / "hubconf.py").write_text(MARK.format(mark=str(tmp_path / "mark")))
        (folder / "file.yaml").write_text("class_path: evil.Net\n")
    for image in (here / "images" / kind / f"{n}.png" for kind in "ab" for n in range(4)):
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8)).save(image)
    for pipe in ("pipe", "pipe.json"):
        os.mkfifo(here / pipe)
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(tmp_path / "installed")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(Fingerprint, "check_config", lambda *given: None)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    yield here / "theirs"
    WATCHING.clear()
    EVENTS.clear()
    _typehints._cached_class_parsers.clear()


def change_settings(run_dir, settings):
    """Set values in a run's config by dotted keys; a number is an index of a list."""
    config = yaml.safe_load((run_dir / "config.yaml").read_text())
    for key, value in settings.items():
        *way, last = key.split(".")
        held = config
        if last == "0":
            last, value = way.pop(), [value]
        for part in way:
            if isinstance(held.get(part), str):
                held[part] = {"class_path": held[part]}
            held[part] = held.get(part) or {}
            held = held[part]
        held[last] = value
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    (run_dir / "config.yaml").write_text(text.replace("{root}", str(run_dir.parents[1])))


def load():
    with suppress(FLError):
        runs.load("theirs")


OPENERS = {
    "test": ["test", "theirs"],
    "resume": ["fit", "--resume", "theirs", "--rounds", "4"],
    "export": ["export", "theirs", "-o", "out/model.pt"],
    "report": ["report", "theirs", "-o", "out/page.html"],
    "compare": ["compare", "theirs"],
    "plot": ["plot", "theirs", "-o", "out/figure.pdf"],
    "watch": ["watch", "theirs", "--once"],
    "cite": ["cite", "theirs"],
    "load": None,
}


def check_harmless(opener, settings, run_dir):
    """Open a run with these settings, and check that no code ran and nothing outside changed."""
    change_settings(run_dir, settings)
    here = run_dir.parent
    (here / "out").mkdir(exist_ok=True)
    before = surrounding_files(here.parent)
    WATCHING[:] = [run_dir, here / "out"]
    words = OPENERS[opener]
    code = 0 if words is None else run(*words).code
    if words is None:
        load()
    WATCHING.clear()
    assert code in (0, 1, 2)
    assert EVENTS == []
    assert surrounding_files(here.parent) == before
    assert not {"evil", "hubconf"} & sys.modules.keys()
    assert not trusted_imports.is_untrusted()


def surrounding_files(root):
    """Return the content of all files outside of the run by path, without reading pipes."""
    kept = ("here/theirs/", "here/out/", "config/")
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in sorted(root.rglob("*"))
        if not str(path.relative_to(root)).startswith(kept)
    }


NAMED = [*list(CASES)[::2], *list(TEXT_CASES)[::13]]
CASES |= TEXT_CASES
SAMPLE = [(("test", "resume", "export")[i % 3], case) for i, case in enumerate(NAMED)]
SAMPLE += [(opener, NAMED[3 * i]) for i, opener in enumerate(["report", "compare", "watch", "load", "plot", "cite"])]


@pytest.mark.fast_cases(5)
@pytest.mark.parametrize(("opener", "case"), SAMPLE)
def test_hostile_run_is_harmless(opener, case, theirs):
    check_harmless(opener, CASES[case], theirs)


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("place", ["model.init_args.module", *CLASS_PLACES])
def test_gate_checks_every_class_path(place, theirs, monkeypatch):
    """This fails if a new version of jsonargparse imports in another way."""
    seen = []
    refuse = lambda self, value, key=None: seen.append(value) or FLError(value)  # noqa: E731
    monkeypatch.setattr(trusted_imports.Untrusted, "refuse", refuse)
    settings = {place: spec("evil.Net")}
    if place == "model.init_args.module":
        settings = {"model": from_module("evil.Net")}
    if place == "algorithm.init_args.graph":
        settings = {"algorithm": spec("DFedAvgM", graph=spec("evil.Net"))}
    change_settings(theirs, settings)
    assert run(*OPENERS["resume"]).code != 0
    assert "evil.Net" in seen
    assert "evil" not in sys.modules


@pytest.mark.parametrize(("path", "inside"), [("theirs/x/y.npy", True), ("theirs/link/y.npy", False), ("y.npy", False)])
def test_untrusted_config_writes_only_to_its_own_folder(path, inside, theirs):
    with trusted_imports.untrusted(trusted_imports.Untrusted({}, "", "", theirs)):
        if inside:
            trusted_imports.check_writable("cache", Path(path))
        else:
            with pytest.raises(ConfigError, match=f"cache: {path} is not allowed"):
                trusted_imports.check_writable("cache", Path(path))
    trusted_imports.check_writable("cache", Path(path))


def test_a_cache_outside_the_run_folder_is_refused(theirs):
    change_settings(theirs, CASES["cache link"])
    assert "scenario.dataset.cache: " in (line := run(*OPENERS["test"]).err)
    assert "--trust" in line


def test_trusted_run_may_write_anywhere(theirs):
    change_settings(theirs, {"logger": spec("CSVLogger", save_dir="outside")})
    assert run(*OPENERS["resume"]).code == 2
    assert run(*OPENERS["resume"], "--trust").code == 0
    assert list(Path("outside").rglob("metrics.csv"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_hostile_run_is_harmless_to_every_command(case, theirs, tmp_path):
    shutil.copytree(theirs, unopened := tmp_path / "unopened", symlinks=True)
    for opener in OPENERS:
        shutil.rmtree(theirs)
        shutil.copytree(unopened, theirs, symlinks=True)
        check_harmless(opener, CASES[case], theirs)
