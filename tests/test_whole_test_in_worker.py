"""A marked test without `mbmem` runs whole in a worker, and pytest's own features are as they are elsewhere."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from pytest_mbmem.errors import UserError
from pytest_mbmem.item import Worker
from pytest_mbmem.measure.torchrun import Torchrun
from pytest_mbmem.measurement import Device, Measurement


def test_what_a_test_does_with_torch_is_measured(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="40 MiB")
        def test_fits():
            import torch
            torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")

        @pytest.mark.peak_memory(limit="10 MiB")
        def test_does_not():
            import torch
            torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")

        @pytest.mark.peak_memory
        def test_without_a_baseline():
            import torch
            torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_runs_out():
            import torch
            torch.empty(100 * 2**30, dtype=torch.uint8, device="cuda")

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_allocates_nothing():
            pass

        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(passed=1, failed=4)
    result.stdout.fnmatch_lines(
        [
            "*_ test_does_not _*",
            "REGRESSION: peak allocated is 10.00 MiB over the limit",
            "  worst rank  0",
            "  phase       test",
            "MISSING: peak allocated has no baseline on virtual-h100-80gb",
            "E *OutOfMemoryError: CUDA out of memory. Tried to allocate 100.00 GiB.*",
            "INVALID: peak allocated could not be measured",
            "*::test_fits * <= 40.00 MiB * 20.00 MiB * 0 * test * pass",
            "*::test_does_not * <= 10.00 MiB * 20.00 MiB * 0 * test * regression",
        ]
    )
    real_project.runpytest("--mbmem-update=new", "-k", "without").assert_outcomes(passed=1, deselected=4)
    stored = yaml.safe_load(real_project.path.joinpath("baselines/virtual-h100-80gb/test_it.yaml").read_text())
    assert stored["tests"]["test_without_a_baseline"]["recipe_digest"] is None
    real_project.runpytest("-k", "without").assert_outcomes(passed=1, deselected=4)


def test_only_marked_tests_leave_the_process(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        f"""
        import os
        import pytest

        def is_worker():
            return os.getpid() != {os.getpid()}

        def test_unmarked_may_use_torch():
            import torch
            torch.empty(1)
            assert not is_worker()

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_marked():
            import torch
            tensor = torch.empty(1, device="cuda")
            assert is_worker()

        def test_with_a_model(megatron_model):
            assert is_worker()
        """
    )
    real_project.runpytest_inprocess().assert_outcomes(passed=3)


def test_a_module_that_fails_in_the_worker_only_is_shown(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        f"""
        import os
        import pytest

        if os.getpid() != {os.getpid()}:
            raise RuntimeError("not from here")

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_x(): pass
        """
    )
    result = real_project.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["test_it.py::test_x, in its worker: pytest could not run this test there", "E *RuntimeError: not from here"]
    )
    result.stdout.no_fnmatch_line("*site-packages*")


def test_a_test_that_has_another_id_in_the_worker_is_named(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import os
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        @pytest.mark.parametrize("process", [os.getpid()])
        def test_x(process): pass
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*could not run this test there", "not found: *test_it.py::test_x*"])
    result.stdout.no_fnmatch_line("*site-packages*")


def test_what_earlier_tests_set_up_is_torn_down_when_it_should_be(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.fixture(scope="module")
        def of_module():
            yield
            raise RuntimeError("no teardown")

        def test_here(of_module): pass

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_last():
            import torch
            tensor = torch.empty(1, device="cuda")
        """
    )
    result = real_project.runpytest("--junitxml=j.xml")
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_last*", "E *RuntimeError: no teardown"])
    suite = ElementTree.parse(real_project.path / "j.xml").find("testsuite")
    assert suite is not None
    assert (len(suite.findall("testcase")), suite.get("errors")) == (2, "1")


