from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_mbmem.errors import UserError
from pytest_mbmem.units import (
    Rate,
    format_bytes,
    format_flops,
    format_fraction,
    format_seconds,
    parse_bytes,
    parse_fraction,
    parse_rate,
)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("2.5 GiB", 2_684_354_560),
        ("1.2 GB", 1_200_000_000),
        ("512 MiB", 536_870_912),
        ("512MiB", 536_870_912),
        (" 100 B ", 100),
        ("1 KiB", 1024),
        ("1 kB", 1000),
        ("1 MB", 10**6),
        ("3 TiB", 3 * 2**40),
        ("3 TB", 3 * 10**12),
        ("0 B", 0),
        (0, 0),
        (2**70, 2**70),
        ("0.1 KiB", 102),
        ("9007199254740993 B", 9007199254740993),  # 2**53 + 1: lost by a float
    ],
)
def test_sizes_are_read(value: object, expected: int) -> None:
    assert parse_bytes(value, "limit") == expected


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "100",
        "1 KB",
        "1 gb",
        "1 Gb",
        "-1 GiB",
        "1,5 GiB",
        "1e3 B",
        "1. GiB",
        "nan GiB",
        "inf B",
        "1 GiB 2 MiB",
        "٣ GiB",
        "1\nGiB",
        -1,
        1.0,
        2.5e9,
        True,
        None,
        [1],
        math.nan,
        b"1 B",
    ],
)
def test_a_wrong_size_is_named_with_its_source_and_the_units(value: object) -> None:
    with pytest.raises(UserError) as error:
        parse_bytes(value, "@peak_memory: limit")
    assert str(error.value).startswith(f"@peak_memory: limit: {value!r} is not a size")
    assert "GiB, TiB, kB" in str(error.value)


@pytest.mark.parametrize(
    ("n", "signed", "expected"),
    [
        (0, False, "0 B"),
        (0, True, "+0 B"),
        (1023, False, "1.00 KiB"),
        (1000, False, "1000 B"),
        (1024, False, "1.00 KiB"),
        (2_684_354_560, False, "2.50 GiB"),
        (-1_258_291, False, "-1.20 MiB"),
        (1_258_291, True, "+1.20 MiB"),
        (2**20 - 1, False, "1.00 MiB"),
        (5000 * 2**40, False, "5000.00 TiB"),
    ],
)
def test_sizes_are_printed_in_the_largest_binary_unit(n: int, signed: bool, expected: str) -> None:
    assert format_bytes(n, signed) == expected


@given(st.integers(0, 2**52))
def test_a_printed_size_reads_back_within_its_two_decimals(n: int) -> None:
    again = parse_bytes(format_bytes(n), "test")
    assert abs(again - n) <= max(1, 0.0051 * n)


@pytest.mark.parametrize(
    ("value", "expected"),
    [("3%", 0.03), ("0.5 %", 0.005), ("0.03", 0.03), (".5", 0.5), (0.03, 0.03), (0, 0.0), ("0", 0.0), ("100%", 1.0)],
)
def test_fractions_are_read(value: object, expected: float) -> None:
    result = parse_fraction(value, "tolerance")
    assert result == expected
    assert type(result) is float


@pytest.mark.parametrize(
    "value",
    [
        1,
        3,
        "3",
        "1",
        1.0,
        -0.01,
        "-3%",
        "101%",
        "",
        "%",
        "3 percent",
        "1e-2",
        math.nan,
        math.inf,
        "nan",
        True,
        False,
        None,
    ],
)
def test_a_wrong_fraction_is_named_with_its_source_and_the_forms(value: object) -> None:
    with pytest.raises(UserError) as error:
        parse_fraction(value, "tolerance")
    assert str(error.value).startswith(f"tolerance: {value!r} is not a fraction")
    assert "'3%'" in str(error.value)


