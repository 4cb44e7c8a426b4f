"""Which errors in building and training a model are a refusal of the settings, and which are faults."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_mbmem.errors import Refused

pytestmark = pytest.mark.usefixtures("megatron_model")  # so that they run in a worker


def run_as(module: str, code: str, added: dict[str, Any] | None = None) -> None:
    """Run code as a line of a module, under `refusals`."""
    import torch

    from pytest_mbmem.measure.worker import refusals

    with refusals(added):
        exec(compile(code, f"{module}.py", "exec"), {"__name__": module, "torch": torch})


@pytest.mark.parametrize(
    ("module", "who"),
    [("megatron.core.some", "Megatron Core"), ("transformer_engine.pytorch.some", "Transformer Engine")],
)
@pytest.mark.parametrize("error", ["RuntimeError", "ValueError", "AssertionError", "NotImplementedError"])
def test_an_error_that_a_library_raises_itself_is_its_refusal(module: str, who: str, error: str) -> None:
    with pytest.raises(Refused, match=f"^{who} refuses it: no such thing$"):
        run_as(module, f"raise {error}('no such thing')")


def test_an_error_of_torch_in_a_library_s_line_is_none() -> None:
    with pytest.raises(RuntimeError, match="negative dimension"):
        run_as("megatron.core.some", "torch.empty(-1)")


RAISED_AGAIN = """
try:
    {line}
except RuntimeError as error:
    raise type(error)(f"{error}, here").with_traceback(error.__traceback__)
"""  # as Megatron's build_module does


def test_an_error_raised_again_is_that_of_the_first_line() -> None:
    with pytest.raises(Refused, match=r"^Megatron Core refuses it: no, here$"):
        run_as("megatron.core.some", RAISED_AGAIN.replace("{line}", "raise RuntimeError('no')"))
    with pytest.raises(RuntimeError, match=r"negative dimension.*here"):
        run_as("megatron.core.some", RAISED_AGAIN.replace("{line}", "torch.empty(-1)"))


@pytest.mark.parametrize("module", ["pytest_mbmem.some", "some"])
def test_an_error_of_other_code_is_a_fault(module: str) -> None:
    for error in (RuntimeError, ValueError):
        with pytest.raises(error, match=r"^no$"):
            run_as(module, f"raise {error.__name__}('no')")


def test_with_added_settings_every_error_in_megatron_is_its_answer() -> None:
    with pytest.raises(Refused, match=r"^Megatron Core fails with fp8 added: RuntimeError: .*negative dimension"):
        run_as("megatron.core.some", "torch.empty(-1)", {"fp8": "hybrid"})
    with pytest.raises(RuntimeError, match="negative dimension"):
        run_as("pytest_mbmem.some", "torch.empty(-1)", {"fp8": "hybrid"})


def test_running_out_of_memory_is_no_refusal() -> None:
    import torch

    with pytest.raises(torch.OutOfMemoryError):
        run_as("megatron.core.some", "raise torch.OutOfMemoryError('none left')", {"fp8": "hybrid"})
