"""The file of --mbmem-json: written, read back, refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.gates import PeakGate
from pytest_mbmem.report.json import load, text
from pytest_mbmem.report.results import Measured, Results

Make = Callable[..., Measured]
MakeResults = Callable[..., Results]


@pytest.fixture
def written(measured: Make, failed: Make, results: MakeResults) -> Results:
    judged = measured(10, gate=PeakGate(), baseline=5, name="control")
    return results({"t.py::test_a[é\udcff]": [judged, failed("died", "gone")], "t.py::test_b": []})


def test_what_was_written_is_read_back(written: Results, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text(written), encoding="utf-8")
    assert load(path) == written


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["tests", 0, "measurements", 0, "judgements", 0, "measured"], "12"),
        (["tests", 0, "measurements", 0, "judgements", 0, "gate", "metric"], "active"),
        (["tests", 0, "measurements", 0, "judgements", 0, "accepted"], 1),
        (["tests", 0, "measurements", 0, "measurement", "ranks"], None),
        (["tests", 0, "measurements", 0, "name"], 3),
        (["tests", 0, "id"], None),
        (["tests", 0, "duration"], "long"),
        (["tests"], 5),
        (["tests", 0], {}),
        (["header"], ["device"]),
        (["schema"], 2),
    ],
)
def test_a_wrong_value_is_refused_with_the_files_name(
    written: Results, tmp_path: Path, keys: list[Any], value: object
) -> None:
    data = json.loads(text(written))
    place = data
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    path = tmp_path / "results.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(UserError, match=r"results\.json: "):
        load(path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b"[" * 100_000])
def test_what_is_no_json_of_ours_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "results.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"results\.json: "):
        load(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load(tmp_path / "none.json")