@pytest.mark.parametrize(
    ("value", "signed", "expected"),
    [
        (0.0123, False, "1.23%"),
        (0.0123, True, "+1.23%"),
        (-0.5, True, "-50.00%"),
        (-1e-9, True, "+0.00%"),
        (2.0, False, "200.00%"),
    ],
)
def test_fractions_are_printed_as_percentages(value: float, signed: bool, expected: str) -> None:
    assert format_fraction(value, signed) == expected


@pytest.mark.parametrize("parse", [parse_bytes, parse_fraction])
@given(value=st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_any_value_is_read_or_refused_with_a_user_error(parse: Callable[[object, str], float], value: object) -> None:
    with contextlib.suppress(UserError):
        assert parse(value, "test") >= 0


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("400 TFLOP/s", Rate(4e14, "FLOP/s")),
        (" 1.5PFLOP/s ", Rate(1.5e15, "FLOP/s")),
        ("0.5 GFLOP/s", Rate(5e8, "FLOP/s")),
        ("2 MFLOP/s", Rate(2e6, "FLOP/s")),
        ("3105.5 tokens/s", Rate(3105.5, "tokens/s")),
        ("3.1 k tokens/s", Rate(3100.0, "tokens/s")),
    ],
)
def test_rates_are_read(text: str, rate: Rate) -> None:
    assert parse_rate(text, "minimum") == rate


@pytest.mark.parametrize(
    "value",
    [
        *(400, 4e14, None, True, "", "400", "400 TFLOPS", "400 TFLOP", "400 tflop/s", "400 FLOP/s", "-1 tokens/s"),
        *("0 tokens/s", "0.0 TFLOP/s", "1e3 tokens/s", "3K tokens/s", "3 k  tokens/s", "nan TFLOP/s", "4 GiB/s"),
        *(f"{'9' * 400} tokens/s", f"0.{'0' * 400}1 tokens/s"),  # more and less than any that a float holds
    ],
)
def test_what_is_no_rate_is_refused(value: object) -> None:
    with pytest.raises(UserError) as raised:
        parse_rate(value, "minimum")
    assert str(raised.value) == (
        f"minimum: {value!r} is not a rate; write a number above 0 with one of the units MFLOP/s, GFLOP/s, TFLOP/s, "
        "PFLOP/s, tokens/s, k tokens/s"
    )


@given(st.floats(0.01, 1e21), st.sampled_from(["FLOP/s", "tokens/s"]))
def test_what_a_rate_prints_can_be_written(amount: float, unit: str) -> None:
    rate = Rate(amount, unit)  # type: ignore[arg-type]
    if not str(rate).startswith("0.00"):
        assert parse_rate(str(rate), "t").amount == pytest.approx(amount, rel=0.51)  # 0.01 of the smallest unit


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (Rate(4.123e14, "FLOP/s"), "412.30 TFLOP/s"),
        (Rate(999_994_999_999, "FLOP/s"), "999.99 GFLOP/s"),
        (Rate(999_995_000_001, "FLOP/s"), "1.00 TFLOP/s"),
        (Rate(996, "tokens/s"), "996.00 tokens/s"),
        (Rate(12, "FLOP/s"), "0.00 MFLOP/s"),
        (Rate(780.4878, "tokens/s"), "780.49 tokens/s"),
        (Rate(3105, "tokens/s"), "3.10 k tokens/s"),
    ],
)
def test_rates_are_printed_in_the_largest_unit_that_they_fill(rate: Rate, text: str) -> None:
    assert str(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.5, "2.50 s"),
        (0.996, "996.00 ms"),
        (0.999996, "1.00 s"),
        (0.0412, "41.20 ms"),
        (8e-6, "8.00 us"),
        (0.0, "0.00 us"),
    ],
)
def test_times_are_printed_in_the_largest_unit_that_they_fill(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(("flops", "text"), [(0, "0.00 FLOP"), (999_999, "1.00 MFLOP"), (1_234_000, "1.23 MFLOP")])
def test_flops_are_printed_with_decimal_prefixes(flops: int, text: str) -> None:
    assert format_flops(flops) == text
