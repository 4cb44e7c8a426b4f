"""Out of memory on 8 H100, twice: one job only needs expandable segments, the other more than the GPU has.

NVIDIA's memory guidance starts there: most jobs that run out of memory are fragmented, so the allocator's settings come
before those of the model. Here is how a test tells the two apart. The first recipe was searched for among some that
nearly fill the GPU, at full size and with common settings; where a job leaves a few GiB, nothing of this shows.
"""

from __future__ import annotations

import pytest

from pytest_mbmem import OutOfMemory, Parallelism, Recipe, Training, preset

LLAMA_8B = Recipe(
    name="llama3-8b on 8 GPUs",
    model=preset("llama3-8b"),
    parallelism=Parallelism(dp=8, distributed_optimizer=True),
    training=Training(seq_length=4096, global_batch_size=32, attention_backend="flash", steps=2),
)
EXPANDABLE = {"alloc_conf": "expandable_segments:True"}


def test_runs_out_of_memory_by_fragmentation(mbmem):
    """The second step asks for 1.96 GiB. 2.5 GiB of what PyTorch reserved are free, in pieces of up to 1 GiB."""
    with pytest.raises(OutOfMemory) as caught:
        mbmem.measure(LLAMA_8B)
    why = mbmem.explain(caught.value)
    print(why.explain())
    assert why.verdict == "fragmentation"
    assert why.unusable > why.requested > why.largest_piece


@pytest.mark.peak_memory(limit="78 GiB", metric="reserved")
def test_expandable_segments_are_enough(mbmem):
    mbmem.measure(LLAMA_8B.but(**EXPANDABLE))


def test_runs_out_of_memory_by_capacity(mbmem):
    """Twice the sequence. Each remedy of NVIDIA's guidance was measured: the table has what it saves, and its cost."""
    with pytest.raises(OutOfMemory) as caught:
        mbmem.measure(LLAMA_8B.but(**EXPANDABLE, seq_length=8192))
    why = mbmem.explain(caught.value)
    print(why.explain())
    assert why.verdict == "capacity"
    assert not why.diagnosis.remedy("recompute core_attn").fits
    assert why.diagnosis.remedy("full recompute").fits
