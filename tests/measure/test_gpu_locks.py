"""Several processes share GPUs by lock files: no two at a time, first come first served, whatever ends them."""

from __future__ import annotations

import itertools
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.gpu_locks import FOLDER, held
from pytest_mbmem.measure.nvml import PhysicalGpu

PATIENCE = 120.0
"""Seconds until a test that hangs is given up; decides nothing else."""

PROGRAM = """\
import os, signal, subprocess, sys, time
from pytest_mbmem.errors import UserError
from pytest_mbmem.measure.gpu_locks import held
from pytest_mbmem.measure.nvml import PhysicalGpu

def gpus(indices):
    return [PhysicalGpu(int(i), f"GPU-{i}", "NVIDIA L4", 24 * 2**30, (8, 9), False) for i in indices.split(",")]

def say(text):
    os.write(log, f"{name} {text}\\n".encode())  # at the end, in one piece

name, indices, count, log = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
"""

HOLD = """
with held(gpus(indices), count, 1000) as mine:
    say("has " + ",".join(str(gpu.index) for gpu in mine))
    print("has", flush=True)
    sys.stdin.readline()
    say("gives back " + ",".join(str(gpu.index) for gpu in mine))
print("done", flush=True)
sys.stdin.readline()
"""


def gpu(index: int) -> PhysicalGpu:
    return PhysicalGpu(index, f"GPU-{index}", "NVIDIA L4", 24 * 2**30, (8, 9), False)


