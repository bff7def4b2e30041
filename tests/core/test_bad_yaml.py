"""Invalid YAML is refused with one line that names the file, the line and the key, and nothing is written."""

import os
import socket
import time
from pathlib import Path

import pytest
import yaml
from commands import TINY, contents, run
from jsonargparse import ArgumentParser

from fl_lightning.core.errors import ConfigError
from fl_lightning.core.strict_yaml import load_yaml, read_yaml, use_strict_yaml

BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 11))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 11))

TEXTS = {
    "a key twice": (TINY + "rounds: 9\n", "line 10: rounds: given on line 2 already"),
    "a quoted key twice": (TINY + "'rounds': 9\n", "line 10: rounds: given on line 2 already"),
    "a nested key twice": (
        TINY.replace("trainer: {", "trainer: {max_epochs: 3, "),
        "line 8: trainer.max_epochs: given on line 8 already",
    ),
    "a key twice in a list": (TINY + "callbacks: [{class_path: A, class_path: B}]", "callbacks.class_path: given on"),
    "aliases": (TINY + BOMB, "it expands to more than a config may contain"),
    "merges": (TINY + MERGES, "it expands to more than a config may contain"),
    "500 lists": (TINY + "callbacks: " + "[" * 500 + "]" * 500, "callbacks: it expands to more than a config may"),
    "5,000 lists": (TINY + "callbacks: " + "[" * 5000 + "]" * 5000, ""),  # PyYAML 6.0.4 has a reason of its own
    "5,000 digits": (TINY.replace("rounds: 3", f"rounds: {'1' * 5000}"), "rounds: a number of 5,000 digits"),
    "a tag": (TINY + "seed: !!python/object/apply:os.system [echo]", "seed: !!python/object/apply:os.system: a config"),
    "a NUL byte": (TINY + "run_dir: a\0b", "control characters are not allowed"),
    "a NUL byte in quotes": (TINY + 'run_dir: "a\\0b"', "line 10: run_dir: a NUL byte"),
    "latin-1": ((TINY + "run_dir: f\xf6").encode("latin-1"), "line 10: byte 0xf6 is no UTF-8"),
    "UTF-16": (TINY.encode("utf-16"), "line 1: byte 0xff is no UTF-8"),
    "a list as a key": (TINY + "? [1]\n: 2", "line 10: a key must be a word"),
    "two documents": (TINY + "---\nrounds: 9\n", "but found another document"),
    "a bad hexadecimal number": (TINY + "seed: 0x_", "invalid literal"),
    "much": (TINY + "#" * 2**20, "larger than it can be"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TEXTS)
def test_bad_yaml_is_refused_at_once_in_one_line(name, here):
    text, why = TEXTS[name]
    Path("bad.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    before, started = contents(here), time.process_time()
    code, _, err = run("fit", "--config", "bad.yaml")
    assert time.process_time() - started < 5
    assert code == 2
    assert err.startswith("fl-lightning: error: --config: bad.yaml is no readable YAML: ")
    assert err.count("\n") == 1
    assert why in err
    assert contents(here) == before


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device", "nothing", "long"])
def test_pipes_sockets_folders_and_devices_are_not_opened(kind, here, monkeypatch):
    name = "x" * 300 if kind == "long" else "odd"
    if kind == "pipe":
        os.mkfifo(name)
    if kind == "folder":
        Path(name).mkdir()
    if kind == "device":
        Path(name).symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as end:
        if kind == "socket":
            end.bind(name)
        for words in (["--config", name], ["--resume", name]):
            code, _, err = run("fit", *words)
            assert code == 2
            assert err.count("\n") == 1
            reasons = ("neither a file here nor a shipped config", "is no run", "folder not found", "too long")
            assert any(reason in err for reason in reasons)


def test_a_file_that_became_a_device_is_not_read(here):
    Path("odd").symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match="baselines is no readable YAML: it is no file"):
        read_yaml(Path("odd"), "baselines")


def test_every_command_refuses_duplicate_keys(here):
    Path("twice.yaml").write_text("FedProx: {}\nFedProx: {}\n")
    Path("own.yaml").write_text(TINY + "baselines: twice.yaml\n")
    for words in (
        ["fit", "--config", "own.yaml", "--algorithm", "FedProx"],
        ["sweep", "twice.yaml"],
        ["reproduce", "twice.yaml"],
        ["partition", "--config", "twice.yaml"],
    ):
        code, _, err = run(*words)
        assert code == 2
        assert "twice.yaml" in err
        assert "line 2: FedProx: given on line 1" in err


@pytest.mark.parametrize("words", [["--trainer", "part.yaml"], ["--callbacks", "[{class_path: A, class_path: B}]"]])
def test_values_that_jsonargparse_reads_are_checked_as_strictly(words, here):
    Path("good.yaml").write_text(TINY)
    Path("part.yaml").write_text("max_epochs: 1\nmax_epochs: 2\n")
    code, _, err = run("fit", "--config", "good.yaml", *words)
    assert code == 2
    assert err.count("\n") == 1


def test_a_parser_reads_words_as_jsonargparse_does():
    words = [
        "1e-3",
        "1.5",
        ".5",
        "yes",
        "true",
        "2026-11-22",
        "12:30",
        "0x10",
        "[1e-3, a]",
        "null",
        "'1'",
        "a: b: c",
        "~",
    ]

    def read(parser):
        parser.add_argument("--any", type=int | float | bool | list | dict | str | None)
        return [parser.parse_args([f"--any={word}"]).any for word in words]

    assert read(use_strict_yaml(ArgumentParser(exit_on_error=False))) == read(ArgumentParser(exit_on_error=False))


def test_yaml_may_share_parts_merge_them_and_say_that_it_is_utf_8():
    text = "base: &base {a: 1, b: 2}\none: {<<: *base, b: 3}\ntwo: {<<: *base, <<: {c: 4}}\nlist: [*base, *base]\n"
    loaded = load_yaml(text)
    assert loaded == yaml.safe_load(text)
    assert loaded["one"] == {"a": 1, "b": 3}
    assert load_yaml("\ufeffa: \u03bc".encode()) == {"a": "\u03bc"}
    assert load_yaml("a: 2026-13-45\nb: 2026-11-22") == {"a": "2026-13-45", "b": "2026-11-22"}


def test_a_config_may_begin_with_a_byte_order_mark(here):
    Path("marked.yaml").write_bytes(b"\xef\xbb\xbf" + TINY.encode())
    assert run("partition", "--config", "marked.yaml").code == 0


def test_shipped_configs_are_read_in_no_time():
    paths = sorted(Path(__file__).parents[2].glob("configs/**/*.yaml"))
    started = time.process_time()
    for path in paths:
        read_yaml(path)
    assert time.process_time() - started < 0.005 * len(paths)
