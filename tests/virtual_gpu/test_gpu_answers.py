"""Reads of the host that are answered in place of a kernel."""

from __future__ import annotations

import pytest

ANSWERS = """
from pytest_mbmem.virtual_gpu.answers import UnmetAssumption, answer_read, answers_left, exactly_taken, forget_answers
from pytest_mbmem.virtual_gpu.counters import read_counters
def count(n):
    return n.to_bytes(4, "little")
def long(*values):
    return torch.tensor(values).numpy().tobytes()
"""


def test_the_next_read_of_that_size_brings_the_answer_once(on_gpu):
    assert on_gpu(
        ANSWERS
        + """
x = torch.zeros(2, dtype=torch.long, device="cuda")
answer_read(long(3, 4))
result = [x[0].item(), answers_left(), x.tolist(), answers_left(), x.tolist()]
"""
    ) == [0, 1, [3, 4], 0, [0, 0]]


def test_answers_of_one_size_are_taken_in_the_order_given(on_gpu):
    assert on_gpu(
        ANSWERS
        + """
x = torch.zeros(1, dtype=torch.long, device="cuda")
y = torch.zeros(1, dtype=torch.int32, device="cuda")
for answer in (long(1), count(2), long(3)):
    answer_read(answer)
result = [x.item(), x.item(), y.item(), answers_left()]
answer_read(long(5))
result.append(x.item())
"""
    ) == [1, 3, 2, 0, 5]


def test_an_answer_for_an_address_waits_for_a_read_from_there(on_gpu):
    assert on_gpu(
        ANSWERS
        + """
x, y = torch.zeros(2, 1, dtype=torch.long, device="cuda").unbind()
answer_read(long(7), y.data_ptr())
result = [x.item(), y.item(), y.item()]
"""
    ) == [0, 7, 0]


def test_pinned_and_asynchronous_reads_are_answered(on_gpu):
    assert on_gpu(
        ANSWERS
        + """
x = torch.zeros(3, dtype=torch.long, device="cuda")
answer_read(long(1, 2, 3), x.data_ptr())
answer_read(long(4, 5, 6), x.data_ptr())
with torch.cuda.stream(torch.cuda.Stream()):
    first = x.to("cpu", non_blocking=True)
torch.cuda.synchronize()
pinned = torch.empty(3, dtype=torch.long).pin_memory()
pinned.copy_(x)
result = [first.tolist(), pinned.tolist()]
"""
    ) == [[1, 2, 3], [4, 5, 6]]


def test_an_answered_read_is_no_zero_read(on_gpu):
    assert on_gpu(
        ANSWERS
        + """
x = torch.zeros(1, dtype=torch.long, device="cuda")
before = read_counters().zero_reads
answer_read(long(0))
x.item()
answered = read_counters().zero_reads - before
x.item()
result = [answered, read_counters().zero_reads - before]
"""
    ) == [0, 1]


def test_an_answer_does_not_change_what_is_on_the_device(on_gpu):
    assert on_gpu(
        ANSWERS
        + """
x = torch.tensor([9]).cuda()
answer_read(long(1))
result = [x.item(), x.item()]
"""
    ) == [1, 9]


# torch 2.14 reads the number of elements as an int32, once for masks of up to 2^30 elements
SELECTING = {
    "masked_select": ("x.masked_select(mask)", [37]),
    "indexing by a mask": ("x[mask]", [37]),
    "nonzero": ("mask.nonzero()", [37, 2]),
}


@pytest.mark.parametrize("how", SELECTING)
def test_operators_that_size_their_result_on_the_host_take_the_stated_count(on_gpu, how):
    code, shape = SELECTING[how]
    got, zeros, left = on_gpu(
        ANSWERS
        + f"""
x, mask = torch.zeros(8, 100, device="cuda"), torch.zeros(8, 100, dtype=torch.bool, device="cuda")
before = read_counters().zero_reads
answer_read(count(37))
got = list(({code}).shape)
result = [got, read_counters().zero_reads - before, answers_left()]
"""
    )
    assert (got, zeros, left) == (shape, 0, 0)


def test_forgotten_answers_are_gone(on_gpu):
    assert on_gpu(
        ANSWERS
        + """
x = torch.zeros(1, dtype=torch.long, device="cuda")
answer_read(long(1))
answer_read(long(2))
forget_answers()
result = [answers_left(), x.item()]
answer_read(long(3))
result.append(x.item())
"""
    ) == [0, 0, 3]


CHECKED = (
    ANSWERS
    + """
x = torch.zeros(1, dtype=torch.long, device="cuda")
def outcome(body):
    try:
        with exactly_taken("this code"):
            body()
    except UnmetAssumption as error:
        return str(error)
    return "taken"
"""
)


def test_reads_that_meet_their_answers_are_fine(on_gpu):
    assert on_gpu(CHECKED + "result = outcome(lambda: (answer_read(long(1)), x.item()))") == "taken"


def test_an_answer_that_nothing_takes_is_an_error_and_gone(on_gpu):
    message, left = on_gpu(CHECKED + "result = [outcome(lambda: answer_read(long(1))), answers_left()]")
    assert "this code read other values from the device than known: 1 answers were not taken" in message
    assert left == 0


def test_a_zero_read_without_an_answer_is_an_error(on_gpu):
    assert "1 reads had none" in on_gpu(CHECKED + "result = outcome(x.item)")


def test_another_error_passes_through(on_gpu):
    message, left = on_gpu(
        CHECKED
        + """
def fails():
    answer_read(long(1))
    raise ValueError("its own")
try:
    outcome(fails)
except ValueError as error:
    result = [str(error), answers_left()]
"""
    )
    assert (message, left) == ("its own", 0)
