"""pytest's hooks, and nothing else: options, markers, which tests measure, reports.

Imports neither torch nor anything that takes time. The hooks that run for every test are in `session`, and are
registered when the first test that measures is collected.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from typing import Any

import pytest

from . import options
from .errors import UserError
from .fixtures import mbmem, megatron_model
from .session import (
    FITS_MARKER,
    FRAGMENTATION_MARKER,
    INCOMPATIBLE_MARKER,
    MARKER,
    PLAN,
    RUN,
    SAVING_MARKER,
    THROUGHPUT_MARKER,
    Collected,
    Run,
)

__all__ = ["mbmem", "megatron_model"]

_MARKER_HELP = (
    f'{MARKER}(limit=None, *, metric="allocated", phase=None, tolerance=None, slack=None): fail when peak GPU memory '
    'exceeds a limit ("60 GiB") or a baseline; metric is "allocated" or "reserved", phase as in "optimizer" or "step-2"'
)

_SAVING_MARKER_HELP = (
    f"{SAVING_MARKER}(control, *, at_least=None, max_slowdown=None, metric=None, phase=None, settings=None): "
    'fail when peak GPU memory is not at_least ("1 GiB", "5%") below that of the control (a recipe, or the settings '
    'that it has instead), or when a step is more than max_slowdown ("7%") longer (virtual: in FLOPs)'
)

_FITS_MARKER_HELP = (
    f"{FITS_MARKER}(*gpus, headroom=None): fail when what the test measures does not train on a virtual GPU "
    '("h100-80gb"; without a name: that of the session) beside memory outside PyTorch and headroom ("4 GiB")'
)

_FRAGMENTATION_MARKER_HELP = (
    f"{FRAGMENTATION_MARKER}(limit, *, phase=None): fail when more of the peak that PyTorch reserves than a limit "
    '("10%", "4 GiB") never holds a tensor'
)

_THROUGHPUT_MARKER_HELP = (
    f"{THROUGHPUT_MARKER}(minimum=None, *, tolerance=None, steps=10, warmup=3): fail when a real GPU's throughput is "
    'lower than a minimum ("400 TFLOP/s", "3 k tokens/s" per GPU), or without one than a baseline, by more than '
    "tolerance (0% of a minimum, 5% of a baseline) and noise; on a virtual GPU, when a step computes, sends or moves "
    "more than a baseline allows, but not for a minimum without tolerance"
)

_INCOMPATIBLE_MARKER_HELP = (
    f"{INCOMPATIBLE_MARKER}(id): pass only if the installed Megatron Core refuses what the test measures, or raises in "
    'the test\'s body, as is documented for the constraint of that id ("cpu-offload-with-pp"; see mbmem explain)'
)

_GROWTH_MARKER_HELP = (
    "no_memory_growth(*, control=None, steps=5, microbatches=None, slack=None): fail when memory grows with the steps "
    "or the microbatches, when more stays after backward than in the control, or when it takes a garbage collection to "
    "free something"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options and ini keys."""
    options.add(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and check all options before anything is collected."""
    config.addinivalue_line("markers", _MARKER_HELP)
    config.addinivalue_line("markers", _SAVING_MARKER_HELP)
    config.addinivalue_line("markers", _FITS_MARKER_HELP)
    config.addinivalue_line("markers", _FRAGMENTATION_MARKER_HELP)
    config.addinivalue_line("markers", _THROUGHPUT_MARKER_HELP)
    config.addinivalue_line("markers", _GROWTH_MARKER_HELP)
    config.addinivalue_line("markers", _INCOMPATIBLE_MARKER_HELP)
    config.addinivalue_line("markers", "mbmem_conformance: put on what --mbmem-conformance collects")
    item = sys.modules.get("pytest_mbmem.item")  # loaded wherever a whole test runs in a worker
    worker = item.WORKER if item is not None else None
    try:
        run = Run(config, options.Options.read(config), worker)
        if run.options.conformance:
            from . import conformance

            conformance.begin(run)
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[RUN] = run
    run.leave_reports_to_the_first_rank()
    if run.options.in_use:  # reports are asked for, or baselines may have lost all their tests
        run.register_reporter()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Device, versions and baselines, where this session has anything to do with them."""
    run = config.stash[RUN]
    return run.header_lines() if run.options.in_use else []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Make a mistake in a marker an error of its module, as one in the test's code is."""
    report = yield
    run = collector.config.stash[RUN]
    plans = [run.plan(node) for node in report.result or () if isinstance(node, pytest.Item)]
    mistakes = [plan.mistake for plan in plans if plan is not None and plan.mistake is not None]
    if mistakes:
        report.outcome, report.longrepr, report.result = "failed", "\n".join(mistakes), []
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, object, object]:
    """Note all tests before some are deselected, and plan those that are left, with the markers they got here."""
    run = config.stash[RUN]
    run.collected.add(item.nodeid for item in items)
    result = yield
    for item in items:
        plan = run.plan(item)
        if plan is not None:
            item.stash[PLAN] = plan
            run.register_hooks()
    return result


def pytest_deselected(items: list[pytest.Item]) -> None:
    """Remember that not all tests were selected."""
    if items:
        items[0].config.stash[RUN].collected.complete = False


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, dict[str, Any] | None, dict[str, Any] | None]:
    """Send figures as text: xdist's execnet cannot send numbers below -2**31, which differences of bytes can be."""
    data = yield
    if data is not None and "mbmem" in data:
        data["mbmem"] = json.dumps(data["mbmem"])
        # JUnit files hold text anyway
        properties = data["user_properties"]
        data["user_properties"] = [(n, str(v) if str(n).startswith("mbmem_") else v) for n, v in properties]
    return data


@pytest.hookimpl(tryfirst=True)
def pytest_report_from_serializable(data: dict[str, Any]) -> None:
    """The other way round, before pytest makes the report."""
    if isinstance(data.get("mbmem"), str):
        data["mbmem"] = json.loads(data["mbmem"])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config) -> None:
    """In xdist's controller: reports come from the workers, so have the hooks that gather them."""
    from .report.live import Controller

    config.stash[RUN].register_reporter()
    Controller.of(config)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished(node: object, ids: list[str]) -> None:
    """In xdist's controller: what a worker collected."""
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    config.stash[RUN].collected.add(ids)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """In xdist's controller: whether the worker deselected tests."""
    config: pytest.Config = node.config  # type: ignore[attr-defined]
    output = getattr(node, "workeroutput", {})
    collected: Collected = config.stash[RUN].collected
    collected.complete &= output.get("mbmem_complete", True)


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """In xdist's workers: tell the controller whether tests were deselected."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["mbmem_complete"] = session.config.stash[RUN].collected.complete
    return (yield)
