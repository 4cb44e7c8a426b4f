"""--mbmem-conformance: every documented constraint is tried with the installed versions."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from pytest_mbmem import conformance
from pytest_mbmem.errors import UserError
from pytest_mbmem.incompatibilities import catalog, installed
from pytest_mbmem.incompatibilities.catalog import Entry
from pytest_mbmem.megatron_settings import settings
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.report.json import load

NOT_IMPORTED = "raise SystemError('a module of tests was imported')"

WRONG_CATALOG = """\
documented: ">=0.16"
defaults: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, cpu_offloading: false, cpu_offloading_num_layers: 0,
  alloc_conf: ""}
terms: {}
constraints:
- id: as-it-is
  forbids: cpu_offloading and cpu_offloading_num_layers == 4
  megatron: [{raises: ValueError, message: CPU offloading can be done only for layers less than, at: configuration}]
  why: text
  instead: text
  source: text
  example: {config: TransformerConfig, arguments: {cpu_offloading: true, cpu_offloading_num_layers: 4}}
- id: changed
  forbids: cpu_offloading and cpu_offloading_num_layers == 5
  megatron: [{raises: ValueError, message: another text, at: configuration}]
  why: text
  instead: text
  source: text
  example: {config: TransformerConfig, arguments: {cpu_offloading: true, cpu_offloading_num_layers: 5}}
- id: vanished
  forbids: cpu_offloading
  megatron: [{raises: ValueError, message: any, at: configuration}]
  why: text
  instead: text
  source: text
  example: {config: TransformerConfig, arguments: {cpu_offloading: true, cpu_offloading_num_layers: 1}}
- id: appeared
  forbids: num_attention_heads == 3
  megatron: [{accepts: nothing}]
  why: text
  instead: text
  source: text
  example: {config: TransformerConfig, arguments: {num_attention_heads: 3, num_layers: -1, cpu_offloading: true}}
- id: of-te
  forbids: cpu_offloading
  needs: [transformer-engine]
  megatron: [{raises: ValueError, message: any, at: configuration}]
  why: text
  instead: text
  source: text
  example: {config: TransformerConfig, arguments: {cpu_offloading: true}}
- id: newer
  forbids: cpu_offloading
  versions: {megatron-core: ">=99"}
  megatron: [{raises: ValueError, message: any, at: configuration}]
  why: text
  instead: text
  source: text
  example: {config: TransformerConfig, arguments: {cpu_offloading: true}}
"""

CONFTEST = """
from pathlib import Path

from pytest_mbmem import incompatibilities
from pytest_mbmem.incompatibilities import Catalog

def pytest_configure(config):
    import pytest

    patch = pytest.MonkeyPatch()
    made = Catalog(Path(__file__).with_name("catalog.yaml"))
    patch.setattr(incompatibilities, "catalog", lambda: made)
    config.add_cleanup(patch.undo)

def pytest_itemcollected(item):
    assert item.obj is None or callable(item.obj)  # as hooks may ask any of pytest's own
