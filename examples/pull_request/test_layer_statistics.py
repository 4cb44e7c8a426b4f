"""What a regression looks like. `make demo` runs this and shows the failure.

The baseline was recorded before the pull request. The pull request adds a hook that keeps the norm of each layer's
output "for the logs", and with each norm, through its autograd graph, the whole output.
"""

from __future__ import annotations

import pytest

from pytest_mbmem import Recipe, Training, preset

RECIPE = Recipe(
    model=preset("llama3-8b").shrunk(layers=8, hidden=1024),
    training=Training(seq_length=4096, attention_backend="flash"),
)


def log_layer_norms(model, log):
    """The change under review; `output.detach()` would mend it."""
    for layer in model.chunks[0].module.module.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: log.append(output[0].float().norm()))


@pytest.mark.peak_memory
def test_training_with_layer_statistics(megatron_model):
    log = []
    model = megatron_model(RECIPE)
    log_layer_norms(model, log)
    for _ in range(3):
        model.step()
    assert len(log) == 3 * RECIPE.model.num_layers
