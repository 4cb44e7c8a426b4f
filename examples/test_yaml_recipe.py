"""A recipe from a YAML file beside the test."""

from __future__ import annotations

import pytest


@pytest.mark.peak_memory
def test_qwen3_slice(mbmem):
    measurement = mbmem.measure("recipes/qwen3-8b-slice.yaml")
    assert measurement.world_size == 64
