"""--mbmem-host: the same tests with real numbers on the CPU."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from pytest_mbmem.measure import host


def test_a_gated_test_shows_its_losses(host_project: pytest.Pytester) -> None:
    host_project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="1 KiB")
        def test_gated(mbmem):
            mbmem.measure("recipe.yaml")

        def test_plain(mbmem):
            measurement = mbmem.measure("recipe.yaml", name="mine")
            assert measurement.device.key == mbmem.device.key == "host"
            assert all(0 < step.loss < 10 for step in measurement.steps)
        """
    )
    result = host_project.runpytest(
        "--mbmem-host", "--mbmem-json=out.json", "--mbmem-html=out.html", "--junitxml=out.xml"
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "mbmem device: host, *; host: memory is not gated",
            "*= memory =*",
            "test_it.py::test_gated *  loss 5.* -> 5.* not gated",
            "test_it.py::test_plain@mine *  loss 5.* -> 5.* not gated",
            "note: test_it.py::test_gated and 1 more: host: memory is not gated",
            "note: test_it.py::test_gated and 1 more: shrunk for the host: model.vocab_size 1000 -> 250, *",
        ]
    )
    assert not host_project.path.joinpath("baselines").exists()
    (gated, _) = json.loads(host_project.path.joinpath("out.json").read_text())["tests"]
    assert [len(m["measurement"]["steps"]) for m in gated["measurements"]] == [3]
    assert gated["measurements"][0]["judgements"] == []
    assert "loss 5." in host_project.path.joinpath("out.html").read_text()
    names = {p.get("name") for p in ET.parse(host_project.path / "out.xml").iter("property")}
    assert "mbmem_losses" in names
    assert not any("bytes" in name for name in names if name)


def test_a_step_that_is_skipped_fails_the_test(host_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_TRAIN", "host_faults:skips_steps")
    host_project.makepyfile("def test_x(mbmem):\n    mbmem.measure('recipe.yaml')")
    result = host_project.runpytest("--mbmem-host")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            ">*mbmem.measure('recipe.yaml')",
            "E *MeasurementFailed: skipped step on rank 0 in step-1 (*CPU*): the optimizer skipped step 1",
            "test_it.py::test_x *skipped step *",
        ]
    )


def test_a_gated_test_fails_with_its_run(host_project: pytest.Pytester) -> None:
    host_project.makepyfile(
        """
        import pytest

        def measure(mbmem):
            model = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
            return mbmem.measure({"model": model, "optimizer": {"lr": 1e18}}, may_fail=True)

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_gated(mbmem):
            measure(mbmem)

        @pytest.mark.no_memory_growth
        def test_growing(mbmem):
            measure(mbmem)

        def test_plain(mbmem):
            assert measure(mbmem).failure.kind == "not finite"
        """
    )
    result = host_project.runpytest("--mbmem-host")
    result.assert_outcomes(failed=2, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*_ test_gated _*",
            "not finite on rank 0 in step-2 (*CPU*): the loss is not finite in step 2",
            "*_ test_growing _*",
            "not finite on rank 0 in step-2 (*CPU*): the loss is not finite in step 2",
        ]
    )


def test_what_needs_a_gpu_is_skipped_with_its_reason(host_project: pytest.Pytester) -> None:
    host_project.makepyfile(
        """
        import pytest

        RECOMPUTE = {"recompute_granularity": "selective"}

        def test_peak(mbmem):
            assert mbmem.measure("recipe.yaml").peak() < 2**30

        def test_compare(mbmem):
            mbmem.compare("recipe.yaml", RECOMPUTE)

        def test_sweep(mbmem):
            mbmem.sweep("recipe.yaml", [RECOMPUTE])

        def test_growth(mbmem):
            mbmem.growth("recipe.yaml")

        def test_model(megatron_model):
            megatron_model("recipe.yaml").step()

        @pytest.mark.peak_memory
        def test_torch():
            import torch
            torch.empty(1, device="cuda")
        """
    )
    result = host_project.runpytest("--mbmem-host", "-rs")
    result.assert_outcomes(skipped=6)
    result.stdout.fnmatch_lines_random(
        [
            "SKIPPED * host: memory is not measured, and the test asks for a peak of allocated bytes",
            "SKIPPED [[]3] * --mbmem-host: memory is not measured, and the test asks for it",
            "SKIPPED [[]2] * --mbmem-host: runs recipes that are given to mbmem.measure; this test itself needs a GPU",
            "test_it.py::test_peak *  loss 5.* not gated",
        ]
    )


def test_other_markers_are_not_judged_either(host_project: pytest.Pytester) -> None:
    host_project.makepyfile(
        """
        import pytest

        @pytest.mark.memory_saving({"recompute_granularity": None, "recompute_modules": None}, at_least="99%")
        @pytest.mark.no_memory_growth
        def test_x(mbmem):
            mbmem.measure({
                "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
                "memory": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
            })

        @pytest.mark.no_memory_growth
        def test_nothing(mbmem): pass
        """
    )
    result = host_project.runpytest("--mbmem-host")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        ["nothing was measured: *::test_nothing has the no_memory_growth marker*", "* not gated"]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mbmem-update"], "--mbmem-update: with --mbmem-host no memory is measured that could be a baseline"),
        (["--mbmem-gpu"], "--mbmem-gpu: tests run on the GPU, or with --mbmem-host on the CPU; leave one of them out"),
    ],
)
def test_what_contradicts_it_is_refused(project: pytest.Pytester, arguments: list[str], message: str) -> None:
    result = project.runpytest("--mbmem-host", *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
