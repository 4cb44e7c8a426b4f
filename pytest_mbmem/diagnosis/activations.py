"""Rules on what holds the activations of a peak that is too high, and on memory settings that change little of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..compare import Comparison
from ..measure.effects import not_effective, worded
from ..measurement import Owner
from ..recipe import Recipe
from ..remedies import COSTS, REGATHER, recompute, recomputed
from ..units import format_bytes, format_fraction
from .case import Case, Spot, Subject
from .finding import MEMORY, RECOMPUTE, Action, Finding
from .parts import MODEL_STATE, Dominating, boundary, dominating, explains

LITTLE = 0.01
"""Of its control's peak, a saving that is none worth its cost: the documents call 0.01% no material reduction, and
1.83% to 1.96% savings to choose among (Moonlight 16B)."""

LEAST_GATHERED = 0.016
"""Of the peak, gathered inputs that are worth gathering again: the least that the documents measured as saved
(GPT-OSS-120B)."""

_WHICH = "the section of what the peak is made of, or mbmem measure RECIPE.yaml, names what holds it"


# What dominates -------------------------------------------------------------------------------------------------------


def dominated(case: Case) -> Iterator[Finding]:
    """A peak that is too high, and whose activations belong mostly to one part of the layers that can be recomputed."""
    for subject in case.subjects:
        if (spot := subject.too_high) is None:
            continue
        recipe = subject.recipe
        if recipe is None or recipe.memory.recompute_granularity == "full":
            continue
        part = dominating(spot)
        if part is not None and explains(spot, lambda owner, name=part.boundary: boundary(owner) == name):  # type: ignore[misc]
            yield from _by_boundary(spot, recipe, part)


def _by_boundary(spot: Spot, recipe: Recipe, part: Dominating) -> Iterator[Finding]:
    now, moe, mla = recomputed(recipe), recipe.model.moe, recipe.model.mla
    if part.boundary in now or (part.boundary == "experts" and "moe" in now):
        return  # it is made again already, and what is there is of the layer that runs
    broad = [("moe", "only if narrower ones do not fit")] if moe is not None else []
    narrow = [] if moe is None or "moe" in now else ["moe_act"]  # which whole moe makes again anyway
    if part.boundary == "mla_up_proj" and mla is not None:
        after = ", although core_attn is recomputed" if "core_attn" in now else ""
        labels = [("mla_up_proj", "2.0% of the peak saved on Moonlight 16B"), ("core_attn", "only if measured to help")]
        what = "expanded Q/K/V projection tensors"
        yield _dominates("MLA projections dominate", spot.why + after, what, recipe, part, labels)
    elif part.boundary == "experts" and moe is not None:
        saved = "1.8% of the peak saved on Moonlight 16B, 6.3% on Nemotron 3 Nano"
        labels = [("moe_act", saved), ("layernorm", "where norm outputs matter too"), *broad]
        what = "expert intermediates"
        yield _dominates("MoE intermediates dominate", spot.why, what, recipe, part, labels)
    elif part.boundary == "shared_experts" and "moe" not in now:
        labels = [("shared_experts", ""), *broad]
        yield _dominates("shared experts dominate", spot.why, "shared experts", recipe, part, labels)
    elif part.boundary == "layernorm":
        labels = [*((label, "") for label in narrow), ("layernorm", ""), *broad]
        yield _dominates("norm outputs dominate", spot.why, "outputs of the layers' norms", recipe, part, labels)
    elif part.boundary == "core_attn" and recipe.training.attention_backend != "flash":
        labels = [("core_attn", "flash attention does the same by itself")]
        what = "scores and probabilities of unfused attention"
        yield _dominates("attention core dominates", spot.why, what, recipe, part, labels)
    elif part.boundary == "mlp" and moe is None:
        labels = [("mlp", "after narrower ones: 3 GB saved on Llama 3 70B")]
        yield _dominates("dense MLP dominates", spot.why, "activations of the dense MLP", recipe, part, labels)


def _dominates(
    rule: str, symptom: str, what: str, recipe: Recipe, part: Dominating, labels: Iterable[tuple[str, str]]
) -> Finding:
    control = list(recomputed(recipe))
    return Finding(
        rule,
        symptom,
        (f"{what} hold {part.text}, the most of all activations", f"the largest: {part.holders()}"),
        f"{what} dominate the activations",
        f'with the label added: @pytest.mark.memory_saving(control={{"recompute_modules": {control}}})',
        tuple(action for label, why in labels for action in _recompute(recipe, label, why)),
        RECOMPUTE,
    )


def _recompute(recipe: Recipe, label: str, why: str) -> Iterator[Action]:
    """One label more, unless the recipe has it; where it cannot, why."""
    remedy = recompute(recipe, label)
    if remedy is not None and remedy.note:
        yield Action(f"{label} is {remedy.note}", remedy.cost)
    elif remedy is not None:
        yield Action(f"add {label} to memory.recompute_modules{f': {why}' if why else ''}", remedy.cost)


# LoRA -----------------------------------------------------------------------------------------------------------------


def gathered_inputs(case: Case) -> Iterator[Finding]:
    """A peak that is too high, with inputs of LoRA's A that were gathered in forward and stay for backward."""
    for subject in case.subjects:
        if (spot := subject.too_high) is None:
            continue
        recipe = subject.recipe
        if recipe is None or recipe.lora is None or not recipe.parallelism.sequence_parallel:
            continue
        held = {o: size for o, size in spot.rank.owners(spot.phase).items() if _is_gathered(o)}
        size, peak = sum(held.values()), spot.rank.peak("allocated", spot.phase)
        if size < LEAST_GATHERED * peak or not size or not explains(spot, _is_gathered):
            continue
        requested = recipe.lora.sequence_parallel_input_regather
        targets = {_target(owner) for owner in held}
        counts = [a for a in spot.rank.adapters if a.count and not a.regather_effective and a.target in targets]
        if requested and not counts:
            continue  # it is gathered again, and that is what is held
        actions = [Action("set lora.sequence_parallel_input_regather: true", COSTS[REGATHER])]
        if requested:
            actions = [Action("mbmem explain lists what keeps an adapter from it: its lora-regather-... constraints")]
        share = format_fraction(size / peak)
        adapters = ", ".join(f"{a.count} x {a.target}{f' ({a.reason})' if a.reason else ''}" for a in counts)
        yield Finding(
            "LoRA retains gathered inputs",
            spot.why,
            (
                f"gathered inputs of LoRA hold {format_bytes(size)}, {share} of the peak of {format_bytes(peak)}",
                *([f"not gathered again: {adapters}"] if adapters else []),
            ),
            "the full gathered inputs of LoRA A are retained until backward",
            "lora.sequence_parallel_input_regather of the recipe is "
            + ("true, and not in effect for all targets" if requested else "false"),
            tuple(actions),
            MEMORY,
        )


