"""What PyTorch's allocator has of the settings that a recipe asks for. Runs in a worker."""

from __future__ import annotations

from typing import Any

import torch

from .. import alloc_conf
from ..errors import Refused

_SOURCE = "memory.alloc_conf"


def reported() -> dict[str, Any]:
    """The allocator's settings by PyTorch's names, from all that it can be asked."""
    snapshot = torch.cuda.memory._snapshot()
    settings = dict(snapshot["allocator_settings"])
    settings["backend"] = torch.cuda.get_allocator_backend()
    settings["per_process_memory_fraction"] = torch.cuda.get_per_process_memory_fraction()
    if snapshot["segments"]:  # what it does says more than what it was told
        settings["expandable_segments"] = any(segment["is_expandable"] for segment in snapshot["segments"])
    return settings


def check_settings(text: str) -> None:
    """Raise `Refused` if the allocator of this process has any of the settings otherwise. CUDA must have started."""
    settings = alloc_conf.parse(text, _SOURCE)
    if settings and (wrong := alloc_conf.not_in_effect(settings, reported())):
        raise Refused(f"{_SOURCE}: torch {torch.__version__} ignores {'; '.join(wrong)}")


def assumptions(text: str) -> tuple[str, ...]:
    """What remains to be believed of the settings, for the measurement's assumptions."""
    settings = alloc_conf.parse(text, _SOURCE)
    unknown = alloc_conf.not_reported(settings, reported()) if settings else []
    if not unknown:
        return ()
    return (f"{_SOURCE}: PyTorch accepted {', '.join(unknown)} and does not report it, so it is taken to be in effect",)
