"""Rules on memory that ran out, and on what the allocator reserves and cannot use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from .. import alloc_conf
from ..compare import Comparison
from ..errors import UserError
from ..gates import DEFAULT_SLACK, DEFAULT_TOLERANCE, Judgement, band
from ..measurement import Failure, RankMeasurement, selects
from ..oom import Remedy, Shortage
from ..recipe import Recipe
from ..remedies import COSTS, EXPANDABLE
from ..split import UNALLOCATED, Split, parts_text, split_of
from ..units import format_bytes, format_fraction
from .activations import LITTLE
from .case import Case, Subject, is_fragmented
from .finding import MEMORY, OWN, RECOMPUTE, Action, Finding
from .parts import MODEL_STATE

EXPAND = Action('set memory.alloc_conf "expandable_segments:True"', COSTS[EXPANDABLE])
_GIVE_BACK = Action(
    'memory.alloc_conf "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95" frees cached segments early'
)
_EMPTY = Action("torch.cuda.empty_cache() between phases of the training loop gives what is cached back")
"""Where expandable segments are on, of which PyTorch collects no garbage."""


def shortages(case: Case) -> Iterator[Finding]:
    """Of every way in which memory ran out: what the evidence of its diagnosis says."""
    for subject in case.subjects:
        for failure, where in subject.shortages:
            shortage = failure.shortage
            assert shortage is not None
            asked = f"rank {failure.rank}{subject.of} asked for {format_bytes(shortage.requested)}{where}"
            if failure.name:
                asked += f" in {failure.name}"
            if is_fragmented(shortage):
                yield _fragmentation(asked, shortage)
            elif shortage.verdict == "capacity":
                yield _capacity(asked, shortage, subject.rank(failure.rank) if not where else None, failure.name)
            elif shortage.verdict == "starved":
                yield _starved(asked, shortage)


def _fragmentation(asked: str, shortage: Shortage) -> Finding:
    settings = shortage.alloc_conf or "the default settings"
    pieces = f"{shortage.pieces} pieces, the largest {format_bytes(shortage.largest_piece)}"
    evidence = [f"{format_bytes(shortage.unusable)} were reserved and free, in {pieces}; the allocator has {settings}"]
    if shortage.diagnosis is not None and (trial := shortage.diagnosis.trial("expandable segments")) is not None:
        reserved = f": it reserves {format_bytes(trial.peak_reserved)}" if trial.peak_reserved is not None else ""
        evidence.append(f"the same allocations fit with expandable segments{reserved}")
    return Finding(
        "fragmentation",
        f"{asked}, and had no less than that in pieces it could not use"
        if shortage.unusable >= shortage.requested
        else f"{asked}, and would have had it with expandable segments",
        tuple(evidence),
        "memory fragmentation: the allocator cannot join free pieces of different segments",
        "mbmem replay SNAPSHOT --alloc-conf expandable_segments:True, or run once with it; no model setting changes",
        (EXPAND,),
        MEMORY,
    )


def _capacity(asked: str, shortage: Shortage, rank: RankMeasurement | None, phase: str | None) -> Finding:
    assert shortage.diagnosis is not None
    evidence = []
    need = shortage.diagnosis.trial("without limit")
    if need is not None and need.fits and need.peak_allocated is not None:
        lack = need.peak_allocated - shortage.usable
        needed, usable = format_bytes(need.peak_allocated), format_bytes(shortage.usable)
        whole = "what was asked for makes" if need.replayed else "the whole run needs"  # a replay ends there
        but = f"{format_bytes(lack)} too little" if lack > 0 else "too little, as it reserves more than is live"
        evidence.append(f"{whole} {needed} and PyTorch can have {usable}: {but}")
    else:
        evidence.append(f"{format_bytes(shortage.allocated)} were live of {format_bytes(shortage.usable)}")
    cause = "a genuine capacity limit"
    if rank is not None and not any(selects(phase, figures) for figures in rank.phases):
        phase = None
    if rank is not None and (split := split_of(rank, phase=phase)) is not None:
        evidence.append(f"the most that was live{f' in {phase}' if phase else ''}: {parts_text(split)}")
        cause += f": mostly {_mostly(shortage, split)}"
    on = "are on already" if shortage.expandable_segments else "were tried and are not enough"
    return Finding(
        "capacity",
        f"{asked}; expandable segments {on}",
        tuple(evidence),
        cause,
        "the trials of the out-of-memory text; mbmem estimate RECIPE.yaml names the largest component of a recipe",
        tuple(_remedies(shortage.diagnosis.remedies)),
        MEMORY,
    )


def _mostly(shortage: Shortage, split: Split) -> str:
    """What took most of the memory: a kind of what was live, or the request that failed."""
    sizes: Counter[str] = Counter({"the request that failed": shortage.requested})
    for part in split:
        state = part.category in MODEL_STATE
        sizes["model state, which recompute does not reach" if state else part.category] += part.size
    return max(sizes, key=lambda name: sizes[name])


def _remedies(remedies: tuple[Remedy, ...]) -> Iterator[Action]:
    """Those that were measured to fit, in the documents' order; where none was, those that save much, or all."""
    fitting = [remedy for remedy in remedies if remedy.fits]
    helping = [remedy for remedy in remedies if _saves_much(remedy)]
    for remedy in fitting or helping or remedies:
        saved = f"saves {format_bytes(remedy.saved)}" if remedy.saved is not None else ""
        alone = "not enough alone" if remedy.fits is False else ""
        facts = ", ".join(filter(None, [saved, alone, remedy.note]))
        told = f" ({facts})" if facts else ""
        yield Action(f"{remedy.name}{told}{', which fits' if remedy.fits else ''}", remedy.cost)
    if not remedies:
        yield Action("the distributed optimizer", COSTS["distributed optimizer"])
        yield Action("more pipeline stages, keeping data parallelism", COSTS["PP"])
        yield Action("recompute of what holds most of the peak")


