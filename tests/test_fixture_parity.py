"""`mbmem.parity`: what it takes, what it gives, and how it fails."""

from __future__ import annotations

import pytest

from pytest_mbmem import incompatibilities
from pytest_mbmem.measure import host

RECIPES = """
    import pytest
    from pytest_mbmem import Model, ParityFailed, Recipe, Training

    MODEL = Model(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=1000, hidden_dropout=0.1)
    CONTROL = Recipe(model=MODEL, training=Training(seq_length=64))
    FULL = CONTROL.but(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
"""


def test_equal_numbers_give_a_table(host_project: pytest.Pytester) -> None:
    host_project.makepyfile(
        RECIPES
        + """
    def test_x(mbmem):
        parity = mbmem.parity(CONTROL, FULL, precisions=["fp32"])
        assert parity.passed
        assert parity.error("weight gradient", "fp32") < 1e-5
        assert list(parity.differences) == [
            "memory.recompute_granularity", "memory.recompute_method", "memory.recompute_num_layers"
        ]
        print(parity.table())
    """
    )
    result = host_project.runpytest("-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        ["* tensors  equal  largest error  tolerance", "fp32 output *  1e-05", "fp32 main_grad *  1e-05"]
    )


def test_other_numbers_fail_at_the_users_line(host_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PARITY", "host_faults:replays_other_dropout")
    host_project.makepyfile(
        RECIPES
        + """
    def test_x(mbmem):
        mbmem.parity(CONTROL, FULL, precisions=["bf16"])

    def test_expected(mbmem):
        with pytest.raises(ParityFailed, match="bf16 main_grad: relative error"):
            mbmem.parity(CONTROL, FULL, precisions=["bf16"])
    """
    )
    result = host_project.runpytest()
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            ">*mbmem.parity(CONTROL, FULL, precisions=[[]*",
            "E *ParityFailed: control -> candidate: memory.recompute_granularity: None -> full; *",
            "E *bf16 weight gradient: relative error *, tolerance 0.02: *, backward * on rank 0",
            "E *bf16 main_grad: relative error *, tolerance 0.02: * on rank 0",
            "E *on 1 rank; shrunk for the host: *",
        ]
    )
    result.stdout.no_fnmatch_line("*session.py:*")


def test_what_goes_wrong_in_a_worker_raises_its_own_kind(
    host_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incompatibilities, "check", lambda *_: None)  # which would refuse it before
    host_project.makepyfile(
        RECIPES
        + """
    from pytest_mbmem import Refused

    def test_x(mbmem):
        wrong = {"recompute_granularity": "selective", "recompute_modules": ["nonsense"]}  # instead of the control's
        with pytest.raises(Refused, match="candidate, bf16: Megatron Core refuses it: Invalid choices"):
            mbmem.parity(CONTROL, wrong, precisions=["bf16"])
    """
    )
    host_project.runpytest().assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("CONTROL, FULL.but(seq_length=32)", "*differ in more than memory settings: training.seq_length: 64 -> 32 *"),
        ("CONTROL, 42", "*mbmem.parity(42): allowed are a Recipe, *"),
        ("CONTROL, {'recompute': 'full'}", "*mbmem.parity()*recompute*"),
    ],
)
def test_a_mistake_is_said_in_one_message(host_project: pytest.Pytester, arguments: str, message: str) -> None:
    host_project.makepyfile(RECIPES + f"\n    def test_x(mbmem):\n        mbmem.parity({arguments})")
    result = host_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*_ test_x _*", message])
    result.stdout.no_fnmatch_line("*session.py:*")


def test_parity_measures_no_memory(host_project: pytest.Pytester) -> None:
    host_project.makepyfile(
        RECIPES
        + """
    @pytest.mark.peak_memory(limit="1 GiB")
    def test_x(mbmem):
        mbmem.parity(CONTROL, FULL, precisions=["fp32"])
    """
    )
    result = host_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["nothing was measured: *"])
