"""GPU memory that ordinary tests leave behind in the pytest process, where it would falsify what is measured later.

The process that measures is another one, but the GPU is the same. Imports no torch: a process that has not loaded it
holds nothing.
"""

from __future__ import annotations

import gc
import inspect
import sys
import traceback
from collections.abc import Generator, Iterator
from contextlib import suppress
from types import AsyncGeneratorType, CoroutineType, FrameType, GeneratorType, TracebackType
from typing import Any

import pytest

from .units import format_bytes

_BEFORE = "outside of tests (while collecting, or in a hook)"
_MOST_NAMED = 5

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_FRAME_OF: dict[type, str] = {GeneratorType: "gi_frame", CoroutineType: "cr_frame", AsyncGeneratorType: "ag_frame"}


class Leftovers:
    """Knows after which tests of this process more GPU memory was held than before.

    A pytest plugin: its hooks must run for every test, also for those that measure nothing.

    Args:
        clear_frames: let go of what the frames of a failed test hold, once it is reported. Not while a debugger may
            want to look at them.
    """

    @classmethod
    def of(cls, config: pytest.Config) -> Leftovers:
        """Of a session with these options."""
        return cls(clear_frames=not (config.getoption("usepdb", False) or config.getoption("trace", False)))

    def __init__(self, *, clear_frames: bool = True) -> None:
        self.grown: dict[str, int] = {}
        """Bytes that were held more after each test than before it, by its node id; tests that left nothing are
        absent."""
        self._clear = clear_frames
        self._failed: list[BaseException] = []  # of which the frames are not cleared yet
        self._held = 0  # after the last test
        self._running: str | None = None

    def check(self) -> str | None:
        """Why nothing can be measured now: what this process holds on its GPUs, and since which tests; None if nothing.

        Collects garbage and gives cached memory back to the GPU first.
        """
        self.clear_frames()
        if reserved():
            gc.collect()
            _free_caches()
        held = allocated() or reserved()
        if not held:
            self.grown.clear()
            self._held = 0
            return None
        grown = dict(self.grown)
        if self._running is not None and (more := held - self._held) > 0:
            grown["this test itself"] = more
        return f"the pytest process itself holds {format_bytes(held)} of GPU memory; {_since(grown)}"

    # Hooks ------------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Compare before and after."""
        self._grew(_BEFORE)
        self._running = item.nodeid
        try:
            return (yield)
        finally:
            self.clear_frames()
            self._running = None
            self._grew(item.nodeid)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Remember what failed: other hooks still look at it."""
        report = yield
        if call.excinfo is not None and self._clear:
            self._failed.append(call.excinfo.value)
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """A test that runs again begins without what its last run held."""
        self.clear_frames()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        """Reports of setup and call are made, and fixtures may measure what is left."""
        self.clear_frames()

    def _grew(self, test: str) -> None:
        now = allocated()
        if now > self._held:  # what a garbage collection frees is not left behind
            gc.collect()
            now = allocated()
        if now > self._held:
            self.grown[test] = self.grown.get(test, 0) + now - self._held
        self._held = now

    def clear_frames(self) -> None:
        """Let go of what the frames of reported failures hold."""
        failed, self._failed = self._failed, []
        if not failed:
            return
        last = [getattr(sys, name, None) for name in ("last_exc", "last_value")]  # pytest sets them for debuggers
        errors = [error for error in (*failed, *last) if isinstance(error, BaseException)]
        tracebacks = [error.__traceback__ for error in related(errors)]
        frames = {frame for tb in (*tracebacks, getattr(sys, "last_traceback", None)) for frame in _frames(tb)}
        for frame in frames - suspended(frames):
            with suppress(RuntimeError):  # still running: one of pytest's own
                frame.clear()
                _ = frame.f_locals  # before Python 3.13 a copy, as pytest's look at it has left it; renews the copy


def related(errors: list[BaseException]) -> Iterator[BaseException]:
    """These exceptions, their causes and contexts, and what groups hold."""
    seen: set[int] = set()
    waiting = list(errors)
    while waiting:
        error = waiting.pop()
        if id(error) not in seen:
            seen.add(id(error))
            yield error
            within = getattr(error, "exceptions", ())  # of an ExceptionGroup
            found = [error.__cause__, error.__context__, *(within if isinstance(within, (tuple, list)) else ())]
            waiting += [other for other in found if isinstance(other, BaseException)]


def _frames(tb: TracebackType | None) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(tb))


def suspended(frames: set[FrameType]) -> set[FrameType]:
    """Those of generators and coroutines that will go on: clearing them would end a fixture before its teardown."""
    candidates = {frame for frame in frames if frame.f_code.co_flags & _SUSPENDABLE}
    things = gc.get_objects() if candidates else []
    alive = {getattr(thing, _FRAME_OF[type(thing)]) for thing in things if type(thing) in _FRAME_OF}
    return candidates & alive


def _since(grown: dict[str, int]) -> str:
    if not grown:
        return "no test was seen to leave it"
    largest = sorted(grown.items(), key=lambda pair: -pair[1])
    named = [f"{test} ({format_bytes(size, signed=True)})" for test, size in largest[:_MOST_NAMED]]
    more = f" and {len(largest) - _MOST_NAMED} more" if len(largest) > _MOST_NAMED else ""
    return f"left by {', '.join(named)}{more}"


# torch.cuda, as far as this process has it ----------------------------------------------------------------------------


def _cuda() -> Any:
    """`torch.cuda` if this process uses it, else None."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    started = getattr(cuda, "is_initialized", None)
    return cuda if started is not None and started() else None


def allocated() -> int:
    """Bytes that tensors of this process hold, on all its GPUs."""
    cuda = _cuda()
    return 0 if cuda is None else sum(cuda.memory_allocated(device) for device in range(cuda.device_count()))


def reserved() -> int:
    """Bytes that PyTorch's caching allocator of this process holds, on all its GPUs."""
    cuda = _cuda()
    return 0 if cuda is None else sum(cuda.memory_reserved(device) for device in range(cuda.device_count()))


def _free_caches() -> None:
    """Give back what no tensor holds: cuBLAS's workspaces, which PyTorch keeps like tensors, and cached segments."""
    cuda = _cuda()
    pools = {tuple(segment.get("segment_pool_id", (0, 0))) for segment in cuda.memory_snapshot()}
    clear_workspaces = getattr(sys.modules["torch"]._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None and pools <= {(0, 0)}:  # a CUDA graph goes on using the workspaces it was made with
        clear_workspaces()
    cuda.empty_cache()