def _saves_much(remedy: Remedy) -> bool:
    if remedy.saved is None or remedy.peak_allocated is None:
        return False
    return remedy.saved >= LITTLE * (remedy.peak_allocated + remedy.saved)


def _starved(asked: str, shortage: Shortage) -> Finding:
    outside = shortage.limit - shortage.usable
    return Finding(
        "memory outside PyTorch",
        f"{asked}, and would have had it if nothing outside PyTorch held memory",
        (
            f"{format_bytes(outside)} of {format_bytes(shortage.limit)} are outside PyTorch's reach; it reserved "
            f"{format_bytes(shortage.reserved)} for {format_bytes(shortage.allocated)} of live bytes",
        ),
        "the CUDA context, NCCL's buffers or another process take what PyTorch would need",
        'mbmem measure RECIPE.yaml says what is outside PyTorch; the fits marker with headroom="..." gates it',
        # the allocator gave back what it could before it failed, and expandable segments were tried
        (
            Action("free what is outside PyTorch: other processes, and process groups that NCCL has buffers for"),
            *(_remedies(shortage.diagnosis.remedies) if shortage.diagnosis is not None else ()),
        ),
        OWN,
    )


def starved_fits(case: Case) -> Iterator[Finding]:
    """A fits marker whose GPU holds the live bytes, but not what PyTorch reserves beside the rest."""
    for subject in case.subjects:
        for fit in subject.fits:
            if fit.verdict != "starved" or fit.reserved is None or fit.allocated is None:
                continue
            if (
                fit.failure is not None
                and fit.failure.shortage is not None
                and fit.failure.shortage.verdict != "unknown"
            ):
                continue  # its own diagnosis says more
            yield Finding(
                "memory outside PyTorch",
                f"rank {fit.rank}{subject.of} fits {fit.rule.gpu} alone, and not beside what is outside PyTorch",
                (
                    f"PyTorch may have {format_bytes(fit.room)}, it reserves {format_bytes(fit.reserved)} for "
                    f"{format_bytes(fit.allocated)} of live bytes; {format_bytes(sum(fit.outside.values()))} outside",
                ),
                "what PyTorch reserves and cannot use takes the room of NCCL and the CUDA context",
                'the fragmentation marker, as in fragmentation(limit="10%"), gates what is reserved and not used',
                ((_EMPTY,) if _has_expandable(subject) else (EXPAND, _GIVE_BACK)),
                OWN,
            )


def _has_expandable(subject: Subject) -> bool:
    return subject.recipe is not None and alloc_conf.has_expandable_segments(subject.recipe.memory.alloc_conf)


# One rank alone -------------------------------------------------------------------------------------------------------


