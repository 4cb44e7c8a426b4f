"""A pytest that torchrun started: which of its processes this is, and how they all learn the same figures.

Every process runs the same tests in the same order. The workers find each other through the store that torchrun itself
keeps for its processes. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Torchrun:
    """One of `world_size` processes, the `local_rank`-th on its machine."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    attempt: str  # torchrun may start its processes again, and its store outlives them

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Torchrun | None:
        """None where this process was not started by torchrun. Raises `UserError` for a variable that is wrong."""
        if "TORCHELASTIC_RUN_ID" not in environment:
            return None
        values = {}
        for name in _NUMBERS:
            text = environment.get(name, "")
            if not text.isdecimal():
                raise UserError(f"{name}={text!r}: torchrun sets it to a whole number; start pytest by torchrun alone")
            values[name] = int(text)
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            raise UserError(
                "TORCHELASTIC_USE_AGENT_STORE is not True: torchrun keeps no store that pytest's processes can share; "
                "start it with --rdzv-backend=c10d"
            )
        return cls(
            rank=values["RANK"],
            world_size=values["WORLD_SIZE"],
            local_rank=values["LOCAL_RANK"],
            address=environment["MASTER_ADDR"],
            port=values["MASTER_PORT"],
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )

    def job(self, name: str, timeout: float, grace: float | None = None) -> dict[str, Any]:
        """For `peers`: where all processes meet that give the same name. `timeout` and `grace` in seconds.

        With `grace` a worker ends that long after another has failed.
        """
        job: dict[str, Any] = {
            "address": self.address,
            "port": self.port,
            "prefix": f"mbmem/{self.attempt}/{name}",
            "world_size": self.world_size,
            "timeout": timeout,
        }
        return job if grace is None else {**job, "grace": grace}
