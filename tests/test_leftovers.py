"""GPU memory that earlier tests left behind in the pytest process, which runs on virtual GPUs here."""

from __future__ import annotations

import gc
import json
import sys
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from pytest_mbmem import leftovers
from pytest_mbmem.leftovers import Leftovers, related, suspended
from pytest_mbmem.measure.launch import Launcher

CONFTEST = """
import json
import pytest
from pytest_mbmem.leftovers import Leftovers

LEFTOVERS = pytest.StashKey()

def pytest_configure(config):
    config.stash[LEFTOVERS] = leftovers = Leftovers.of(config)
    config.pluginmanager.register(leftovers)

@pytest.fixture
def said(request):
    "Notes what the check says, by the name of the test."
    def check():
        left = request.config.stash[LEFTOVERS]
        notes[request.node.name] = {"check": left.check(), "grown": dict(left.grown)}
    notes = request.config.stash.setdefault(NOTES, {})
    return check

NOTES = pytest.StashKey()

def pytest_unconfigure(config):
    with open("said.json", "w") as file:
        json.dump(config.stash.get(NOTES, {}), file)
"""


def said(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    launcher: Launcher,
    tests: str,
    *arguments: str,
    **outcomes: int,
) -> dict[str, dict[str, Any]]:
    """What each test's check said, in a pytest process on a virtual GPU of its own."""
    for name, value in launcher.command_environment().items():
        monkeypatch.setenv(name, value)
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_it=tests)
    result = pytester.runpytest_subprocess("-p", "no:randomly", "-p", "no:cacheprovider", *arguments)
    result.assert_outcomes(**outcomes)
    found: dict[str, dict[str, Any]] = json.loads((pytester.path / "said.json").read_text())
    return found


