"""`megatron_model` gives a test a live model, and its mistakes are said plainly."""

from __future__ import annotations

import json

import pytest

from pytest_mbmem.installed import versions_of


def test_a_test_trains_a_live_model(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_x(megatron_model):
            import torch
            model = megatron_model("recipe.yaml")
            assert len(model.chunks) == 1
            model.step()
            assert torch.cuda.memory_allocated() > 0

        def test_unmarked_one_after_the_other(megatron_model):
            first = megatron_model("recipe.yaml")
            first.close()
            second = megatron_model("recipe.yaml", rank=0)
            second.step()
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*::test_x * <= 1.00 GiB * MiB * 0 * test * pass"])


def test_mistakes_are_said_in_one_message(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        def test_two(megatron_model):
            megatron_model("recipe.yaml")
            megatron_model("recipe.yaml")

        def test_rank(megatron_model):
            megatron_model("recipe.yaml", rank=1)

        def test_key(megatron_model):
            megatron_model({"modell": {}})

        def test_file(megatron_model):
            megatron_model("nowhere.yaml")

        def test_form(megatron_model):
            megatron_model(42)

        def test_too_late(megatron_model):
            import torch
            torch.empty(1, device="cuda")
            shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
            megatron_model({"model": shape, "memory": {"alloc_conf": "expandable_segments:True"}})
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(failed=6)
    result.stdout.fnmatch_lines(
        [
            "megatron_model: one model at a time; *",
            "*_ test_rank _*",
            "*rank*1*",
            "*test_key: recipe: *modell*",
            "*nowhere.yaml: *",
            "*megatron_model(42): allowed are *",
            "megatron_model: the recipe sets PYTORCH_CUDA_ALLOC_CONF*build the model first",
        ]
    )
    result.stdout.no_fnmatch_line("*fixtures.py:*")


def test_what_megatron_refuses_is_said_and_another_model_can_be_built(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest
        import pytest_mbmem

        SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
        REFUSED = {"model": SHAPE, "megatron": {"softmax_type": "none"}}  # no documented constraint
        BROKEN = {"model": SHAPE, "memory": {"recompute_granularity": "selective", "recompute_modules": ["nonsense"]}}

        def test_refused(megatron_model):
            megatron_model(REFUSED)

        def test_then_another(megatron_model):
            with pytest.raises(pytest.fail.Exception, match="Megatron Core refuses it"):
                megatron_model(REFUSED)
            with pytest.raises(pytest_mbmem.IncompatibleSettings, match="recompute-label-unknown"):
                megatron_model(BROKEN)
            megatron_model({"model": SHAPE}).step()

        def test_broken(megatron_model):
            megatron_model(BROKEN)
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(
        [
            "Megatron Core refuses it: Softmax type not supported*",
            "*incompatible settings: recompute-label-unknown",
        ]
    )
    result.stdout.no_fnmatch_line("*fixtures.py:*")


def test_assumptions_and_unchecked_settings_are_stated(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_x(megatron_model):
            experts = {"model": {**SHAPE, "moe": {"num_moe_experts": 4}}, "training": {"seq_length": 64}}
            memory = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
            megatron_model({**experts, "memory": memory}).step()
        """
    )
    result = real_project.runpytest("--mbmem-json=out.json")
    result.assert_outcomes(passed=1)
    (test,) = json.loads(real_project.path.joinpath("out.json").read_text())["tests"]
    measurement = test["measurements"][0]["measurement"]
    assert "routing: balanced, each expert receives the same number of tokens" in measurement["assumptions"]
    assert measurement["notes"] == [
        "only mbmem.measure checks whether memory.recompute_modules 'core_attn' has an effect"
    ]


@pytest.mark.skipif(
    bool(versions_of(["transformer-engine"])), reason="Transformer Engine is installed: there are no equivalents of it"
)
def test_a_closed_model_leaves_no_workspace_behind(megatron_model) -> None:
    import torch

    from pytest_mbmem.recipe import Recipe

    recipe = Recipe.from_dict(
        {
            "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000},
            "training": {"seq_length": 64, "transformer_impl": "transformer_engine"},
        }
    )
    held = []
    for impl in ("local", "transformer_engine", "local"):
        live = megatron_model(recipe.but(transformer_impl=impl))
        held.append(torch.cuda.memory_allocated())
        live.close()
    assert held == [held[0], held[0] + 32 * 2**20 + 2**10, held[0]]
