"""Who may use which GPU: a lock file for each of them, held during a measurement.

All processes and users of a machine that have the same temporary folder share these files in it:

    pytest-mbmem-gpus/
      GPU-<uuid>.lock    locked by the process that uses the GPU
      queue.lock         locked for moments, by whoever looks at the other files
      ticket-<n>-<pid>   locked by a process that waits; names the GPUs that it could take

A waiting process leaves to those with lower tickets whatever GPU they name, and takes all it wants at once or none. So
nobody waits with a GPU in hand (no deadlock), and one that wants many GPUs gets them however many come later and want
one (no starvation). The kernel frees the locks of a process that ends in any way; a ticket that nobody has locked is
void.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import UserError
from .nvml import PhysicalGpu

FOLDER = "pytest-mbmem-gpus"
"""Name of the shared folder."""

_QUEUE = "queue.lock"

_POLL = 0.05
"""Seconds between two looks."""

_STUCK = 10.0
"""Seconds after which a process that does not give `queue.lock` back must be stopped, or worse."""

_MARK = b"pytest-mbmem: "
"""How the text in every file of the folder begins."""


@contextlib.contextmanager
def held(gpus: Sequence[PhysicalGpu], count: int, timeout: float) -> Iterator[list[PhysicalGpu]]:
    """Have `count` of the GPUs for oneself until the end, in the order in which they are given.

    Waits as long as other processes have too many of them. Children of this process do not inherit the locks. Not to be
    entered again before it is left.

    Args:
        timeout: seconds to wait.

    Raises `UserError` after `timeout`, naming the processes that have the GPUs, and where the files cannot be used.
    """
    if not 1 <= count <= len(gpus):
        raise ValueError(f"count={count} of {len(gpus)} GPUs")
    with contextlib.ExitStack() as locks:
        try:
            chosen = _wait(_shared_folder(), gpus, count, timeout, locks)
        except OSError as error:
            where = error.filename or Path(tempfile.gettempdir()) / FOLDER
            raise UserError(
                f"--mbmem-gpu: {where}: cannot be used for the locks of GPUs ({error.strerror or error}). Remove it, "
                "or set TMPDIR to a folder for temporary files that all users of the GPUs share"
            ) from None
        yield chosen


def _wait(
    folder: Path, gpus: Sequence[PhysicalGpu], count: int, timeout: float, locks: contextlib.ExitStack
) -> list[PhysicalGpu]:
    """The GPUs, whose locks are in `locks` then."""
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as waiting:
        ticket = None
        while True:
            is_last_try = time.monotonic() >= deadline
            with _locked(folder / _QUEUE) as turn:
                if turn:
                    if ticket is None:
                        ticket = waiting.enter_context(_ticket(folder, gpus))
                    earlier = _earlier(folder, ticket, gpus)
                    if chosen := _take(folder, gpus, count, earlier, locks):
                        return chosen
                    if is_last_try:
                        raise UserError(_too_late(folder, gpus, count, timeout, earlier))
            if not turn and time.monotonic() >= deadline + _STUCK:
                raise UserError(
                    f"--mbmem-gpu: {folder / _QUEUE} is held by {_holder(folder / _QUEUE) or 'another process'}, which "
                    "should give it back at once; end that process"
                )
            time.sleep(_POLL)


def _take(
    folder: Path,
    gpus: Sequence[PhysicalGpu],
    count: int,
    earlier: Mapping[str, str],
    locks: contextlib.ExitStack,
) -> list[PhysicalGpu]:
    """As many GPUs as wanted, or none."""
    with contextlib.ExitStack() as attempt:
        chosen: list[PhysicalGpu] = []
        for gpu in gpus:
            if gpu.uuid not in earlier and attempt.enter_context(_locked(_lock_file(folder, gpu))):
                chosen.append(gpu)
                if len(chosen) == count:
                    locks.enter_context(attempt.pop_all())
                    return chosen
    return []


def _too_late(folder: Path, gpus: Sequence[PhysicalGpu], count: int, timeout: float, earlier: Mapping[str, str]) -> str:
    lines = []
    for gpu in gpus:
        path = _lock_file(folder, gpu)
        if holder := _holder(path):
            lines.append(f"{gpu} is held by {holder} (lock file {path})")
        elif gpu.uuid in earlier:
            lines.append(f"{gpu} is left to {earlier[gpu.uuid]}, which waits for longer")
        else:
            lines.append(f"{gpu} is free")
    return (
        f"--mbmem-gpu: waited {timeout:g} s for {count} of {len(gpus)} GPUs. Let the processes end that have them, or "
        "choose other GPUs with CUDA_VISIBLE_DEVICES:" + "".join(f"\n  {line}" for line in lines)
    )


# --- tickets: only touched by who has queue.lock ----------------------------------------------------------------------


@contextlib.contextmanager
def _ticket(folder: Path, gpus: Sequence[PhysicalGpu]) -> Iterator[int]:
    """The highest number so far."""
    number = max(_tickets(folder), default=0) + 1
    path = folder / f"ticket-{number:09}-{os.getpid()}"
    with _locked(path, *(gpu.uuid for gpu in gpus)):
        try:
            yield number
        finally:
            path.unlink(missing_ok=True)


def _tickets(folder: Path) -> dict[int, Path]:
    found = ((re.fullmatch(r"ticket-([0-9]{9,})-[0-9]+", path.name), path) for path in folder.iterdir())
    return {int(match[1]): path for match, path in found if match}


def _earlier(folder: Path, ticket: int, gpus: Sequence[PhysicalGpu]) -> dict[str, str]:
    """Of these GPUs, those that a process with a lower ticket could take: by UUID, and which process that is."""
    found: dict[str, str] = {}
    for number, path in sorted(_tickets(folder).items()):
        if number >= ticket or all(gpu.uuid in found for gpu in gpus):
            break
        lines = _text_of_locked(path)
        if lines is None:  # of a process that was killed
            with contextlib.suppress(OSError):  # another user's
                path.unlink()
        else:
            found = {**dict.fromkeys(lines[1:], lines[0]), **found}
    return found


# --- files ------------------------------------------------------------------------------------------------------------


def _shared_folder() -> Path:
    """The folder, made where missing: everybody may add files to it, and nobody may remove those of others."""
    folder = Path(tempfile.gettempdir()) / FOLDER
    if not os.path.lexists(folder):
        made = Path(tempfile.mkdtemp(prefix=f"{FOLDER}-", dir=folder.parent))
        try:
            os.close(_open(made / _QUEUE))
            made.chmod(0o1777)
            made.rename(folder)  # complete from the first moment
        except OSError:
            if not os.path.lexists(folder):  # or else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    mode = folder.lstat().st_mode
    if not stat.S_ISDIR(mode) or mode & 0o1777 != 0o1777:
        raise UserError(
            f"--mbmem-gpu: {folder} should be a folder that everybody may write to (drwxrwxrwt) for the locks of GPUs, "
            f"and is {stat.filemode(mode)}. Remove it"
        )
    return folder


def _lock_file(folder: Path, gpu: PhysicalGpu) -> Path:
    return folder / f"{gpu.uuid.replace('/', '_')}.lock"


_descriptors: set[int] = set()
"""Of the files that `_locked` has open."""


def _close_in_child() -> None:
    """A lock lasts until every process has closed the file, so that a fork must do it at once."""
    for descriptor in _descriptors:
        os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def _locked(path: Path, *lines: str) -> Iterator[bool]:
    """Whether nobody else has the file locked, and this process has until the end. The lines are in it meanwhile."""
    descriptor = _open(path)
    _descriptors.add(descriptor)
    has_it = False
    try:
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_it = os.path.samestat(os.fstat(descriptor), path.lstat())  # and nobody removed it since
        if has_it:
            os.ftruncate(descriptor, 0)
            text = "\n".join((f"process {os.getpid()}", *lines))
            os.write(descriptor, _MARK + text.encode() + b"\n")
        yield has_it
    finally:
        if descriptor in _descriptors:  # not in a fork
            _descriptors.discard(descriptor)
            if has_it:
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _open(path: Path) -> int:
    """A descriptor of the file, made where missing; follows no link, and takes no file that something else wrote."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            # Without O_CREAT: Linux refuses that for another user's file in such a folder (fs.protected_regular).
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            try:
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
                os.fchmod(descriptor, 0o666)  # whatever the umask
            except FileExistsError:  # another process was faster
                descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR):
            raise UserError(_foreign(path)) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode) and os.pread(descriptor, len(_MARK), 0) in (b"", _MARK):
        return descriptor
    os.close(descriptor)
    raise UserError(_foreign(path))


def _foreign(path: Path) -> str:
    return f"--mbmem-gpu: {path} is in the way: it is no lock file of pytest-mbmem. Remove it"


def _holder(path: Path) -> str | None:
    """The process that has the file locked, as in "process 42"."""
    lines = _text_of_locked(path)
    return None if lines is None else lines[0]


def _text_of_locked(path: Path) -> list[str] | None:
    """What is in a file that a process has locked, at least one line; None where nobody has."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 2**16, 0).removeprefix(_MARK).decode(errors="replace")
        return text.splitlines() or ["another process"]
    finally:
        os.close(descriptor)
    return None