def test_outcomes_and_output_come_back(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import logging
        import sys
        import pytest

        pytestmark = pytest.mark.peak_memory(limit="1 GiB")

        @pytest.fixture(autouse=True)
        def cuda():
            import torch
            tensor = torch.empty(1, device="cuda")
            yield

        def test_assert():
            print("on stdout")
            print("on stderr", file=sys.stderr)
            logging.getLogger("mine").warning("in the log")
            values = {"a": 1}
            assert values == {"a": 2}

        @pytest.mark.skip(reason="by mark")
        def test_skip_mark(): pass

        def test_skip(): pytest.skip("by call")

        @pytest.mark.xfail(reason="known")
        def test_xfail(): assert False

        @pytest.mark.xfail(strict=True, reason="known")
        def test_xpass_strict(): pass

        @pytest.mark.xfail(reason="known")
        @pytest.mark.peak_memory(limit="1 B")
        def test_xfail_gate(): pass

        @pytest.fixture
        def broken(): raise RuntimeError("no setup")

        def test_setup(broken): pass

        @pytest.fixture
        def broken_later():
            yield
            raise RuntimeError("no teardown")

        def test_teardown(broken_later): pass

        def test_warns():
            import warnings
            warnings.warn("as an error")
        """
    )
    result = real_project.runpytest("-rsx")
    result.assert_outcomes(failed=3, skipped=2, xfailed=2, errors=2, passed=1)
    result.stdout.fnmatch_lines_random(
        [
            '>       assert values == {"a": 2}',
            "E       AssertionError: assert {'a': 1} == {'a': 2}",
            "*Captured stdout call*",
            "on stdout",
            "*Captured stderr call*",
            "on stderr",
            "*Captured log call*",
            "WARNING *mine:test_it.py:* in the log",
            "SKIPPED * by mark",
            "SKIPPED * by call",
            "*XPASS(strict)* known",
            "XFAIL *test_xfail - known",
            "E *RuntimeError: no setup",
            "E *RuntimeError: no teardown",
            "E *UserWarning: as an error",
        ]
    )
    real_project.runpytest("-x").assert_outcomes(failed=1)


def test_ids_classes_and_fixtures(real_project: pytest.Pytester) -> None:
    with real_project.path.joinpath("conftest.py").open("w") as conftest:
        conftest.write(
            """
import os
import pytest

@pytest.fixture(scope="session")
def of_session():
    return {"process": os.getpid()}
"""
        )
    real_project.makepyfile(
        """
        import os
        import unittest
        import pytest

        marked = pytest.mark.peak_memory(limit="1 GiB")
        torn_down = []

        @pytest.fixture(autouse=True)
        def cuda(request):
            if request.node.get_closest_marker("peak_memory"):
                import torch
                tensor = torch.empty(1, device="cuda")
            yield

        @pytest.fixture(scope="module")
        def of_module():
            state = {"process": os.getpid(), "tests": 0}
            yield state
            torn_down.append("module")

        def test_here(of_session, of_module):
            of_module["tests"] += 1

        @marked
        @pytest.mark.parametrize("text", ["a::b", "[x]", "a b", "a@b", "\u00e9", "x/y", "'\\n", '"', ""])
        def test_odd(text, of_session, of_module):
            assert of_session["process"] == of_module["process"] == os.getpid()
            assert of_module["tests"] == 0

        def test_here_again(of_module):
            assert of_module["tests"] == 1

        @marked
        class TestClass:
            @pytest.mark.parametrize("n", [1, 2])
            def test_own(self, n, tmp_path, monkeypatch, capsys):
                tmp_path.joinpath("file").write_text("text")
                monkeypatch.setenv("MINE", "1")
                print("seen")
                assert capsys.readouterr().out == "seen\\n"

            class TestInner:
                def test_inner(self): pass

        @marked
        class TestUnit(unittest.TestCase):
            def test_unit(self): self.assertEqual(1, 1)

        def test_torn_down_once(): assert torn_down == []
        """
    )
    result = real_project.runpytest("--mbmem-json=o.json", "-v")
    result.assert_outcomes(passed=16)
    result.stdout.no_fnmatch_line("*invalid*")


def test_a_test_that_ends_its_worker_fails_alone(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import os
        import time
        import pytest

        pytestmark = pytest.mark.peak_memory(limit="1 GiB")

        def test_exit():
            os._exit(3)

        def test_abort():
            os.abort()

        def test_hangs():
            time.sleep(60)

        def test_next():
            import torch
            torch.empty(1, device="cuda")
        """
    )
    result = real_project.runpytest("--mbmem-timeout=2", "--junitxml=j.xml", "--mbmem-json=o.json")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines_random(
        [
            "test_it.py::test_exit, in its worker: the worker ended with exit code 3 before it had a result",
            "test_it.py::test_abort, in its worker: the worker was killed by SIGABRT",
            "test_it.py::test_hangs, in its worker: no result within 2 s",
        ]
    )
    cases = ElementTree.parse(real_project.path / "j.xml").findall(".//testcase")
    assert [len(case.findall("failure")) for case in cases] == [1, 1, 1, 0]


