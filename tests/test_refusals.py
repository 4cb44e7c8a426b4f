"""Verdicts of proofs: what is documented beside what Megatron Core does, which is made up here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from pytest_mbmem import incompatibilities, refusals
from pytest_mbmem.errors import MeasurementFailed, UserError
from pytest_mbmem.incompatibilities import Catalog
from pytest_mbmem.incompatibilities.catalog import Construction
from pytest_mbmem.measure.host import HostLauncher
from pytest_mbmem.measure.workers import CallResult, Workers
from pytest_mbmem.recipe import Model, Moe, Parallelism, Recipe, Training
from pytest_mbmem.refusals import Proof, Raised, judge_body, prove


def constraint(id: str, forbids: str, outcome: dict[str, Any], **more: Any) -> dict[str, Any]:
    example = {"config": "TransformerConfig", "arguments": {"num_layers": 3, "pipeline_model_parallel_size": 2}}
    texts = dict.fromkeys(("why", "instead", "source"), "text")
    return {"id": id, "forbids": forbids, "megatron": [outcome], "example": example, **texts, **more}


REFUSED = {"raises": "ValueError", "message": "no pipeline", "at": "configuration"}

CATALOG = {
    "documented": ">=0.16",
    "defaults": {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "pipeline_model_parallel_size": 1,
        "attention_dropout": 0.1,
        "alloc_conf": "",
    },
    "terms": {},
    "constraints": [
        constraint("pp-odd", "pipeline_model_parallel_size > 1", REFUSED),
        constraint("dropout", "attention_dropout > 0", {"raises": "AssertionError", "message": "", "at": "run"}),
        constraint("silent", "num_layers > 2", {"accepts": "nothing happens"}),
        constraint("newer", "num_layers > 2", REFUSED, versions={"megatron-core": ">=99"}),
        constraint("of-te", "num_layers > 2", REFUSED, needs=["transformer-engine"]),
        constraint("on-gpus", "num_layers > 2", REFUSED, needs=["gpu"]),
        constraint("unknown-yet", "num_layers > 2", {**REFUSED, "versions": {"megatron-core": ">=99"}}),
    ],
}

VERSIONS = {"megatron-core": "0.16.1", "torch": "2.14.1"}


class Answering:
    """In the place of worker processes: gives the answers that a test has, and keeps what was asked."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.asked = list(answers), []  # type: ignore[var-annotated]

    def __call__(self, requests: Sequence[dict[str, Any]], jobs: int) -> list[CallResult]:
        self.asked += [(r["target"].partition(":")[2], r["arguments"], r["environment"]) for r in requests]
        return [
            answer if isinstance(answer, CallResult) else CallResult(answer) for answer in map(self._next, requests)
        ]

    def _next(self, request: Mapping[str, Any]) -> Any:
        answer = self.answers.pop(0)
        return [answer] if request["target"].endswith("construct_all") and isinstance(answer, dict) else answer


ACCEPTED = {"raised": None, "own": ""}


def raised(type: str, message: str, at: str = "configuration") -> dict[str, Any]:
    return {"raised": {"type": type, "message": message, "at": at, "where": "megatron.core.x, line 3"}, "own": ""}


