"""The versions of Flower that are accepted, and the only file that uses its private parts."""

import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

import fl_lightning
from fl_lightning.core.errors import ConfigError
from fl_lightning.engines import flower_adapter
from fl_lightning.engines.flower_adapter import VERSIONS, import_flower, is_supported

PACKAGE = Path(fl_lightning.__file__).parent
PUBLIC = {"flwr.app", "flwr.serverapp", "flwr.clientapp"}


def test_one_file_uses_parts_of_flower_that_are_not_public():
    for path in PACKAGE.rglob("*.py"):
        modules = re.findall(r"^\s*(?:from|import) (flwr[\w.]*)", path.read_text(), re.MULTILINE)
        assert path.name == "flower_adapter.py" or {*modules} <= PUBLIC, path


def test_the_extra_installs_the_versions_that_are_accepted():
    (pin,) = re.findall(r'^flower = \["flwr(.*?)",', (PACKAGE.parent / "pyproject.toml").read_text(), re.MULTILINE)
    versions = [f"1.{minor}" for minor in range(100)]
    assert [version for version in versions if f"{version}.3" in SpecifierSet(pin)] == [*VERSIONS]
    assert [version for version in versions if is_supported(f"{version}.3")] == [*VERSIONS]
    assert not is_supported(f"{VERSIONS[0]}0.0")


@pytest.mark.parametrize("version", ["1.40.0", "1.43.0.dev20261101", "2.0.0", "unknown"])
def test_another_version_is_refused_with_what_to_install(monkeypatch, version):
    flwr = pytest.importorskip("flwr")
    assert import_flower().__name__ == "flwr.app"
    monkeypatch.setattr(flwr, "__version__", version)
    expected = f"^engine: flwr {version} is installed, but fl-lightning needs 1.41 or 1.42. Install it with pip install"
    with pytest.raises(ConfigError, match=expected):
        import_flower()


def refusal_by(superlink, here):
    """Return Flower's message with which a SuperLink refuses a process with another version."""
    from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

    versions = [RuntimeVersionMetadata("flwr", superlink, "SuperLink"), RuntimeVersionMetadata("flwr", here, "flwr")]
    return f"Runtime version compatibility check failed.\n{versions[0].check_compatibility(versions[1])}"


@pytest.mark.parametrize(
    ("superlink", "fix"),
    [
        ("1.42.0", "Install the same on both: pip install 'flwr==1.42.0' here"),
        ("1.38.1", "Install the same on both, such as flwr 1.41.0 on the SuperLink's machine"),
        ("1.44.0.dev2", "Install the same on both, such as flwr 1.41.0 on the SuperLink's machine"),
    ],
)
def test_another_version_on_the_superlink_is_named_with_what_to_install(monkeypatch, superlink, fix):
    flwr = pytest.importorskip("flwr")
    from flwr.supercore.interceptors.http import runtime_version

    monkeypatch.setattr(flwr, "__version__", "1.41.0")
    flower_adapter.raise_on_exit(flower_adapter.refuse_run)
    with pytest.raises(ConfigError) as raised:
        runtime_version.flwr_exit(606, refusal_by(superlink, "1.41.0"))
    text = f"engine.superlink: the SuperLink has flwr {superlink}, but this machine has flwr 1.41.0. {fix}"
    assert str(raised.value) == text


def test_another_refusal_is_one_line_and_no_exit():
    pytest.importorskip("flwr")
    from flwr.supercore import tls

    flower_adapter.raise_on_exit(flower_adapter.refuse_run)
    with pytest.raises(ConfigError, match=r"^engine.superlink: no such certificate$"):
        tls.flwr_exit(603, "no such\ncertificate", event_type=None)