def single_rank(case: Case) -> Iterator[Finding]:
    """One rank ran out of memory, and each other one that was measured could still have served its request.

    Not where memory outside PyTorch is known to be what it lacks.
    """
    for subject in case.subjects:
        failure = subject.out_of_memory
        if failure is None or failure.shortage is None or failure.shortage.verdict == "starved":
            continue
        others = [rank for rank in subject.measurement.ranks if rank.rank != failure.rank]
        capacity, requested, limit = (
            subject.measurement.device.capacity,
            failure.shortage.requested,
            failure.shortage.limit,
        )
        left = [
            (min(limit, capacity - sum(rank.outside.values())) - rank.peak("reserved"), rank)
            for rank in others
            if rank.phases
        ]
        if not left or not all(_finished(subject, rank) for rank in others):
            continue
        least, fullest = min(left, key=lambda pair: pair[0])
        if least >= requested:
            yield _single_rank(subject, failure, failure.shortage, fullest, least, len(left))


def _finished(subject: Subject, rank: RankMeasurement) -> bool:
    """Whether it came to the end of its last step: of a rank that failed too, the figures stop before."""
    recipe = subject.recipe
    return recipe is not None and any(
        figures.phase == "optimizer" and figures.step == recipe.training.steps for figures in rank.phases
    )


def _single_rank(
    subject: Subject, failure: Failure, shortage: Shortage, fullest: RankMeasurement, left: int, others: int
) -> Finding:
    balance = Action(
        "tune where layers and recompute lie: full block or uniform recompute, selective labels, or "
        "parallelism.num_layers_in_first_pipeline_stage and its like, for the stage that is full"
    )
    actions: tuple[Action, ...]
    if is_fragmented(shortage):
        cause, actions, source = "memory fragmentation on this rank", (EXPAND,), MEMORY
    elif shortage.verdict == "capacity" or shortage.expandable_segments:
        cause, actions, source = "this rank holds more than the others: the split is uneven", (balance,), RECOMPUTE
    else:  # the documents name fragmentation, and nothing says that it is none
        cause = "memory fragmentation on this rank, or an uneven split; nothing measured tells which"
        actions, source = (EXPAND, balance), MEMORY
    settings = shortage.alloc_conf or "default settings"
    return Finding(
        "single-rank out of memory",
        f"rank {failure.rank} alone runs out of memory{subject.of}; {others} other measured "
        f"rank{'s do' if others > 1 else ' does'} not",
        (
            f"rank {failure.rank} had {format_bytes(shortage.allocated)} live and {format_bytes(shortage.reserved)} "
            f"reserved; rank {fullest.rank}, the fullest other one, peaks at {format_bytes(fullest.peak())} live and "
            f"{format_bytes(fullest.peak('reserved'))} reserved, with {format_bytes(left)} left",
        ),
        cause,
        f"whether expandable_segments:True is set: the allocator has {settings}; peaks by rank: mbmem measure "
        "RECIPE.yaml --ranks all",
        actions,
        source,
    )


# Before the launch ----------------------------------------------------------------------------------------------------


def estimates(case: Case) -> Iterator[Finding]:
    """A recipe that ran out of memory, and whose closed-form estimate is more than the GPU has.

    The estimate counts activations that wait in host memory too, so that of a recipe with any it proves nothing.
    """
    for subject in case.subjects:
        if subject.out_of_memory is None or subject.recipe is None:
            continue
        recipe, capacity = subject.recipe, subject.measurement.device.capacity
        if recipe.memory.cpu_offloading or recipe.memory.offload_modules:
            continue
        from ..estimate import estimate

        try:
            found = estimate(recipe)
        except UserError:  # of settings that another version refuses
            continue
        if found.total <= capacity:
            continue
        largest = found.largest
        share = format_fraction(largest.size / found.total)
        yield Finding(
            "estimate exceeds capacity",
            f"the closed-form estimate{subject.of} is more than the GPU has, before anything is launched",
            (
                f"{format_bytes(found.total)} are estimated on the most loaded rank, and the GPU has "
                f"{format_bytes(capacity)}; the largest component is {largest.name}, {format_bytes(largest.size)} "
                f"({share})",
            ),
            "model state or activations are genuinely too large",
            "mbmem estimate RECIPE.yaml shows every component beside what was measured",
            tuple(_before_launch(recipe)),
            MEMORY,
        )


