"""How fast a recipe trains, beside what it holds.

With --mbmem-gpu these are times of a real GPU. A virtual one has none: there the same markers compare what a step
computes, sends and moves with the baseline, which is what a pull request changes when it makes steps slower for good.
"""

from __future__ import annotations

import pytest

from pytest_mbmem.recipe import Model, Parallelism, Recipe, Training

RECIPE = Recipe(
    model=Model(num_layers=4, hidden_size=512, num_attention_heads=8, vocab_size=32000),
    parallelism=Parallelism(tp=2, sequence_parallel=True, dp=2, distributed_optimizer=True),
    training=Training(micro_batch_size=2, global_batch_size=8, seq_length=1024),
)


@pytest.mark.throughput
def test_a_step_takes_no_longer(mbmem):
    mbmem.measure(RECIPE)


@pytest.mark.throughput(minimum="20 k tokens/s")
def test_a_gpu_trains_twenty_thousand_tokens_a_second(mbmem):
    mbmem.measure(RECIPE)