def test_with_xdist_keys_and_properties_are_the_same(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.xdist_group("g")
        @pytest.mark.peak_memory
        @pytest.mark.parametrize("text", ["a@b", "c"])
        def test_x(text, record_testsuite_property):
            import torch
            torch.empty(20 * 2**20, dtype=torch.uint8, device="cuda")
        """
    )
    strict = ["-W", "error", "-o", "junit_family=xunit2", "--junitxml=j.xml"]
    arguments = ["-n", "2", "--dist", "loadgroup", "--mbmem-update=new", *strict]
    result = real_project.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=2, warnings=0)
    stored = yaml.safe_load(real_project.path.joinpath("baselines/virtual-h100-80gb/test_it.yaml").read_text())
    assert set(stored["tests"]) == {"test_x[a@b]", "test_x[c]"}
    real_project.runpytest(*strict).assert_outcomes(passed=2, warnings=0)
    for case in ElementTree.parse(real_project.path / "j.xml").iterfind(".//testcase"):
        found = {p.get("name"): p.get("value") for p in case.iterfind("properties/property")}
        assert found == {
            "mbmem_test": f"test_it.py::{case.get('name')}",
            "mbmem_device": "virtual-h100-80gb",
            "mbmem_peak_allocated_bytes": str(20 * 2**20),
            "mbmem_peak_allocated_bytes_by_rank": f"0:{20 * 2**20}",
            "mbmem_peak_reserved_bytes": str(20 * 2**20),
            "mbmem_host_peak_bytes": "0",
            "mbmem_worst_rank": "0",
            "mbmem_phase": "test",
            "mbmem_verdict": "pass",
            "mbmem_measured_bytes": str(20 * 2**20),
            "mbmem_baseline_bytes": str(20 * 2**20),
        }


def test_mbmem_must_be_named_among_the_arguments(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_x(request):
            request.getfixturevalue("mbmem")
        """
    )
    result = real_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["mbmem: a marked test must name it among its arguments*"])


def test_the_debugger_of_the_worker_has_the_terminal(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        @pytest.mark.parametrize("n", [1, 2])
        def test_x(n):
            mine = "seen by " + "the debugger"
            assert False
        """
    )
    command = ["-m", "pytest", "--pdb", "-p", "no:cacheprovider", "-p", "no:randomly"]
    result = pytester.run(sys.executable, *command, stdin=b"p mine\nq\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*entering PDB*", "*'seen by the debugger'", "*Interrupted: *in its worker: Quitting debugger*"]
    )


def test_output_is_shown_at_once_without_capturing(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_x():
            import torch
            tensor = torch.empty(1, device="cuda")
            print("printed in the worker")
        """
    )
    result = real_project.runpytest("-s")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*printed in the worker*"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [('pytest.exit("enough")', "enough"), ("raise KeyboardInterrupt", "KeyboardInterrupt")],
    ids=["exit", "interrupt"],
)
def test_a_test_can_end_the_session(real_project: pytest.Pytester, line: str, reason: str) -> None:
    real_project.makepyfile(
        f"""
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_x():
            {line}

        def test_next(): pass
        """
    )
    result = real_project.runpytest()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes()
    result.stdout.fnmatch_lines([f"*Interrupted: test_it.py::test_x, in its worker: {reason}*"])