def _target(owner: Owner) -> str:
    """The linear whose adapter it is."""
    return owner.module.split(".adapter")[0].rpartition(".")[2]


def _is_gathered(owner: Owner) -> bool:
    return owner.category == "activations" and "adapter" in owner.module.split(".") and "gather" in owner.line


# Settings that change little ------------------------------------------------------------------------------------------


def _labels(recipe: Recipe | None) -> set[str]:
    return set(recomputed(recipe)) if recipe is not None else set()


_RECOMPUTE_SETTINGS = {"memory.recompute_granularity", "memory.recompute_modules"}


def core_attention(case: Case) -> Iterator[Finding]:
    """A candidate that recomputes core_attn beside what its control does, and saves next to nothing by it."""
    for comparison in case.compared:
        if not comparison.has_figures or not set(comparison.differences) <= _RECOMPUTE_SETTINGS:
            continue
        if comparison.metric != "allocated":
            continue  # what is reserved may be cached
        subject, control = Subject(comparison.candidate), Subject(comparison.control)
        recipe = subject.recipe
        if recipe is None or _labels(recipe) - _labels(control.recipe) != {"core_attn"}:
            continue
        if _labels(control.recipe) - _labels(recipe) or comparison.saving_fraction >= LITTLE:
            continue
        fused = recipe.training.attention_backend == "flash"
        yield Finding(
            "core_attn saves little",
            "recompute of core_attn gives no material peak reduction against the control without it",
            (
                f"{_peaks(comparison)}: {format_fraction(comparison.saving_fraction)} saved; "
                f"training.attention_backend is {recipe.training.attention_backend!r}",
                *_largest(comparison),
            ),
            ("flash attention already rematerialises its internals, or " if fused else "")
            + "another part of the model sets the peak",
            f"the control above has recompute_modules: {sorted(_labels(control.recipe))}; {_WHICH}",
            (
                Action("take core_attn out again: on Moonlight 16B it saved 0.01% for +3.9% step time"),
                *_narrower(recipe),
            ),
            RECOMPUTE,
        )