"""


@pytest.fixture
def wrong_project(real_project: pytest.Pytester) -> pytest.Pytester:
    """A project with a catalogue that is mostly wrong."""
    real_project.makeconftest(CONFTEST)
    real_project.path.joinpath("catalog.yaml").write_text(WRONG_CATALOG)
    real_project.makepyfile(NOT_IMPORTED)
    return real_project


def _holds_here(entry: Entry) -> bool:
    example = entry.example
    return entry.breaks(settings(example) if isinstance(example, Recipe) else example.settings, installed())


def test_the_real_catalogue_agrees_with_the_installed_versions(real_project: pytest.Pytester) -> None:
    real_project.makepyfile(NOT_IMPORTED)
    result = real_project.runpytest("--mbmem-conformance", "-rs")
    outcomes = result.parseoutcomes()
    assert set(outcomes) == {"passed", "skipped"}, result.stdout.str()
    reasons = re.findall(r"^SKIPPED .*?yaml:\d+: ([a-z0-9-]+): (.*)$", result.stdout.str(), re.MULTILINE)
    assert len(reasons) == outcomes["skipped"]
    for id, reason in reasons:
        entry = catalog()[id]
        if reason.startswith("does not hold for "):
            assert not _holds_here(entry)
        elif reason == "Transformer Engine is not installed":
            assert "transformer-engine" in entry.needs
        elif reason == "takes a real GPU (--mbmem-gpu)":
            assert "gpu" in entry.needs
        else:  # without Transformer Engine, and never with it
            assert reason.startswith("this package cannot run it yet: megatron.cuda_graph_impl: ")
    said = f"{outcomes['passed']} as documented, 0 disagree, {outcomes['skipped']} not decided"
    result.stdout.fnmatch_lines([f"mbmem conformance: megatron-core *, torch *: {said}"])
    result.stdout.no_fnmatch_line("*note:*")  # each is raised at the documented stage


def test_disagreements_fail_with_both_texts_and_the_rest_is_skipped_by_name(wrong_project: pytest.Pytester) -> None:
    result = wrong_project.runpytest(
        "--mbmem-conformance", "-rs", "--junitxml=junit.xml", "--mbmem-json=mbmem.json", "--mbmem-html=mbmem.html"
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=3, skipped=2)
    result.stdout.fnmatch_lines(
        [
            "changed: documentation and code disagree: the message has changed",
            "  documented: ValueError at configuration: another text",
            "  happened:   ValueError at configuration: CPU offloading can be done only for layers less than 4 *",
            "vanished: documentation and code disagree: the error has vanished",
            "  documented: ValueError at configuration: any",
            "  happened:   accepted: a TransformerConfig was made, and nothing was done with it",
            "appeared: documentation and code disagree: an error has appeared, *",
            "  documented: accepted: nothing",
            "mbmem conformance: megatron-core *: 1 as documented, 3 disagree, 2 not decided",
            "  changed: documentation and code disagree: the message has changed",
            "  vanished: documentation and code disagree: the error has vanished",
            "  appeared: documentation and code disagree: an error has appeared, *",
            "SKIPPED*catalog.yaml:*: of-te: Transformer Engine is not installed",
            "SKIPPED*catalog.yaml:*: newer: does not hold for megatron-core * (>=99)",
        ]
    )
    result.stdout.no_fnmatch_line("*conformance.py*")  # no traceback
    cases = {case.get("name"): case for case in ElementTree.parse(wrong_project.path / "junit.xml").iter("testcase")}
    assert cases["changed"].get("classname") == "mbmem-conformance"
    assert cases["changed"].find("failure") is not None
    properties = {p.get("name"): p.get("value") for p in cases["as-it-is"].iter("property")}
    assert properties["mbmem_verdict"] == "refused as documented"
    proofs = {test.id: test.proofs for test in load(wrong_project.path / "mbmem.json").tests.values()}
    headline = "changed: documentation and code disagree: the message has changed"
    verdict = {"id": "changed", "verdict": "documentation and code disagree", "headline": headline}
    assert proofs["mbmem-conformance::changed"] == [verdict]
    assert headline in (wrong_project.path / "mbmem.html").read_text()


def test_selecting(wrong_project: pytest.Pytester) -> None:
    result = wrong_project.runpytest("--mbmem-conformance", "-k", "as-it-is", "-v")
    result.assert_outcomes(passed=1, deselected=5)
    result.stdout.fnmatch_lines(["mbmem-conformance::as-it-is PASSED*"])
    wrong_project.runpytest("--mbmem-conformance", "-m", "not mbmem_conformance").assert_outcomes(deselected=6)


def test_a_constraint_can_be_named_by_its_node_id(wrong_project: pytest.Pytester) -> None:
    wrong_project.runpytest("--mbmem-conformance", "mbmem-conformance::as-it-is").assert_outcomes(passed=1)
    result = wrong_project.runpytest("--mbmem-conformance", "mbmem-conformance::as-it-i")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: mbmem-conformance: 'as-it-i' is not a documented *; nearest: as-it-is"])


def test_tests_run_too_where_their_paths_are_named(wrong_project: pytest.Pytester) -> None:
    wrong_project.makepyfile("def test_x(): pass")
    wrong_project.path.joinpath("tox.ini").write_text("[pytest]\ntestpaths = test_it.py\n")
    select = ("--mbmem-conformance", "-k", "test_x or as-it-is")
    wrong_project.runpytest(*select).assert_outcomes(passed=1, deselected=5)
    wrong_project.runpytest(*select, "test_it.py").assert_outcomes(passed=2, deselected=5)


def test_gates_beside_it_are_no_constraints(project: pytest.Pytester) -> None:
    project.makepyfile(
        """
        import pytest

        @pytest.mark.peak_memory(limit="1 MiB")
        def test_bad(mbmem):
            mbmem.measure("recipe.yaml")

        @pytest.mark.peak_memory(limit="1 GiB")
        def test_good(mbmem):
            mbmem.measure("recipe.yaml")
        """
    )
    result = project.runpytest("--mbmem-conformance", "test_it.py", "-k", "test_bad or test_good")
    result.assert_outcomes(passed=1, failed=1, deselected=len(catalog()))
    result.stdout.no_fnmatch_line("mbmem conformance: *")


def test_with_xdist(wrong_project: pytest.Pytester) -> None:
    """In its controller there is the whole summary. What xdist's workers try takes servers of theirs: none is tried."""
    result = wrong_project.runpytest("--mbmem-conformance", "-n", "2", "-k", "of-te or newer")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["mbmem conformance: *: 0 as documented, 0 disagree, 2 not decided"])


def test_baselines_are_left_alone(project: pytest.Pytester) -> None:
    """None has lost its test because no test was collected, and none can be written."""
    folder = project.mkdir("baselines") / "virtual-h100-80gb"
    folder.mkdir()
    folder.joinpath("test_it.yaml").write_text("test_x: {allocated: 1 MiB}\n")
    result = project.runpytest("--mbmem-conformance", "--collect-only", "-q")
    assert result.ret == 0
    result = project.runpytest("--mbmem-conformance", "--mbmem-update")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --mbmem-update: --mbmem-conformance measures nothing*"])


def test_without_megatron_core(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conformance, "installed", lambda: {"torch": "2.14.1"})
    result = project.runpytest("--mbmem-conformance")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --mbmem-conformance: megatron-core is not installed*"])


def test_a_machine_that_can_try_nothing_says_so_once(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise UserError("no compiler")

    monkeypatch.setattr(conformance, "make_all", fails)
    result = project.runpytest("--mbmem-conformance")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["!*: no compiler !*"])
