"""What can go wrong that a user should read without a traceback."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in a recipe, an option, a marker, a baseline file or the environment.

    The message is complete: it names the file or option, the key and the value, and says what is allowed.
    """


class MeasurementFailed(RuntimeError):
    """A measurement ended without a result: a worker raised, died or ran out of time."""


class OutOfMemory(MeasurementFailed):
    """The recipe does not fit the device: PyTorch's own `torch.OutOfMemoryError` on at least one rank."""
