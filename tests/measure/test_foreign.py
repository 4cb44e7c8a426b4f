"""Which processes on a GPU are others, from the lists that NVML gives."""

from __future__ import annotations

import pytest

from pytest_mbmem.measure import foreign, nvml
from pytest_mbmem.measure.nvml import PhysicalGpu, Process

GPU = PhysicalGpu(0, "GPU-1", "NVIDIA H100", 2**36, (9, 0), is_mig=False)
WORKER, PYTEST, OTHER = 100, 90, 4242


@pytest.mark.parametrize(
    ("listed", "ours", "others"),
    [
        ([], [], None),
        ([OTHER], [], "4242 with 1.00 GiB"),
        ([WORKER], [WORKER], None),
        ([WORKER, PYTEST], [WORKER, PYTEST], None),
        ([WORKER, PYTEST], [WORKER], "90 with 1.00 GiB"),
        ([WORKER, OTHER], [WORKER], "4242 with 1.00 GiB"),
        ([WORKER, PYTEST, OTHER], [WORKER, PYTEST], "4242 with 1.00 GiB"),
        ([31], [WORKER], None),  # in a container, where NVML has other numbers
        ([31, 32], [WORKER], "32 with 1.00 GiB"),
        ([31, 32], [WORKER, PYTEST], None),
        (None, [WORKER], None),  # NVML does not tell
    ],
)
def test_others_are_those_that_are_not_ours(
    monkeypatch: pytest.MonkeyPatch, listed: list[int] | None, ours: list[int], others: str | None
) -> None:
    found = None if listed is None else tuple(Process(pid, 2**30) for pid in listed)
    monkeypatch.setattr(nvml, "processes", lambda gpu: found)
    problem = foreign.problem(GPU, ours)
    assert problem == (others and f"other processes use GPU 0 (GPU-1): {others}")


def test_an_empty_list_cannot_be_believed_where_this_process_must_be_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for listed, can_see in ((None, False), ((), False), ((Process(31, None),), True)):
        monkeypatch.setattr(nvml, "processes", lambda gpu, found=listed: found)
        assert foreign.can_see(GPU) is can_see