def test_what_ordinary_tests_leave_is_named_and_what_dies_with_them_is_not(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    tests = """
import pytest

MIB = 2**20
KEPT = []

def test_01_nothing_yet(said):
    said()

def make(mib):
    import torch
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

def test_02_fails():
    held = make(8)
    assert held is None

def test_03_fails_with_a_cause_a_context_and_a_group():
    def inner(error):
        held = make(8)
        raise error
    try:
        try:
            inner(ValueError("context"))
        except ValueError:
            inner(KeyError("cause"))
    except KeyError as error:
        raise RuntimeError("here") from error

def test_04_after_failures(said):
    said()

def test_05_multiplies():
    import torch
    square = torch.ones(64, 64, device="cuda")
    assert (square @ square).shape == (64, 64)

def test_06_leaves_a_cycle():
    cycle = [make(8)]
    cycle.append(cycle)

def test_07_after_a_workspace_and_a_cycle(said):
    said()

def test_08_keeps_16():
    KEPT.append(make(16))

def test_09_keeps_32():
    KEPT.append(make(32))
    assert False

def test_10_names_both(said):
    said()

def test_11_names_its_own_too(said):
    mine = make(64)
    said()

def test_12_frees_all(said):
    KEPT.clear()
    said()

@pytest.fixture
def frees_later():
    held = make(8)
    yield
    del held

def test_13_in_a_fixture(frees_later):
    assert False

def test_14_after_it(said):
    said()

@pytest.fixture
def fails():
    held = make(8)
    yield 1 // 0

def test_15_fails_in_setup(fails):
    pass

@pytest.mark.xfail
def test_16_fails_as_expected():
    held = make(8)
    assert False

@pytest.fixture
def fails_at_the_end():
    yield
    held = make(8)
    assert False

def test_17_fails_in_teardown(fails_at_the_end):
    pass

def test_18_after_them(said):
    said()
"""
    found = said(pytester, monkeypatch, launcher, tests, failed=4, passed=12, errors=2, xfailed=1)
    nothing: dict[str, object] = {"check": None, "grown": {}}
    assert found.pop("test_01_nothing_yet") == nothing
    for name in (
        "04_after_failures",
        "07_after_a_workspace_and_a_cycle",
        "12_frees_all",
        "14_after_it",
        "18_after_them",
    ):
        answer = found.pop(f"test_{name}")
        assert (name, answer["check"], answer["grown"]) == (name, None, {})
    held = "the pytest process itself holds {} of GPU memory; left by "
    both = "test_it.py::test_09_keeps_32 (+32.00 MiB), test_it.py::test_08_keeps_16 (+16.00 MiB)"
    assert {name: answer["check"] for name, answer in found.items()} == {
        "test_10_names_both": held.format("48.00 MiB") + both,
        "test_11_names_its_own_too": held.format("112.00 MiB") + "this test itself (+64.00 MiB), " + both,
    }


def test_a_tensor_of_a_module_is_no_tests(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, launcher: Launcher
) -> None:
    tests = """
import torch
GLOBAL = torch.empty(2**20, device="cuda")

def test_a(said):
    said()
"""
    found = said(pytester, monkeypatch, launcher, tests, passed=1)
    assert found["test_a"]["check"] == (
        "the pytest process itself holds 4.00 MiB of GPU memory; left by outside of tests (while collecting, or in a "
        "hook) (+4.00 MiB)"
    )


@pytest.mark.parametrize(("option", "kept"), [("-q", False), ("--pdb", True), ("--trace", True)])
def test_frames_are_cleared_unless_a_debugger_looks_at_them(pytester: pytest.Pytester, option: str, kept: bool) -> None:
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(
        quiet="import pdb\n\nclass Pdb(pdb.Pdb):\n    def interaction(self, *args):\n        pass\n",
        test_it="""
        import weakref

        ERRORS, HELD = [], []

        class Tensor:
            pass

        def test_a():
            held = Tensor()
            HELD.append(weakref.ref(held))
            ERRORS.append(ValueError())
            raise ERRORS[0]

        def test_b():
            assert HELD[0]() is None
        """,
    )
    result = pytester.runpytest_inprocess("-p", "no:randomly", "--pdbcls=quiet:Pdb", option)
    result.assert_outcomes(failed=1 + kept, passed=1 - kept)


# Frames, without a GPU ------------------------------------------------------------------------------------------------


class Tensor:
    """Something that can be seen to die."""


def failing(tensors: list[weakref.ref[Tensor]], error: BaseException) -> None:
    held = Tensor()
    tensors.append(weakref.ref(held))
    raise error


def caught(raising: Any, *arguments: Any) -> BaseException:
    try:
        raising(*arguments)
    except BaseException as error:
        return error
    raise AssertionError


def clear(error: BaseException) -> None:
    plugin = Leftovers()
    plugin._failed.append(error)
    plugin.clear_frames()


@pytest.fixture
def tensors() -> Iterator[list[weakref.ref[Tensor]]]:
    """That failing functions made; only their frames keep them."""
    gc.disable()  # only reference counts may free them
    yield []
    gc.enable()


def alive(tensors: list[weakref.ref[Tensor]]) -> int:
    return sum(tensor() is not None for tensor in tensors)


def test_causes_and_contexts_let_go_too(tensors: list[weakref.ref[Tensor]]) -> None:
    def raises() -> None:
        try:
            try:
                failing(tensors, KeyError())
            except KeyError:
                failing(tensors, ValueError())
        except ValueError as error:
            raise RuntimeError from error

    error = caught(raises)
    assert alive(tensors) == 2
    clear(error)
    assert alive(tensors) == 0


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ExceptionGroup is of Python 3.11")
def test_groups_let_go_too(tensors: list[weakref.ref[Tensor]]) -> None:
    inner = [caught(failing, tensors, KeyError()), caught(failing, tensors, ValueError())]
    group = ExceptionGroup("outer", [ExceptionGroup("inner", inner)])  # type: ignore[type-var]  # noqa: F821
    assert alive(tensors) == 2
    clear(group)
    assert alive(tensors) == 0


def test_a_frame_that_was_looked_at_lets_go_too(tensors: list[weakref.ref[Tensor]]) -> None:
    error = caught(failing, tensors, KeyError())
    assert error.__traceback__ is not None
    assert error.__traceback__.tb_next is not None
    assert "held" in error.__traceback__.tb_next.tb_frame.f_locals
    clear(error)
    assert alive(tensors) == 0


def test_what_pytest_keeps_for_a_debugger_lets_go_too(
    tensors: list[weakref.ref[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [caught(failing, tensors, KeyError()) for _ in range(3)]
    monkeypatch.setattr(sys, "last_exc", errors[0], raising=False)
    monkeypatch.setattr(sys, "last_value", errors[1], raising=False)
    monkeypatch.setattr(sys, "last_traceback", errors[2].__traceback__, raising=False)
    clear(ValueError())
    assert alive(tensors) == 0


def test_exceptions_that_name_each_other_end() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__context__ = second, first
    first.exceptions = [second, "no exception"]  # type: ignore[attr-defined]
    assert sorted(map(repr, related([first]))) == ["KeyError()", "ValueError()"]


def test_a_fixture_that_goes_on_is_not_ended() -> None:
    """The exception passed through the generator, which waits to be resumed."""
    ended: list[str] = []

    def fixture() -> Iterator[BaseException]:
        try:
            raise ValueError
        except ValueError as error:
            raised = error
        yield raised
        ended.append("teardown")

    generator = fixture()
    error = next(generator)
    frame: FrameType = generator.gi_frame  # type: ignore[attr-defined]
    assert suspended({frame}) == {frame}
    clear(error)
    assert list(generator) == []
    assert ended == ["teardown"]


def test_a_generator_that_failed_lets_go(tensors: list[weakref.ref[Tensor]]) -> None:
    def fixture() -> Iterator[None]:
        failing(tensors, ValueError())
        yield

    error = caught(next, fixture())
    clear(error)
    assert alive(tensors) == 0


def test_without_torch_nothing_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    plugin = Leftovers()
    assert (leftovers.allocated(), leftovers.reserved(), plugin.check()) == (0, 0, None)
    assert "torch" not in sys.modules


def test_a_stand_in_for_torch_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", json)
    assert Leftovers().check() is None