class Shared:
    """Processes that share a temporary folder, and a log of what they had in which order."""

    def __init__(self, folder: Path) -> None:
        self.temporary, self.log = folder / "temporary", folder / "log"
        self.temporary.mkdir()
        self.folder = self.temporary / FOLDER
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.watches: list[threading.Timer] = []  # that end processes of a test that hangs

    def start(self, name: str, indices: str, count: int, body: str = HOLD) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM + body, name, indices, str(count), str(self.log)],
            env={**os.environ, "TMPDIR": str(self.temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes[name] = process
        self.watches.append(threading.Timer(PATIENCE, process.kill))
        self.watches[-1].start()
        return process

    def hold(self, name: str, indices: str, count: int, body: str = HOLD) -> subprocess.Popen[str]:
        """Start a process that need not wait."""
        process = self.start(name, indices, count, body)
        self.expect(process, "has")
        return process

    def queue(self, name: str, indices: str, count: int) -> subprocess.Popen[str]:
        """Start a process that must wait, and does."""
        process = self.start(name, indices, count)
        until(lambda: any(self.folder.glob(f"ticket-*-{process.pid}")))
        return process

    def expect(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{line}\n"

    def give_back(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        self.expect(process, "done")

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()


def until(condition: Callable[[], bool]) -> None:
    given_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < given_up
        time.sleep(0.01)


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shared]:
    shared = Shared(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(shared.temporary))  # for this process
    yield shared
    for watch in shared.watches:
        watch.cancel()
    for process in shared.processes.values():
        process.kill()
        process.communicate()


def test_gpus_come_in_the_given_order_and_the_next_process_gets_the_rest(shared: Shared) -> None:
    shared.hold("first", "3,1,2,0", 2)
    shared.hold("second", "0,1,2,3", 2)
    assert shared.lines == ["first has 3,1", "second has 0,2"]


def test_gpus_are_free_again_at_the_end(shared: Shared) -> None:
    for _ in range(2):
        with held([gpu(0), gpu(1)], 2, 0) as mine:
            assert mine == [gpu(0), gpu(1)]
    with pytest.raises(KeyError), held([gpu(0)], 1, 0):
        raise KeyError
    with held([gpu(0)], 1, 0):
        pass


def test_an_error_of_the_measurement_stays_what_it_is(shared: Shared) -> None:
    with pytest.raises(FileNotFoundError, match="its own"), held([gpu(0)], 1, 0):
        raise FileNotFoundError("its own")


def test_nobody_can_have_more_gpus_than_there_are(shared: Shared) -> None:
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"count={count} of 2 GPUs"), held([gpu(0), gpu(1)], count, 0):
            pass


def test_many_processes_never_share_a_gpu_and_all_get_their_turns(shared: Shared) -> None:
    body = """
for _ in range(5):
    with held(gpus(indices), count, 1000) as mine:
        say("has " + ",".join(str(gpu.index) for gpu in mine))
        time.sleep(0.002)
        say("gives back " + ",".join(str(gpu.index) for gpu in mine))
"""
    processes = [shared.start(f"p{n}", ["0,1", "1,0", "1,2"][n % 3], 1 + n % 2, body) for n in range(8)]
    assert [process.wait(PATIENCE) for process in processes] == [0] * 8
    owner: dict[str, str] = {}
    turns = 0
    for line in shared.lines:
        name, what, *_, indices = line.split()
        for index in indices.split(","):
            if what == "has":
                assert index not in owner, line
                owner[index] = name
            else:
                assert owner.pop(index) == name
        turns += what == "has"
    assert (owner, turns) == ({}, 8 * 5)
    assert sorted(path.name for path in shared.folder.iterdir()) == [
        *(f"GPU-{index}.lock" for index in range(3)),
        "queue.lock",
    ]


def test_who_wants_two_gpus_is_not_passed_by_those_who_come_later_and_want_one(shared: Shared) -> None:
    holder = shared.hold("holder", "0,1", 1)
    two = shared.queue("two", "0,1", 2)
    ones = [shared.queue(f"one-{n}", "0,1", 1) for n in range(3)]  # GPU 1 is free all the time
    assert shared.lines == ["holder has 0"]
    shared.give_back(holder)
    shared.expect(two, "has")
    shared.give_back(two)
    for one in ones[:2]:
        shared.expect(one, "has")
    shared.give_back(ones[0])
    shared.expect(ones[2], "has")
    has = [line for line in shared.lines if " has " in line]
    assert has[:2] == ["holder has 0", "two has 0,1"]
    # The first two find a free GPU each at the same moment, so that either may be the first to say so.
    assert {line.split()[0] for line in has[2:4]} == {"one-0", "one-1"}
    assert [line.split()[0] for line in has[4:]] == ["one-2"]


def test_sets_of_gpus_that_overlap(shared: Shared) -> None:
    holder = shared.hold("holder", "0", 1)
    both = shared.queue("both", "0,1", 2)
    shared.hold("elsewhere", "2,3", 2)
    shared.hold("around", "1,4", 1)  # leaves GPU 1 to the one who waits for it
    behind = shared.queue("behind", "1", 1)
    shared.give_back(holder)
    shared.expect(both, "has")
    shared.give_back(both)
    shared.expect(behind, "has")
    assert [line for line in shared.lines if " has " in line] == [
        "holder has 0",
        "elsewhere has 2,3",
        "around has 4",
        "both has 0,1",
        "behind has 1",
    ]


def test_the_gpus_of_a_killed_process_are_free(shared: Shared) -> None:
    holder = shared.hold("holder", "0,1", 2)
    waiting = shared.queue("waiting", "0,1", 2)
    holder.kill()
    shared.expect(waiting, "has")
    assert shared.lines == ["holder has 0,1", "waiting has 0,1"]


def test_a_killed_process_keeps_no_place_in_the_queue(shared: Shared) -> None:
    holder = shared.hold("holder", "0,1", 1)
    killed = shared.queue("killed", "0,1", 2)
    waiting = shared.queue("waiting", "0,1", 1)
    killed.kill()
    shared.expect(waiting, "has")
    shared.give_back(holder)
    assert not list(shared.folder.glob("ticket-*"))


@pytest.mark.parametrize(
    "child",
    [
        "child = os.fork()\n    child or time.sleep(1000)",
        "child = subprocess.Popen(['sleep', '1000'], close_fds=False).pid",
    ],
    ids=["fork", "exec"],
)
@pytest.mark.parametrize("end", ["gives back", "is killed"])
def test_children_do_not_inherit_the_locks(shared: Shared, child: str, end: str) -> None:
    body = f"""
with held(gpus(indices), count, 1000):
    {child}
    print("has", flush=True)
    print(child, flush=True)
    sys.stdin.readline()
print("done", flush=True)
sys.stdin.readline()
"""
    holder = shared.hold("holder", "0", 1, body)
    assert holder.stdout is not None
    pid = int(holder.stdout.readline())
    try:
        if end == "is killed":
            holder.kill()
            holder.wait(PATIENCE)
        else:
            shared.give_back(holder)
        with held([gpu(0)], 1, PATIENCE):
            os.kill(pid, 0)  # the child still runs
    finally:
        os.kill(pid, 9)


def test_a_fork_that_leaves_the_block_gives_nothing_back(shared: Shared, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("the fork's own")
    body = f"""
with held(gpus(indices), count, 1000):
    child = os.fork()
    if child == 0:  # under the numbers of what it does not inherit
        opened = [os.open({str(other)!r}, os.O_RDWR) for _ in range(4)]
    else:
        print("has" if os.waitpid(child, 0)[1] == 0 else "the fork failed", flush=True)
        sys.stdin.readline()
if child == 0:
    os._exit([os.pread(file, 100, 0) for file in opened] != 4 * [b"the fork's own"])
"""
    process = shared.hold("holder", "0", 1, body)
    with pytest.raises(UserError, match=f"is held by process {process.pid} "), held([gpu(0)], 1, 0):
        pass


def test_waiting_too_long_names_gpu_process_and_file(shared: Shared) -> None:
    holder = shared.hold("holder", "0", 1)
    waiting = shared.queue("waiting", "0,1", 2)
    with pytest.raises(UserError) as raised, held([gpu(0), gpu(1), gpu(2)], 2, 0):
        pass
    assert str(raised.value).splitlines() == [
        "--mbmem-gpu: waited 0 s for 2 of 3 GPUs. Let the processes end that have them, or choose other GPUs with "
        "CUDA_VISIBLE_DEVICES:",
        f"  GPU 0: NVIDIA L4 (GPU-0) is held by process {holder.pid} (lock file {shared.folder}/GPU-0.lock)",
        f"  GPU 1: NVIDIA L4 (GPU-1) is left to process {waiting.pid}, which waits for longer",
        "  GPU 2: NVIDIA L4 (GPU-2) is free",
    ]
    assert [path.name for path in shared.folder.glob("ticket-*")] == [f"ticket-000000001-{waiting.pid}"]


def test_the_folder_is_for_all_users_whatever_the_umask(shared: Shared) -> None:
    umask = os.umask(0o077)
    try:
        with held([gpu(0)], 1, 0):
            modes = {path.name: stat.filemode(path.stat().st_mode) for path in shared.folder.iterdir()}
    finally:
        os.umask(umask)
    assert stat.filemode(shared.folder.stat().st_mode) == "drwxrwxrwt"
    assert modes == {"queue.lock": "-rw-rw-rw-", "GPU-0.lock": "-rw-rw-rw-"}
    assert list(shared.temporary.iterdir()) == [shared.folder]


def test_a_mig_device_of_an_old_driver_has_a_lock_file_too(shared: Shared) -> None:
    mig = PhysicalGpu(0, "MIG-GPU-5f0b/1/0", "NVIDIA A100 MIG 1g.5gb", 5 * 2**30, (8, 0), True)
    with held([mig], 1, 0), pytest.raises(UserError, match=r"/MIG-GPU-5f0b_1_0\.lock\)"), held([mig], 1, 0):
        pass


def _link(path: Path, elsewhere: Path) -> None:
    elsewhere.write_text("")
    path.symlink_to(elsewhere)


@pytest.mark.parametrize("name", ["GPU-0.lock", "queue.lock"])
@pytest.mark.parametrize(
    "put",
    [
        _link,
        lambda path, elsewhere: path.symlink_to(elsewhere),
        lambda path, elsewhere: path.write_text("a user's file"),
        lambda path, elsewhere: path.mkdir(),
        lambda path, elsewhere: os.mkfifo(path),
    ],
    ids=["link", "dangling link", "file", "folder", "pipe"],
)
def test_what_is_in_the_way_of_a_file_is_left_alone(
    shared: Shared, tmp_path: Path, name: str, put: Callable[[Path, Path], None]
) -> None:
    with held([gpu(1)], 1, 0):
        pass
    path = shared.folder / name
    path.unlink(missing_ok=True)
    put(path, tmp_path / "elsewhere")
    before = path.lstat()
    with pytest.raises(UserError) as raised, held([gpu(0)], 1, 0):
        pass
    assert str(raised.value) == (f"--mbmem-gpu: {path} is in the way: it is no lock file of pytest-mbmem. Remove it")
    assert (path.lstat().st_ino, path.lstat().st_size) == (before.st_ino, before.st_size)
    elsewhere = tmp_path / "elsewhere"
    assert not elsewhere.exists() or elsewhere.read_text() == ""


@pytest.mark.parametrize(
    ("put", "mode"),
    [
        (lambda path: path.symlink_to(path.parent), "lrwxrwxrwx"),
        (lambda path: path.touch(0o644), "-rw-r--r--"),
        (lambda path: path.mkdir(0o755), "drwxr-xr-x"),
    ],
    ids=["link", "file", "folder of one user"],
)
def test_what_is_in_the_way_of_the_folder_is_left_alone(shared: Shared, put: Callable[[Path], None], mode: str) -> None:
    put(shared.folder)
    with pytest.raises(UserError) as raised, held([gpu(0)], 1, 0):
        pass
    assert str(raised.value) == (
        f"--mbmem-gpu: {shared.folder} should be a folder that everybody may write to (drwxrwxrwt) for the locks of "
        f"GPUs, and is {mode}. Remove it"
    )
    assert list(shared.temporary.iterdir()) == [shared.folder]


def test_a_temporary_folder_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(UserError) as raised, held([gpu(0)], 1, 0):
        pass
    assert str(raised.value).startswith(f"--mbmem-gpu: {tmp_path}/missing/{FOLDER}")
    assert "cannot be used for the locks of GPUs (No such file or directory). Remove it, or set TMPDIR" in str(
        raised.value
    )


def test_a_lock_file_that_was_removed_is_made_anew(shared: Shared) -> None:
    with held([gpu(0)], 1, 0):
        pass
    for path in shared.folder.iterdir():
        path.unlink()
    with held([gpu(0)], 1, 0), pytest.raises(UserError, match="held by process"), held([gpu(0)], 1, 0):
        pass


def test_the_text_of_a_killed_holder_is_replaced(shared: Shared) -> None:
    holder = shared.hold("holder", "0", 1)
    holder.kill()
    holder.wait(PATIENCE)
    file = shared.folder / "GPU-0.lock"
    assert file.read_text() == f"pytest-mbmem: process {holder.pid}\n"
    file.write_text(f"pytest-mbmem: process {2**40}\n")
    with held([gpu(0)], 1, 0):
        assert file.read_text() == f"pytest-mbmem: process {os.getpid()}\n"
    assert file.read_text() == ""


def test_tickets_count_on_from_the_highest_one(shared: Shared) -> None:
    shared.hold("holder", "0", 1)
    waiting = [shared.queue(f"waiting-{n}", "0", 1) for n in range(3)]
    numbers = {path.name for path in shared.folder.glob("ticket-*")}
    assert numbers == {f"ticket-{n:09}-{process.pid}" for n, process in zip(itertools.count(1), waiting, strict=False)}