def _before_launch(recipe: Recipe) -> Iterator[Action]:
    """What the documents' table names, without what the recipe has already."""
    split = recipe.parallelism
    yield Action("more pipeline stages, keeping data parallelism", COSTS["PP"])
    yield Action("more tensor parallelism", COSTS["TP"])
    experts = " or expert" if recipe.model.moe is not None else ""
    yield Action(f"more context{experts} parallelism, if the model and the sequence allow it")
    if not split.distributed_optimizer and split.cp * split.dp > 1:
        yield Action("the distributed optimizer", COSTS["distributed optimizer"])
    if recipe.memory.recompute_granularity != "full":
        yield Action("recompute of what holds most of the peak")


# Reserved and not used ------------------------------------------------------------------------------------------------


def reserved_high(case: Case) -> Iterator[Finding]:
    """Reserved bytes that are too many or grew, while allocated ones are as they were."""
    for subject in case.subjects:
        for found in subject.fragmentations:
            if found.verdict == "fragmented" and found.unused is not None and found.fraction is not None:
                assert found.reserved is not None
                assert found.allocated is not None
                peaks = f"reserved {format_bytes(found.reserved)}, allocated {format_bytes(found.allocated)}"
                figures = (
                    f"peaks of rank {found.rank}: {peaks}; {format_bytes(found.unused)} "
                    f"({format_fraction(found.fraction)}) hold no tensor, {found.rule.bound} are allowed"
                )
                yield _reserved(f"reserved memory is high{subject.of}", figures, _has_expandable(subject))
        for peak in subject.peaks:
            change = _changes(subject, peak)
            if change is not None:
                assert peak.measured is not None
                assert peak.reference is not None
                reserved = f"reserved {format_bytes(peak.reference)} -> {format_bytes(peak.measured)}"
                then, now = change
                figures = f"{reserved} against the baseline, allocated {format_bytes(then)} -> {format_bytes(now)}"
                yield _reserved(
                    f"reserved memory grew{subject.of} and allocated is stable", figures, _has_expandable(subject)
                )
    for comparison in case.compared:
        if comparison.has_figures and comparison.metric == "reserved" and comparison.verdict == "costs more":
            before, after = comparison.allocator
            if is_stable(before.allocated, after.allocated):
                yield _reserved(
                    "the candidate reserves more than its control and allocates no more",
                    comparison.allocator_text(),
                    _wants_expandable(comparison),
                )


def is_stable(then: int, now: int) -> bool:
    """Whether allocated bytes are as they were, by the bounds of a gate that names none."""
    return abs(now - then) <= band(then, DEFAULT_TOLERANCE["allocated"], DEFAULT_SLACK["allocated"])


def _changes(subject: Subject, peak: Judgement) -> tuple[int, int] | None:
    """Allocated bytes then and now, beside reserved ones that regressed; None unless they are known and stable."""
    if peak.verdict != "regression" or peak.gate.metric != "reserved" or peak.gate.limit is not None:
        return None
    found: tuple[int, int] | None = None
    for other in subject.peaks:
        alike = (other.gate.metric, other.gate.phase, other.gate.limit) == ("allocated", peak.gate.phase, None)
        if alike and other.reference is not None and other.measured is not None:
            found = other.reference, other.measured
    rank = subject.rank(peak.rank)
    if found is None and peak.growth is not None and rank is not None:
        now = rank.peak_phase("reserved", peak.gate.phase).peak["allocated"]
        found = now - (peak.growth.total - peak.growth.categories().get(UNALLOCATED, 0)), now
    return found if found is not None and is_stable(*found) else None


def _wants_expandable(comparison: Comparison) -> bool:
    recipe = Subject(comparison.candidate).recipe
    return recipe is not None and alloc_conf.has_expandable_segments(recipe.memory.alloc_conf)


def _reserved(symptom: str, figures: str, has_expandable: bool) -> Finding:
    first = (Action("expandable segments are on already: look at what is cached, not at recompute"), _EMPTY)
    return Finding(
        "reserved high, allocated stable",
        symptom,
        (figures,),
        "allocator fragmentation or caching, not activations",
        "mbmem snapshot FILE of the failure's snapshot; with memory.alloc_conf changed alone, mbmem.compare tells",
        first if has_expandable else (EXPAND, Action("only then think of recompute")),
        RECOMPUTE,
    )
