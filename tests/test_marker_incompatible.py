"""mbmem.refuses and the incompatible marker: proofs with the real Megatron Core that a recipe is refused as documented.

The recipes break entries of the real catalogue; one that is wrong on purpose is added to it where that is needed.
"""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from pytest_mbmem import incompatibilities, refusals
from pytest_mbmem.incompatibilities import Catalog
from pytest_mbmem.incompatibilities.catalog import BUILT_IN
from pytest_mbmem.report.json import load

RECIPES = """
    import pytest
    import pytest_mbmem

    MODEL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 1000}
    TRAINING = {"seq_length": 64}
    OFFLOAD = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
    PP = {"model": MODEL, "training": TRAINING, "memory": OFFLOAD, "parallelism": {"pp": 2}}
    TWO = {**PP, "memory": {**OFFLOAD, "recompute_granularity": "selective"}}
    FINE = {"model": MODEL, "training": TRAINING}
    EXPERTS = {**FINE, "model": {**MODEL, "moe": {"num_moe_experts": 3}}, "parallelism": {"dp": 4, "ep": 4}}
    """


def test_with_mbmem(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        RECIPES
        + """
    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_raised(mbmem):
        mbmem.measure(PP)
        raise SystemError("not reached")

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_caught(mbmem):
        with pytest.raises(pytest_mbmem.IncompatibleSettings, match="cpu-offload-with-pp") as caught:
            mbmem.measure(PP)
        assert caught.value.ids == ("cpu-offload-with-pp",)

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_refuses_by_marker(mbmem):
        assert mbmem.refuses(PP).verdict == "refused as documented"

    def test_refuses(mbmem):
        proof = mbmem.refuses(PP, "cpu-offload-with-pp")
        assert proof.raised.message.startswith("Currently there is no support for Pipeline parallelism")

    def test_caught_without_marker(mbmem):
        with pytest.raises(pytest_mbmem.IncompatibleSettings):
            mbmem.measure(PP)

    def test_uncaught_without_marker(mbmem):
        mbmem.measure(PP)

    @pytest.mark.incompatible("cpu-offload-with-recompute")
    def test_another_is_refused_first(mbmem):
        with pytest.raises(pytest_mbmem.IncompatibleSettings):
            mbmem.measure(TWO)

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_nothing_tried(mbmem):
        pass

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_not_broken(mbmem):
        mbmem.measure(FINE)

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_another_error(mbmem):
        with pytest.raises(pytest_mbmem.IncompatibleSettings):
            mbmem.measure(PP)
        raise LookupError("the test's own")

    @pytest.mark.incompatible("cpu-offload-layers-without-offload")
    def test_silent(mbmem):
        mbmem.measure({**FINE, "memory": {"cpu_offloading_num_layers": 1}})

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_swallowed(mbmem):
        try:
            mbmem.measure(FINE)
        except BaseException:
            pass

    @pytest.mark.peak_memory("1 GiB")
    def test_gate_of_a_refused_recipe(mbmem):
        with pytest.raises(pytest_mbmem.IncompatibleSettings):
            mbmem.measure(PP)

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_ranks_outside_the_job(mbmem):
        mbmem.measure(PP, ranks=[99])

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_other_calls_prove_nothing(mbmem):
        changes = {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
        pipeline = {**FINE, "parallelism": {"pp": 2}}
        for call in (
            lambda: mbmem.compare(pipeline, changes),
            lambda: mbmem.sweep(pipeline, {"offload": changes}),
            lambda: mbmem.growth(PP),
            lambda: mbmem.parity(pipeline, changes),
        ):
            with pytest.raises(pytest_mbmem.IncompatibleSettings, match="marker proves what mbmem.measure"):
                call()
        mbmem.measure(PP)

    def test_experts_that_have_no_ranks(mbmem):
        mbmem.refuses(EXPERTS, "moe-experts-not-divisible-by-ep")

    def test_refuses_without_id(mbmem):
        mbmem.refuses(PP)

    def test_refuses_unknown(mbmem):
        mbmem.refuses(PP, "cpu-offload-with-p")
    """
    )
    result = real_project.runpytest("-rA", "--junitxml=junit.xml", "--mbmem-json=mbmem.json")
    passed = (
        *("raised", "caught", "refuses_by_marker", "refuses", "caught_without_marker"),
        *("other_calls_prove_nothing", "experts_that_have_no_ranks"),
    )
    result.stdout.fnmatch_lines_random([f"PASSED test_it.py::test_{name}" for name in passed])
    result.assert_outcomes(passed=len(passed), failed=11)
    result.stdout.fnmatch_lines(
        [
            "*_ test_uncaught_without_marker _*",
            "*incompatible settings: cpu-offload-with-pp",
            "*_ test_another_is_refused_first _*",
            "cpu-offload-with-recompute: documentation and code disagree: cpu-offload-with-pp is refused first",
            "  documented: ValueError at configuration: CPU offloading does not work when activation recomputation *",
            "  happened:   ValueError at configuration: Currently there is no support for Pipeline parallelism *",
            "*_ test_nothing_tried _*",
            "nothing was tried: test_it.py::test_nothing_tried has the incompatible marker, but never called *",
            "*_ test_not_broken _*",
            "test_it.py::test_not_broken: the settings do not break cpu-offload-with-pp, which forbids *",
            "*_ test_another_error _*",
            "*LookupError: the test's own",
            "*_ test_silent _*",
            "*: accepted silently, as documented, so there is no error to prove",
            "*_ test_swallowed _*",
            "nothing was tried: *::test_swallowed has the incompatible marker, and mbmem.measure() or mbmem.refuses() "
            "failed: test_it.py::test_swallowed: the settings do not break cpu-offload-with-pp, *",
            "*_ test_gate_of_a_refused_recipe _*",
            "nothing was measured: *::test_gate_of_a_refused_recipe has the peak_memory marker, and every recipe was "
            "refused: cpu-offload-with-pp",
            "*_ test_ranks_outside_the_job _*",
            "*ranks: 99 is not in the job, whose ranks are 0 to 1",
            "*_ test_refuses_without_id _*",
            "*mbmem.refuses(recipe): which constraint the recipe breaks must be said*",
            "*_ test_refuses_unknown _*",
            "*'cpu-offload-with-p' is not a documented constraint; nearest: cpu-offload-with-pp*",
        ]
    )
    result.stdout.no_fnmatch_line("*session.py*")  # no traceback
    headline = "cpu-offload-with-recompute: documentation and code disagree: cpu-offload-with-pp is refused first"
    cases = {case.get("name"): case for case in ElementTree.parse(real_project.path / "junit.xml").iter("testcase")}
    properties = [(p.get("name"), p.get("value")) for p in cases["test_another_is_refused_first"].iter("property")]
    assert properties == [
        ("mbmem_test", "test_it.py::test_another_is_refused_first"),
        ("mbmem_proof_verdict[cpu-offload-with-recompute]", "documentation and code disagree"),
        ("mbmem_proof_headline[cpu-offload-with-recompute]", headline),
    ]
    proofs = {test.id: test.proofs for test in load(real_project.path / "mbmem.json").tests.values()}
    assert [proof["headline"] for proof in proofs["test_it.py::test_another_is_refused_first"]] == [headline]
    assert [proof["verdict"] for proof in proofs["test_it.py::test_refuses"]] == ["refused as documented"]


