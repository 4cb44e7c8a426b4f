"""On the virtual GPU: a change that keeps tensors alive fails against its baseline, and the failure names them."""

from __future__ import annotations

import json
import re

import pytest

from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.split import compact, growth, split_of, total

LAYERS, SEQUENCE, HIDDEN = 6, 1024, 256
KEPT = LAYERS * SEQUENCE * HIDDEN * 4
"""Bytes of the output of each layer's MLP in fp32, together."""

RECIPE = f"""
import pytest
from pytest_mbmem import Model, Recipe, Training

RECIPE = Recipe(
    model=Model(num_layers={LAYERS}, hidden_size={HIDDEN}, num_attention_heads=4, vocab_size=1000),
    training=Training(seq_length={SEQUENCE}, steps=2),
)
"""

BEFORE = f"""{RECIPE}
LOG = []

def logged(forward):
    def run(*inputs, **options):
        output = forward(*inputs, **options)
        return output
    return run

@pytest.mark.peak_memory(tolerance=0, slack=0)
def test_training(megatron_model):
    model = megatron_model(RECIPE)
    for layer in model.chunks[0].module.module.decoder.layers:
        layer.mlp.forward = logged(layer.mlp.forward)
    for _ in range(2):
        LOG.clear()
        model.step()
"""

AFTER = BEFORE.replace(
    "        return output\n", "        LOG.append(output[0].detach().float())\n        return output\n"
)


def test_a_tensor_kept_in_every_layer_is_named_first_with_its_bytes(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(BEFORE)
    real_project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    real_project.runpytest().assert_outcomes(passed=1)
    stored = real_project.path.joinpath("baselines/virtual-h100-80gb/test_it.yaml")
    assert "split:" in stored.read_text()

    real_project.makepyfile(AFTER)
    result = real_project.runpytest("--mbmem-json=o.json", "--mbmem-html=o.html")
    result.assert_outcomes(failed=1)
    line = AFTER.strip().splitlines().index("        LOG.append(output[0].detach().float())") + 1
    result.stdout.fnmatch_lines(
        [
            "what grew (+6.00 MiB):",
            f"    +6.00 MiB  activations  decoder.layers.[*].mlp \u00d7 {LAYERS}  test_it.py:{line} (run)",
            "  by category: +6.00 MiB activations",
        ]
    )
    (test,) = json.loads(real_project.path.joinpath("o.json").read_text())["tests"]
    (change,) = test["measurements"][0]["judgements"][0]["growth"]["changes"]
    assert (change["was"], change["now"]["size"]) == (None, KEPT)
    assert "what grew (+6.00 MiB):" in real_project.path.joinpath("o.html").read_text()


def test_a_baseline_of_an_older_version_says_how_to_get_a_split_and_then_has_one(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(BEFORE)
    real_project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    stored = real_project.path.joinpath("baselines/virtual-h100-80gb/test_it.yaml")
    whole = stored.read_text()
    stored.write_text(re.sub(r" +split:\n.*?(?= +environment: e1)", "", whole, flags=re.DOTALL))
    assert "split:" not in stored.read_text()
    real_project.runpytest("--mbmem-update=changed").assert_outcomes(passed=1)
    assert "split:" not in stored.read_text()

    real_project.makepyfile(AFTER)
    result = real_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["the peak is made of (*):", "  the baseline does not say * --mbmem-update records that from now on"]
    )

    real_project.makepyfile(BEFORE)
    real_project.runpytest("--mbmem-update=all").assert_outcomes(passed=1)
    assert stored.read_text() == whole


def test_a_saving_that_is_too_small_says_what_the_candidate_holds_less(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        f"""{RECIPE}
        @pytest.mark.memory_saving(control={{"recompute_modules": []}}, at_least="90%")
        def test_saving(mbmem):
            mbmem.measure(RECIPE.but(recompute_granularity="selective", recompute_modules=["mlp"]))
        """.replace("\n        ", "\n")
    )
    result = real_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "SAVES TOO LITTLE: *",
            "against the control (-*):",
            f"    -* activations * decoder.layers.[*].mlp* \u00d7 {LAYERS}* (*",
            "  by category: -* activations*",
        ]
    )


@pytest.mark.parametrize("metric", ["allocated", "reserved"])
def test_splits_of_real_measurements_add_up_and_repeat(launcher: Launcher, small_recipe: Recipe, metric: str) -> None:
    run = launcher.measure(small_recipe.but(pp=2, num_layers=4))
    again = launcher.measure(small_recipe.but(pp=2, num_layers=4))
    for rank, other in zip(run.ranks, again.ranks, strict=True):
        for phase in (None, *dict.fromkeys(figures.name for figures in rank.phases)):
            split, repeated = split_of(rank, metric, phase), split_of(other, metric, phase)
            assert split is not None
            assert repeated is not None
            assert total(split) == total(compact(split)) == rank.peak(metric, phase)
            if metric == "allocated":  # reserved bytes depend on addresses
                assert growth(compact(split), repeated).changes == ()


def test_a_longer_sequence_grows_in_activations_and_not_in_parameters(launcher: Launcher, small_recipe: Recipe) -> None:
    short, long = (launcher.measure(small_recipe.but(seq_length=length)).worst() for length in (256, 1024))
    before, after = split_of(short), split_of(long)
    assert before is not None
    assert after is not None
    found = growth(compact(before), after)
    assert found.total == long.peak() - short.peak()
    net = found.categories()
    assert next(iter(net)) == "activations"
    assert net.keys().isdisjoint({"parameters", "main gradients", "optimizer state"})