def _narrower(recipe: Recipe) -> Iterator[Action]:
    """The boundaries to test next, by what the model is made of."""
    if recipe.model.mla is not None:
        yield from _recompute(recipe, "mla_up_proj", "if expanded Q/K/V tensors hold the peak")
    if recipe.model.moe is not None:
        yield from _recompute(recipe, "moe_act", "if expert intermediates hold the peak")
    yield from _recompute(recipe, "layernorm", "if norm outputs hold the peak")


def _peaks(comparison: Comparison) -> str:
    where = f" in {comparison.phase}" if comparison.phase else ""
    return f"peak {comparison.metric}{where} {format_bytes(comparison.before)} -> {format_bytes(comparison.after)}"


def _largest(comparison: Comparison) -> Iterator[str]:
    """What holds most of the candidate's peak, where the allocator told."""
    rank = comparison.worst_after
    owners = rank.owners(comparison.phase)
    if owners:
        state = sum(size for owner, size in owners.items() if owner.category in MODEL_STATE)
        part = dominating(Spot(rank, comparison.phase, ""))
        most = f"; most of the activations: {part.boundary} with {format_bytes(part.size)}" if part is not None else ""
        yield f"{format_bytes(state)} of that peak are model state{most}"


def without_effect(case: Case) -> Iterator[Finding]:
    """A memory setting that changes nothing, as measuring found out, or as a comparison shows."""
    for subject in case.subjects:
        failure = subject.measurement.failure
        if failure is not None and failure.kind == "no effect":
            yield _without_effect(f"a memory setting changes nothing{subject.of}", tuple(failure.message.splitlines()))
    for comparison in case.compared:
        if comparison.has_figures and comparison.verdict == "no effect":
            names = " and ".join(comparison.differences)
            cause = _INACTIVE
            reasons = tuple(worded(not_effective(comparison.candidate.ranks)))
            if comparison.is_identical:
                evidence = (f"no figure of any rank differs: {_peaks(comparison)}", *reasons)
            elif set(comparison.differences) <= _RECOMPUTE_SETTINGS and not _is_about_core_attention(comparison):
                slack, acting = format_bytes(comparison.slack), tuple(_acting(comparison))
                evidence = (f"{_peaks(comparison)}; up to {slack} are no effect", *acting, *reasons)
                cause = "the peak is elsewhere: what it makes again is not held then" if acting else _INACTIVE
            else:
                continue
            yield _without_effect(f"{names} has no measurable effect", evidence, cause)


def _is_about_core_attention(comparison: Comparison) -> bool:
    return bool(list(core_attention(Case(comparisons=(comparison,)))))


def _acting(comparison: Comparison) -> Iterator[str]:
    for effect in comparison.worst_after.effects:
        if effect.effective and effect.setting.split()[0] in comparison.differences:
            yield f"{effect.setting} acts on {effect.acting} modules of rank {comparison.worst_after.rank}"


_INACTIVE = "the module is absent or inactive on the measured layers, or graph capture bypasses its wrapper"


def _without_effect(symptom: str, evidence: tuple[str, ...], cause: str = _INACTIVE) -> Finding:
    return Finding(
        "setting without effect",
        symptom,
        evidence,
        cause,
        "the model's layers and megatron.cuda_graph_scope of the recipe; mbmem check RECIPE.yaml",
        (
            Action("take the setting out, or choose one whose modules the layers have: mlp does nothing on MoE layers"),
            Action(f"choose by the peak: {_WHICH}"),
        ),
        RECOMPUTE,
    )
