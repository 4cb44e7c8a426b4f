"""What Megatron Core says to settings when this package's own checks are set aside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pytest_mbmem.incompatibilities import catalog, installed
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Memory, Recipe

BASE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
OFFLOAD = {**BASE, "cpu_offloading": True, "cpu_offloading_num_layers": 1}


def ask(launcher: Launcher, function: str, **arguments: Any) -> Any:
    result = launcher.call(f"pytest_mbmem.measure.refusal_worker:{function}", arguments)
    assert result.failure is None, result.message
    return result.value


def test_configuration_classes_refuse_and_accept(launcher: Launcher) -> None:
    refused, accepted, of_optimizer = ask(
        launcher,
        "construct_all",
        examples=[
            {
                "config": "TransformerConfig",
                "arguments": {**OFFLOAD, "pipeline_model_parallel_size": 2, "pipeline_dtype": "torch.bfloat16"},
            },
            {"config": "TransformerConfig", "arguments": OFFLOAD},
            {"config": "OptimizerConfig", "arguments": {"optimizer": "sgd", "use_precision_aware_optimizer": True}},
        ],
    )
    assert refused["raised"]["type"] == "ValueError"
    assert refused["raised"]["message"].startswith("Currently there is no support for Pipeline parallelism")
    assert refused["raised"]["at"] == "configuration"
    assert refused["raised"]["where"].startswith("megatron.core.transformer.transformer_config, line")
    assert accepted == {"raised": None, "own": ""}
    assert of_optimizer["raised"]["type"] == "AssertionError"


def test_what_does_not_come_from_megatron_is_no_answer(launcher: Launcher) -> None:
    """Arguments that a class does not have are Megatron's to refuse, though Python does."""
    answer = ask(launcher, "construct", config="TransformerConfig", arguments={"no_such_setting": 1})
    assert answer["raised"]["message"].startswith("TransformerConfig.__init__() got an unexpected keyword argument")
    arguments = {"config": "TransformerConfig", "arguments": {**BASE, "attention_backend": "no such"}}
    broken = launcher.call("pytest_mbmem.measure.refusal_worker:construct", arguments)
    assert broken.failure == "error"
    assert "KeyError: 'no such'" in broken.message


def test_a_text_of_a_dtype_is_one(launcher: Launcher) -> None:
    """Megatron refuses an unknown type of numbers in a message of its own."""
    arguments = {"use_precision_aware_optimizer": True, "main_params_dtype": "torch.float16", "optimizer": "adam"}
    answer = ask(launcher, "construct", config="OptimizerConfig", arguments=arguments)
    assert "'torch.float16'" not in answer["raised"]["message"]


def test_a_recipe_that_works_raises_nothing(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = small_recipe.to_dict()
    assert ask(launcher, "configure", recipe=recipe) == {"raised": None, "own": ""}
    assert ask(launcher, "attempt", recipe=recipe, rank=0) == {"raised": None, "own": ""}


def test_what_this_package_refuses_before_is_left_to_megatron(launcher: Launcher, small_recipe: Recipe) -> None:
    """Each of these has a check of this package in front of it; Megatron gets as far as the stage that is named."""
    mlp = Memory(recompute_granularity="selective", recompute_modules=("mlp",))
    groups = Memory(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)
    recipes = {
        "endless": replace(small_recipe, memory=mlp, model=replace(small_recipe.model, add_bias_linear=True)),
        "beyond": replace(small_recipe, memory=groups, model=replace(small_recipe.model, num_layers=3)),
        "lost": replace(small_recipe, memory=Memory(optimizer_cpu_offload=True)),
    }
    raised = {
        name: ask(launcher, "attempt", recipe=recipe.to_dict(), rank=0)["raised"] for name, recipe in recipes.items()
    }
    assert (raised["endless"]["type"], raised["endless"]["at"]) == ("RecursionError", "run")
    if catalog()["recompute-uniform-not-dividing"].versions.hold(installed()):
        assert (raised["beyond"]["type"], raised["beyond"]["at"]) == ("IndexError", "run")
    else:
        assert raised["beyond"] is None
    # The key that Megatron does not find is a parameter, which a virtual GPU has no values of to print.
    assert (raised["lost"]["type"], raised["lost"]["message"], raised["lost"]["at"]) == ("KeyError", "", "run")
    assert raised["lost"]["where"].startswith("megatron.core.optimizer.cpu_offloading")


def test_what_this_package_cannot_build_is_no_answer_of_megatron(launcher: Launcher, small_recipe: Recipe) -> None:
    recipe = replace(small_recipe, megatron={"no_such_setting": 1})
    answer = ask(launcher, "configure", recipe=recipe.to_dict())
    assert answer["raised"] is None
    assert "megatron.no_such_setting" in answer["own"]