def test_a_whole_test_in_a_worker(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        RECIPES
        + """
    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_model(megatron_model):
        megatron_model(PP)

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_own_code():
        from megatron.core.transformer import TransformerConfig

        TransformerConfig(
            num_layers=4, hidden_size=64, num_attention_heads=4, cpu_offloading=True, cpu_offloading_num_layers=1,
            pipeline_model_parallel_size=2, pipeline_dtype=__import__("torch").bfloat16,
        )

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_nothing_raised():
        pass

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_another_error():
        raise ValueError("Currently there is no support for Pipeline parallelism with CPU offloading")

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_not_broken(megatron_model):
        megatron_model(FINE)

    def test_without_marker(megatron_model):
        with pytest.raises(pytest_mbmem.IncompatibleSettings, match="cpu-offload-with-pp"):
            megatron_model(PP)
    """
    )
    result = real_project.runpytest("-rA")
    result.assert_outcomes(passed=3, failed=3)
    result.stdout.fnmatch_lines_random(
        [f"PASSED test_it.py::test_{n}" for n in ("model", "own_code", "without_marker")]
    )
    result.stdout.fnmatch_lines(
        [
            "*_ test_nothing_raised _*",
            "cpu-offload-with-pp: documentation and code disagree: the error has vanished",
            "  documented: ValueError at configuration: Currently there is no support for Pipeline parallelism *",
            "  happened:   accepted: the test's body came to its end",
            "*_ test_another_error _*",
            "cpu-offload-with-pp: documentation and code disagree: ValueError did not come from Megatron Core",
            "  happened:   ValueError: Currently there is no support for Pipeline parallelism with CPU offloading",
            "*_ test_not_broken _*",
            "test_it.py::test_not_broken: the settings do not break cpu-offload-with-pp*",
        ]
    )


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ('@pytest.mark.incompatible("cpu-offload-with-p")', "incompatible: 'cpu-offload-with-p' is not a documented *"),
        ("@pytest.mark.incompatible", "incompatible(): takes the id of one documented constraint*"),
        ("@pytest.mark.incompatible('a', 'b')", "incompatible('a', 'b'): takes the id of one documented constraint*"),
        ("@pytest.mark.incompatible(3)", "incompatible: 3 is not a documented constraint*"),
        (
            '@pytest.mark.peak_memory("1 GiB")\n@pytest.mark.incompatible("cpu-offload-with-pp")',
            "incompatible says that nothing runs, so that peak_memory has nothing to judge*",
        ),
        (
            '@pytest.mark.incompatible("cpu-offload-with-pp")\n@pytest.mark.incompatible("cpu-offload-with-recompute")',
            "incompatible: cpu-offload-with-recompute, cpu-offload-with-pp: Megatron Core can refuse for one of them *",
        ),
    ],
)
def test_a_wrong_marker_is_an_error_of_its_module(project: pytest.Pytester, marks: str, message: str) -> None:
    project.makepyfile(f"import pytest\n{marks}\ndef test_x(mbmem): pass\n")
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines([f"test_it.py::test_x: {message}"])