@pytest.fixture(autouse=True)
def catalog(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Catalog:
    path = tmp_path / "catalog.yaml"
    path.write_text(yaml.safe_dump(CATALOG, sort_keys=False))
    made = Catalog(path)
    monkeypatch.setattr(incompatibilities, "catalog", lambda: made)
    for module in (incompatibilities, refusals):
        monkeypatch.setattr(module, "installed", lambda: dict(VERSIONS))
    return made


def workers(*answers: Any, kind: type[Workers] = Workers) -> Workers:
    made = kind(timeout=10)
    made._answers = Answering(*answers)  # type: ignore[method-assign]
    return made


def proof_of(id: str, *answers: Any, kind: type[Workers] = Workers) -> Proof:
    entry = incompatibilities.catalog()[id]
    return prove(workers(*answers, kind=kind), entry.example, entry)


RECIPE = Recipe(
    model=Model(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=1000, attention_dropout=0.1),
    parallelism=Parallelism(pp=2),
    training=Training(seq_length=64, steps=2),
)


@pytest.mark.parametrize(
    ("id", "answer", "headline"),
    [
        ("pp-odd", raised("ValueError", "no  pipeline\nhere"), "refused as documented"),
        ("pp-odd", ACCEPTED, "documentation and code disagree: the error has vanished"),
        ("pp-odd", raised("ValueError", "none"), "documentation and code disagree: the message has changed"),
        (
            "pp-odd",
            raised("TypeError", "no pipeline"),
            "documentation and code disagree: TypeError instead of ValueError",
        ),
        ("pp-odd", raised("AssertionError", ""), "documentation and code disagree: dropout is refused first"),
        ("dropout", raised("AssertionError", ""), "refused as documented"),
        ("dropout", raised("AssertionError", "new"), "documentation and code disagree: the message has changed"),
        ("silent", ACCEPTED, "accepted silently, as documented, so there is no error to prove"),
        (
            "silent",
            raised("ValueError", "no"),
            "documentation and code disagree: an error has appeared, ValueError",
        ),
        (
            "pp-odd",
            CallResult(failure="died", message="the worker was killed by SIGSEGV"),
            "documentation and code disagree: died instead of ValueError",
        ),
        ("pp-odd", {"raised": None, "own": "it cannot"}, "cannot be decided: it cannot"),
        ("newer", None, "cannot be decided: does not hold for megatron-core 0.16.1 (>=99)"),
        ("of-te", None, "cannot be decided: Transformer Engine is not installed"),
        ("on-gpus", None, "cannot be decided: takes a real GPU (--mbmem-gpu)"),
        (
            "unknown-yet",
            None,
            "cannot be decided: nothing is documented for megatron-core 0.16.1, torch 2.14.1, no transformer-engine",
        ),
    ],
)
def test_verdicts(id: str, answer: Any, headline: str) -> None:
    assert proof_of(id, answer).headline == f"{id}: {headline}"


def test_explain_has_both_texts_settings_and_versions() -> None:
    text = proof_of("pp-odd", raised("AssertionError", "", at="run")).explain()
    assert text.splitlines() == [
        "pp-odd: documentation and code disagree: dropout is refused first",
        "  documented: ValueError at configuration: no pipeline",
        "  happened:   AssertionError at run: (without a message) (megatron.core.x, line 3)",
        "  note:       documented to be raised at configuration, raised at run",
        "  note:       that is the documented error of dropout, which these settings break too",
        "  settings:   pipeline_model_parallel_size: 2",
        "  versions:   megatron-core 0.16.1, torch 2.14.1, no transformer-engine",
    ]
    assert "  happened:   accepted: a TransformerConfig was made" in proof_of("pp-odd", ACCEPTED).explain()


def test_a_recipe_is_tried_up_to_the_rank_that_raises() -> None:
    entry = incompatibilities.catalog()["dropout"]
    launcher = workers(ACCEPTED, ACCEPTED, raised("AssertionError", "", at="run"))
    proof = prove(launcher, RECIPE, entry)
    assert proof.verdict == "refused as documented"
    assert proof.settings == {"model.attention_dropout": 0.1}
    asked = launcher._answers.asked  # type: ignore[attr-defined]
    assert [(name, arguments.get("rank")) for name, arguments, _ in asked] == [
        ("configure", None),
        ("attempt", 0),
        ("attempt", 1),
    ]


def test_a_recipe_that_is_accepted_names_the_ranks_that_trained() -> None:
    proof = prove(workers(ACCEPTED, ACCEPTED, ACCEPTED), RECIPE, incompatibilities.catalog()["dropout"])
    assert "accepted: ranks 0, 1 trained 2 steps" in proof.explain()


def test_ranks_of_an_impossible_recipe_are_tried_all_the_same() -> None:
    """Three experts cannot be shared out over four ranks, so that no rank has any to tell it from others."""
    moe = Moe(num_moe_experts=3)
    recipe = RECIPE.but(moe=moe, pp=1, dp=4, ep=4)
    for ranks, tried in {"distinct": [0], "all": [0], (3, 1): [1, 3]}.items():
        launcher = workers(ACCEPTED, ACCEPTED, ACCEPTED)
        prove(launcher, recipe, incompatibilities.catalog()["dropout"], ranks=ranks)  # type: ignore[arg-type]
        asked = launcher._answers.asked  # type: ignore[attr-defined]
        assert [arguments["rank"] for name, arguments, _ in asked if name == "attempt"] == tried


@pytest.mark.parametrize("ranks", [[99], "x", [], [0, 0]])
def test_wrong_ranks_are_refused_before_anything_is_tried(ranks: Any) -> None:
    with pytest.raises(UserError, match=r"^ranks"):
        prove(workers(), RECIPE, incompatibilities.catalog()["pp-odd"], ranks=ranks)


def test_what_has_no_end_is_no_error_that_appeared() -> None:
    endless = CallResult(failure="timeout", message="no answer")
    recipe = RECIPE.but(num_layers=4, pp=1)
    proof = prove(workers(ACCEPTED, endless), recipe, incompatibilities.catalog()["silent"])
    assert proof.headline == "silent: cannot be decided: no end within 10 s"


def test_on_the_host_only_configurations_are_tried() -> None:
    catalog = incompatibilities.catalog()
    refused = prove(workers(raised("ValueError", "no pipeline"), kind=HostLauncher), RECIPE, catalog["pp-odd"])
    assert refused.verdict == "refused as documented"
    later = prove(workers(kind=HostLauncher), RECIPE, catalog["dropout"])
    assert later.headline == "dropout: cannot be decided: --mbmem-host has no GPU to build the model on"


def test_a_cpu_build_of_torch_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "has_cuda_build", lambda: False)
    later = prove(workers(kind=HostLauncher), RECIPE, incompatibilities.catalog()["dropout"])
    assert later.reason == "torch is a CPU build"


