"""What plots are drawn from: exact figures, without what nobody could see, in a form that no text breaks out of."""

from __future__ import annotations

import base64
import dataclasses
import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from made_pages import SEGMENTS, with_history

from pytest_mbmem.measurement import CATEGORIES, Measurement, RankMeasurement
from pytest_mbmem.report import plots
from pytest_mbmem.report.results import Measured
from pytest_mbmem.report.trend import Point, Series
from pytest_mbmem.split import SPLIT_CATEGORIES

MIB = 2**20
Make = Callable[..., Measured]


@pytest.fixture
def rank(measured: Make) -> RankMeasurement:
    (rank,) = with_history(measured(101 * MIB)).measurement.ranks
    return rank


def data_of(plot: plots.Plot | None) -> dict[str, Any]:
    assert plot is not None
    return plot.data


def test_every_category_has_a_color_of_its_own() -> None:
    assert set(SPLIT_CATEGORIES) < set(plots.COLORS)
    of_categories = [plots.COLORS[name] for name in SPLIT_CATEGORIES]
    assert len(set(of_categories)) == len(of_categories)


def test_a_timeline_leaves_out_categories_that_are_never_there(rank: RankMeasurement) -> None:
    assert data_of(plots.timeline(rank))["parts"] == {
        "parameters": [0, MIB, 30 * MIB, 30 * MIB, 30 * MIB],
        "activations": [0, 0, 35 * MIB, 70 * MIB, 0],
    }


def test_the_peak_stands_where_its_phase_is_highest_with_its_owners(rank: RankMeasurement) -> None:
    assert data_of(plots.timeline(rank))["peak"] == {
        "point": 3,
        "drawn": 100 * MIB,
        "size": 101 * MIB,
        "phase": "step-2/backward",
        "owners": [
            ["activations", "decoder.layers.*.mlp \u00d7 4", "mlp.py:7", 70 * MIB],
            ["parameters", "output_layer", "", 30 * MIB],
            ["rounding", "", "", MIB],
        ],
        "others": 0,
    }


def test_a_timeline_says_its_peak_in_words(rank: RankMeasurement) -> None:
    plot = plots.timeline(rank)
    assert plot is not None
    assert "101.00 MiB in step-2/backward: activations 70.00 MiB, parameters 30.00 MiB, rounding" in plot.words


def test_without_a_history_there_is_nothing_to_draw(measured: Make) -> None:
    (rank,) = measured(MIB).measurement.ranks
    assert plots.timeline(rank) is None
    assert plots.segments(rank) is None


def test_the_sums_of_segments_are_of_all_blocks() -> None:
    sums = plots.segment_sums(SEGMENTS)
    assert (sums.segments, sums.reserved, sums.free, sums.largest_free) == (2, 102 * MIB, 51 * MIB, 40 * MIB)
    assert sums.pools == (("up to 1 MiB", 1, 2 * MIB, MIB), ("larger ones", 1, 100 * MIB, 50 * MIB))
    assert sums.parts == {"parameters": 30 * MIB, "activations": 20 * MIB, "buffers": MIB}
    assert sum(sums.parts.values()) + sums.free == sums.reserved


def test_neighbours_of_a_category_are_one_block_and_the_largest_segment_is_first(rank: RankMeasurement) -> None:
    data = data_of(plots.segments(rank))
    named = [
        [(size, "free" if name < 0 else data["names"][name]) for size, name in zip(row[::2], row[1::2], strict=True)]
        for row in data["segments"]
    ]
    assert named == [
        [(30 * MIB, "parameters"), (10 * MIB, "free"), (20 * MIB, "activations"), (40 * MIB, "free")],
        [(MIB, "buffers"), (MIB, "free")],
    ]
    assert data["small"] == [0, 1]
    assert data["names"] == CATEGORIES


def test_of_many_segments_the_largest_are_drawn(measured: Make) -> None:
    (rank,) = with_history(measured(101 * MIB)).measurement.ranks
    rank = dataclasses.replace(rank, segments_at_peak=SEGMENTS * 100)
    data = data_of(plots.segments(rank))
    assert len(data["segments"]) == plots.MOST_SEGMENTS
    assert not any(data["small"])


def test_peaks_add_up_to_each_rows_peak(measured: Make) -> None:
    named = {"control": with_history(measured(101 * MIB)).measurement, "less": measured(50 * MIB).measurement}
    data = data_of(plots.peaks(named, "reserved", None))
    assert data["rows"] == ["control", "less"]
    assert [sum(sizes) for sizes in zip(*data["parts"].values(), strict=True)] == [103 * MIB, 52 * MIB]
    assert data["parts"]["reserved, not allocated"] == [2 * MIB, 0]
    assert data["parts"][plots.UNKNOWN] == [0, 52 * MIB]


def test_a_row_without_figures_is_left_out_and_one_alone_is_no_comparison(measured: Make, failed: Make) -> None:
    named: dict[str, Measurement] = {
        "control": failed("out of memory", "CUDA out of memory.").measurement,
        "less": measured(MIB).measurement,
    }
    assert plots.peaks(named, "allocated", None) is None


def test_a_trend_has_a_plot_for_each_unit_and_gaps_where_a_run_has_no_figure() -> None:
    first, second = ("one", "2026-01-01T00:00:00Z"), ("two", "2026-01-02T00:00:00Z")
    found = [
        Series("t", "gpu", "allocated", (Point(*first, 3 * MIB), Point(*second, 4 * MIB))),
        Series("t", "gpu", "reserved", (Point(*second, 5 * MIB),)),
        Series("t", "gpu", "throughput", (Point(*second, 1_500_000), Point(*first, 1_000_000))),
    ]
    sizes, times = plots.trend(found)
    assert sizes.data["runs"] == [list(first), list(second)]
    assert sizes.data["lines"] == [["allocated", [3 * MIB, 4 * MIB]], ["reserved", [None, 5 * MIB]]]
    assert "allocated from 3.00 MiB to 4.00 MiB" in sizes.words
    assert (times.data["unit"], times.data["lines"]) == ("ns", [["throughput", [1_000_000, 1_500_000]]])


def test_lines_of_several_measurements_and_devices_are_told_apart() -> None:
    point = (Point("one", "", 1),)
    found = [Series("t", "gpu", "allocated", point), Series("t@b", "other", "allocated", point)]
    assert [plots.line_name(series, found) for series in found] == ["t allocated on gpu", "t@b allocated on other"]


def test_packed_texts_hold_anything_and_are_the_same_each_time() -> None:
    text = "</script><!--\u2028\udcff"
    packed = plots.packed(text)
    assert packed == plots.packed(text)
    assert not set(packed) & set("<>&\"'-!")
    assert gzip.decompress(base64.b64decode(packed)).decode() == text.encode("utf-8", "backslashreplace").decode()


def test_the_plots_of_a_page_come_with_the_colors(rank: RankMeasurement) -> None:
    plot = plots.timeline(rank)
    assert plot is not None
    data = json.loads(gzip.decompress(base64.b64decode(plots.packed_plots([plot]))))
    assert data == {"colors": dict(plots.COLORS), "plots": [plot.data]}