def test_a_marker_of_a_test_stands_before_that_of_its_class(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
    import pytest

    @pytest.mark.incompatible("cpu-offload-with-pp")
    class TestIt:
        @pytest.mark.incompatible("cpu-offload-with-recompute")
        def test_nothing_tried(self, mbmem):
            pass
    """
    )
    project.runpytest("--collect-only").stdout.fnmatch_lines(["*1 test collected*"])


def test_a_unittest_keeps_what_is_raised_to_itself(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
    import unittest

    import pytest

    @pytest.mark.incompatible("cpu-offload-with-pp")
    class TestIt(unittest.TestCase):
        def test_x(self):
            pass
    """
    )
    result = project.runpytest()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["test_it.py::TestIt::test_x: incompatible: unittest keeps to itself what a TestCase *"]
    )


def test_on_the_host_only_configurations_are_proved(
    host_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So it is with a CPU build of torch, where the virtual GPU is not there: no option is needed."""
    monkeypatch.setattr(refusals, "has_cuda_build", lambda: False)
    monkeypatch.setattr(incompatibilities, "catalog", lambda: _with_one_of_a_run(tmp_path / "catalog.yaml"))
    host_project.makepyfile(
        RECIPES
        + """
    def test_configuration(mbmem):
        mbmem.refuses(PP, "cpu-offload-with-pp")

    @pytest.mark.incompatible("of-a-run")
    def test_run(mbmem):
        mbmem.measure(PP)

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_whole():
        raise SystemError("not reached")
    """
    )
    whole = {
        (): "cpu-offload-with-pp: cannot be decided: torch is a CPU build",
        ("--mbmem-host",): "--mbmem-host: runs recipes *",
    }
    for options, reason in whole.items():
        result = host_project.runpytest("-rs", *options)
        result.assert_outcomes(passed=1, skipped=2)
        result.stdout.fnmatch_lines(
            ["SKIPPED*of-a-run: cannot be decided: torch is a CPU build", f"SKIPPED*: {reason}"]
        )


def test_on_a_gpu(gpu_project: pytest.Pytester) -> None:
    gpu_project.makepyfile(
        RECIPES
        + """
    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_configuration(mbmem):
        mbmem.measure(PP)

    @pytest.mark.incompatible("cpu-offload-with-pp")
    def test_model(megatron_model):
        megatron_model(PP)
    """
    )
    gpu_project.runpytest("--mbmem-gpu").assert_outcomes(passed=2)


def _with_one_of_a_run(path: Path) -> Catalog:
    """The real catalogue and an entry that is documented to raise in the middle of a step."""
    path.write_text(
        BUILT_IN.read_text()
        + """
- id: of-a-run
  forbids: pipeline_model_parallel_size > 1
  megatron:
  - {raises: ValueError, message: "m", at: run}
  why: text
  instead: text
  source: text
  example: {config: TransformerConfig, arguments: {pipeline_model_parallel_size: 2}}
"""
    )
    return Catalog(path)