def test_settings_that_break_nothing_are_the_tests_mistake() -> None:
    recipe = RECIPE.but(pp=1)
    with pytest.raises(UserError) as caught:
        prove(workers(), recipe, incompatibilities.catalog()["pp-odd"])
    assert str(caught.value) == (
        "the settings do not break pp-odd, which forbids pipeline_model_parallel_size > 1; here parallelism.pp: 1"
    )


def test_an_example_that_ends_its_worker_does_not_answer_for_others() -> None:
    entries = incompatibilities.catalog()
    died = CallResult(failure="died", message="killed")
    launcher = workers(died, ACCEPTED, died)
    found = refusals.make_all(launcher, {id: entries[id].example for id in ("silent", "pp-odd")})
    assert found["silent"].value == ACCEPTED
    assert found["pp-odd"] == died


def test_a_trial_that_breaks_decides_nothing() -> None:
    with pytest.raises(MeasurementFailed, match="could not be asked:\nImportError"):
        proof_of("pp-odd", CallResult(failure="error", message="ImportError"))


@pytest.mark.parametrize(
    ("environment", "alloc_conf"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, "a:1"),
        ({"PYTORCH_ALLOC_CONF": "b:1"}, "b:1"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "a:1", "PYTORCH_ALLOC_CONF": "b:1"}, "b:1"),
        ({}, ""),
    ],
)
def test_the_allocators_settings_are_those_of_either_variable(environment: dict[str, str], alloc_conf: str) -> None:
    assert Construction("TransformerConfig", {}, environment).settings["alloc_conf"] == alloc_conf


def test_a_body_without_a_recipe_is_judged_by_its_error_alone() -> None:
    entry = incompatibilities.catalog()["pp-odd"]
    for message, verdict in {
        "no pipeline, sorry": "refused as documented",
        "no": "documentation and code disagree",
    }.items():
        assert judge_body(entry, Raised("ValueError", message, ""), None, real_gpu=False).verdict == verdict
    own = judge_body(entry, Raised("ValueError", "no pipeline", "", of_megatron=False), None, real_gpu=False)
    assert own.headline == "pp-odd: documentation and code disagree: ValueError did not come from Megatron Core"
    assert "the test's body came to its end" in judge_body(entry, None, None, real_gpu=False).explain()
    with pytest.raises(UserError, match="do not break pp-odd"):
        judge_body(entry, None, RECIPE.but(pp=1), real_gpu=False)
