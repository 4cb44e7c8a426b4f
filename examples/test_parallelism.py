"""A Llama-like model under every kind of parallelism: one baseline each, worst rank and all ranks."""

from __future__ import annotations

import pytest

from pytest_mbmem import Model, Parallelism, Recipe, Training, preset

LLAMA = Recipe(
    name="Llama 3 8B, shrunk to 8 layers of 1024",
    model=preset("llama3-8b").shrunk(layers=8, hidden=1024),
    training=Training(seq_length=2048, global_batch_size=16, attention_backend="flash"),
)


@pytest.mark.peak_memory
def test_tensor_and_sequence_parallel(mbmem):
    mbmem.measure(LLAMA.but(tp=4, sequence_parallel=True))


@pytest.mark.peak_memory
def test_pipeline_parallel(mbmem):
    measurement = mbmem.measure(LLAMA.but(pp=4))
    first, *_, last = measurement.ranks
    assert first.peak() > last.peak() - last.largest_allocation  # but for the logits, earlier stages hold more


@pytest.mark.peak_memory
def test_interleaved_pipeline(mbmem):
    mbmem.measure(LLAMA.but(pp=4, vpp=2))


@pytest.mark.peak_memory(tolerance="0.5%", slack="1 MiB")
def test_distributed_optimizer(mbmem):
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    mbmem.measure(LLAMA.but(dp=8, distributed_optimizer=True, **overlapped))


@pytest.mark.peak_memory
def test_context_parallel(mbmem):
    mbmem.measure(LLAMA.but(cp=2, seq_length=8192))


@pytest.mark.peak_memory(limit="5 GiB")
def test_stays_below_a_limit(mbmem):
    """A limit needs no baseline: it says what the team has decided to spend."""
    mbmem.measure(LLAMA.but(tp=2, sequence_parallel=True))


@pytest.mark.parametrize("seq_length", [1024, 2048, 4096])
@pytest.mark.parametrize("attention", ["unfused", "flash"])
@pytest.mark.peak_memory
def test_sequence_length(mbmem, attention, seq_length):
    mbmem.measure(LLAMA.but(seq_length=seq_length, attention_backend=attention))


@pytest.mark.peak_memory(metric="allocated", phase="optimizer")
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_optimizer_step(mbmem, kind):
    """A gate on one phase alone: what the optimizer step needs on top of the resting model."""
    mbmem.measure(LLAMA.but(kind=kind))


@pytest.mark.peak_memory
class TestOlderModels:
    """GPT-3 as it was: learned positions, biases, dropout, unfused attention."""

    GPT = Recipe(
        model=Model(
            num_layers=6,
            hidden_size=768,
            num_attention_heads=12,
            position_embedding_type="learned_absolute",
            add_bias_linear=True,
            share_embeddings_and_output_weights=True,
            attention_dropout=0.1,
            hidden_dropout=0.1,
        ),
        parallelism=Parallelism(pp=2),
        training=Training(seq_length=1024, micro_batch_size=4, global_batch_size=16),
    )

    def test_bf16(self, mbmem):
        mbmem.measure(self.GPT)

    def test_fp32(self, mbmem):
        mbmem.measure(self.GPT.but(precision="fp32"))


@pytest.mark.peak_memory
def test_uneven_pipeline(mbmem):
    """Fewer layers where the embedding and the logits are."""
    mbmem.measure(LLAMA.but(pp=4, num_layers_in_first_pipeline_stage=1, num_layers_in_last_pipeline_stage=1))


@pytest.mark.peak_memory
def test_pipeline_layout(mbmem):
    """Megatron's own text for which layer goes where: E embedding, t transformer layer, L loss."""
    mbmem.measure(LLAMA.but(pp=4, pipeline_model_parallel_layout="Et|ttt|ttt|tL"))
