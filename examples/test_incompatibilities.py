"""Settings that exclude each other: refused at once, and proved against the installed Megatron Core."""

import pytest

from pytest_mbmem import IncompatibleSettings, Memory, Parallelism, Recipe, Training, preset

MODEL = preset("llama3-8b").shrunk(layers=4, hidden=1024)
OFFLOAD = Recipe(
    model=MODEL,
    training=Training(seq_length=1024),
    memory=Memory(cpu_offloading=True, cpu_offloading_num_layers=2),
)


def test_all_that_is_wrong_is_said_before_anything_runs(mbmem):
    with pytest.raises(IncompatibleSettings) as error:
        mbmem.measure(OFFLOAD.but(pp=2, recompute_granularity="selective"))
    assert error.value.ids == ("cpu-offload-with-pp", "cpu-offload-with-recompute")


@pytest.mark.incompatible("cpu-offload-with-pp")
def test_megatron_still_refuses_it(mbmem):
    mbmem.measure(OFFLOAD.but(pp=2))


def test_one_by_one(mbmem):
    mbmem.refuses(OFFLOAD.but(cpu_offloading_num_layers=4), "cpu-offload-too-many-layers")
    odd = Recipe(model=MODEL.shrunk(layers=3), parallelism=Parallelism(pp=2), training=Training(seq_length=1024))
    mbmem.refuses(odd, "pp-layers-not-divisible")
