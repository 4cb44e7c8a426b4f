"""What can go wrong that a user should read without a traceback."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .measurement import Measurement


class UserError(ValueError):
    """A mistake in a recipe, an option, a marker, a baseline file or the environment.

    The message is complete: it names the file or option, the key and the value, and says what is allowed.
    """


class IncompatibleSettings(UserError):
    """A recipe that breaks documented constraints; the message names each with its reason and the way out."""

    def __init__(self, message: str, ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.ids = ids  # of the constraints, in the catalogue's order

    def __reduce__(self) -> tuple[type[IncompatibleSettings], tuple[str, tuple[str, ...]]]:
        return IncompatibleSettings, (str(self), self.ids)


class MeasurementFailed(RuntimeError):
    """A measurement ended without a result: a worker raised, died or ran out of time."""


class Refused(MeasurementFailed):
    """Megatron Core or PyTorch does not take the recipe's settings; the message is theirs."""


class CannotRunSolo(MeasurementFailed):
    """Solo ranks were asked for, and the recipe's ranks cannot be measured one at a time."""


class NoEffect(MeasurementFailed):
    """A memory setting that was asked for changed nothing on any measured rank."""


class OutOfMemory(MeasurementFailed):
    """The recipe does not fit the device: PyTorch's own `torch.OutOfMemoryError` on at least one rank."""

    measurement: Measurement | None = None  # that failed


TOO_FEW_GPUS = "too few GPUs"


class TooFewGpus(RuntimeError):
    """A measurement needs more GPUs than there are. Such a test is skipped with this message, or fails if asked to."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{TOO_FEW_GPUS}: {why}")


class ParityFailed(AssertionError):
    """The candidate's numbers are not the control's. The message names tensor, kind, precision, error and tolerance."""


class NotOnHost(RuntimeError):
    """A test asks for something that a run on the host does not have. Such a test is skipped with this message."""