def test_figures_that_would_mislead_are_corrected_or_marked(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest, warnings

        @pytest.mark.peak_memory(limit="20 MiB")
        def test_resets_the_peak():
            import torch
            block = torch.empty(30 * 2**20, dtype=torch.uint8, device="cuda")
            del block
            torch.cuda.reset_peak_memory_stats()
            torch.empty(2**20, dtype=torch.uint8, device="cuda")

        @pytest.mark.peak_memory(limit="20 MiB")
        def test_reads_a_size():
            import torch
            x = torch.randn(1000, device="cuda")
            x[x > 0]

        @pytest.mark.peak_memory(limit="60 GiB")
        def test_runs_out_in_the_end():
            import torch
            blocks = [torch.empty(30 * 2**30, dtype=torch.uint8, device="cuda") for _ in range(3)]

        @pytest.mark.peak_memory(limit="60 GiB")
        def test_raises_half_way():
            import torch
            block = torch.empty(2**20, dtype=torch.uint8, device="cuda")
            raise ValueError("no")
        """
    )
    result = real_project.runpytest("-W", "ignore")
    result.assert_outcomes(passed=1, failed=3)
    result.stdout.fnmatch_lines(
        [
            "REGRESSION: peak allocated is 10.00 MiB over the limit",
            "E * torch.OutOfMemoryError: CUDA out of memory.*",
            "*::test_runs_out_in_the_end * out of memory",
            "*::test_raises_half_way * invalid",
            "note: *::test_reads_a_size: the test read zeros from the device 1 times: *",
        ]
    )


def test_warnings_of_the_worker_are_in_the_summary(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest, warnings

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_warns():
            import torch
            torch.empty(1, device="cuda")
            warnings.warn("look here", DeprecationWarning)
        """
    )
    result = real_project.runpytest("-W", "default")
    result.assert_outcomes(passed=1, warnings=1)
    result.stdout.fnmatch_lines(["*DeprecationWarning: look here"])


def test_another_recipe_in_megatron_model_is_stale_and_no_regression(real_project: pytest.Pytester) -> None:
    test = """
        import pytest

        @pytest.mark.peak_memory
        def test_model(megatron_model):
            megatron_model({
                "model": {"num_layers": 2, "hidden_size": %d, "num_attention_heads": 4, "vocab_size": 1000},
                "training": {"seq_length": 64},
            })
        """
    real_project.makepyfile(test % 64)
    real_project.runpytest("--mbmem-update=new").assert_outcomes(passed=1)
    real_project.makepyfile(test % 128)
    result = real_project.runpytest()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["STALE: *", "*model.hidden_size: 64 -> 128*"])


def test_the_shells_settings_do_not_reach_a_worker(
    real_project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    real_project.makepyfile(
        """
        import os, pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_caches():
            import torch
            torch.empty(1, device="cuda")
            assert torch.cuda.memory_reserved() == 2 * 2**20
        """
    )
    real_project.runpytest_subprocess().assert_outcomes(passed=1)


@pytest.mark.parametrize("options", ["--setup-show -p no:capture -vv", "-p no:tmpdir -p no:debugging"])
def test_options_about_the_session_do_not_disturb_the_worker(real_project: pytest.Pytester, options: str) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_x():
            import torch
            torch.empty(1, device="cuda")
        """
    )
    real_project.runpytest_subprocess(*options.split()).assert_outcomes(passed=1)


def test_a_failing_test_accepts_nothing(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory
        def test_x():
            import torch
            torch.empty(1, device="cuda")
            assert 0
        """
    )
    result = real_project.runpytest("--mbmem-update=new")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*accepted*")


# torchrun -------------------------------------------------------------------------------------------------------------


def test_ranks_wait_for_each_other_less_long_than_their_workers_live(monkeypatch: pytest.MonkeyPatch) -> None:
    from pytest_mbmem import measure

    limits: list[float] = []

    def nobody_answers(job: dict[str, Any], *_: object) -> list[None]:
        limits.append(job["timeout"])
        return [None, None]

    def once(job: dict[str, Any], rank: int) -> int:
        limits.append(job["timeout"])
        return 1

    monkeypatch.setattr(measure, "peers", SimpleNamespace(times_here=once, exchange=nobody_answers), raising=False)
    torchrun = Torchrun(rank=0, world_size=2, local_rank=0, address="localhost", port=1, attempt="0")
    device = Device(key="made-up", name="made up", capacity=2**30, virtual=False)
    worker = Worker(device, Path("history"), None, {})
    with pytest.raises(UserError, match="no figures from rank 0, 1 within 8 s"):
        worker.gathered(Measurement(device, ()), torchrun, "test_it.py::test_x", 10.0)
    assert limits == [8.0, 8.0]
