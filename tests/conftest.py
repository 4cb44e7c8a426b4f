"""Shared by all rooms: a launcher on the virtual GPU, and a recipe that is measured in a fraction of a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import yaml  # noqa: F401 (loaded once: pytester forgets what it imports, PyYAML's C half does not)
from gpu_stand_ins import share_server, stand_ins

from pytest_mbmem.measure import host, launch
from pytest_mbmem.measure.host import HostLauncher
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Model, Parallelism, Recipe, Training
from pytest_mbmem.virtual_gpu import build
from pytest_mbmem.virtual_gpu.gpus import load_gpus

pytest_plugins = ["pytester"]

# How long an example takes depends on what else the machine does, and decides nothing.
hypothesis.settings.register_profile(
    "any-speed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-speed")


CACHE = build.default_cache().parent.parent


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Real measurements on the default virtual GPU; one server for the whole session."""
    launcher = Launcher(load_gpus()["h100-80gb"], timeout=120)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def host_launcher() -> Iterator[HostLauncher]:
    """Real numbers on the CPU; one server for the whole session."""
    launcher = HostLauncher(timeout=120)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def small_recipe() -> Recipe:
    """Two layers of 64 channels on one rank."""
    model = Model(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=1000)
    return Recipe(model=model, parallelism=Parallelism(), training=Training(seq_length=128, steps=2))


RECIPE_YAML = """\
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, vocab_size: 1000}
training: {seq_length: 64}
"""

PROJECT_INI = """\
[pytest]
addopts = --strict-markers --strict-config -p no:cacheprovider -p no:randomly
filterwarnings = error
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project in which measuring is made up (see fake_launcher.py): recipe.yaml peaks at 64 MiB."""
    _begin(pytester, monkeypatch)
    pytester.makeconftest(Path(__file__).with_name("fake_launcher.py").read_text())
    return pytester


@pytest.fixture
def real_project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> pytest.Pytester:
    """A project whose tests run on the virtual GPU, in forks of this session's own server."""
    _begin(pytester, monkeypatch)

    def shared(gpu: object, *, timeout: float) -> Launcher:
        monkeypatch.setattr(launcher, "timeout", timeout)
        return launcher

    monkeypatch.setattr(launch, "Launcher", shared)
    monkeypatch.setattr(launcher, "close", lambda: None)  # at the end of a session in there
    return pytester


@pytest.fixture
def gpu_project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> pytest.Pytester:
    """A project whose tests run on GPUs that stand in for real ones, in forks of this session's own server.

    `stand_ins(...)` says which GPUs there are; tests run with --mbmem-gpu.
    """
    _begin(pytester, monkeypatch)
    share_server(monkeypatch, launcher)
    stand_ins(monkeypatch, gpu="l4-24gb", count=2, elapsed_ms=[500, 100])
    return pytester


@pytest.fixture
def host_project(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, host_launcher: HostLauncher
) -> pytest.Pytester:
    """A project whose recipes run on the host, in forks of this session's own server."""
    _begin(pytester, monkeypatch)
    monkeypatch.setattr(host, "HostLauncher", lambda *, timeout: host_launcher)
    monkeypatch.setattr(host_launcher, "close", lambda: None)  # at the end of a session in there
    return pytester


def _begin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))  # pytester has a home of its own, and the driver is not built anew
    monkeypatch.setenv("COLUMNS", "120")
    # with the first two, pytest's summary repeats whole messages
    for name in ("CI", "BUILD_NUMBER", "GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)
    pytester._name = "test_it"  # of the file that makepyfile() makes
    pytester.path.joinpath("tox.ini").write_text(PROJECT_INI)
    pytester.path.joinpath("recipe.yaml").write_text(RECIPE_YAML)
