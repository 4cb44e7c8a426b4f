"""LoRA's targets and its sequence-parallel input re-gather: what was asked for against what the measured ranks do."""

from __future__ import annotations

from collections.abc import Sequence

from ..measurement import Adapter, RankMeasurement


def not_regathered(ranks: Sequence[RankMeasurement]) -> str:
    """Why no adapter of the measured ranks gathers its input again although that was requested; "" if one does."""
    requested = [adapter for adapter in _present(ranks) if adapter.regather_requested]
    if any(adapter.regather_effective for adapter in requested):
        return ""
    return "; ".join(f"{', '.join(targets)}: {reason}" for reason, targets in _by_reason(requested).items())


def adapter_notes(ranks: Sequence[RankMeasurement]) -> tuple[str, ...]:
    """Sentences on targets that no measured rank has, and on which adapters gather their input again and which not."""
    found = _present(ranks)
    notes = [f"LoRA target {a.target}: requested, not effective: {a.reason}" for a in found if not a.count]
    for reason, targets in _by_reason([a for a in found if a.count and a.regather_requested]).items():
        effect = f"requested, not effective: {reason}" if reason else "in effect"
        notes.append(f"LoRA input re-gather of {', '.join(targets)}: {effect}")
    return tuple(dict.fromkeys(notes))


def _present(ranks: Sequence[RankMeasurement]) -> list[Adapter]:
    """The adapters of all ranks, without the targets that one rank lacks and another one has."""
    adapters = [adapter for rank in ranks for adapter in rank.adapters]
    present = {adapter.target for adapter in adapters if adapter.count}
    return [adapter for adapter in adapters if adapter.count or adapter.target not in present]


def _by_reason(adapters: Sequence[Adapter]) -> dict[str, list[str]]:
    """Reason -> the targets that it holds for; "" for those in effect."""
    found: dict[str, list[str]] = {}
    for adapter in adapters:
        targets = found.setdefault(adapter.reason, [])
        if adapter.target not in targets:
            targets.append(adapter.target)
    return found
