"""A driver built once, and processes on it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pytest_mbmem.errors import UserError
from pytest_mbmem.virtual_gpu import environment
from pytest_mbmem.virtual_gpu.build import Driver, ensure_driver, find_torch
from pytest_mbmem.virtual_gpu.gpus import load_gpus

Run = Callable[..., Any]

# what a developer's shell may have set, and what would change the figures
NOT_INHERITED = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG", "LD_PRELOAD")


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    try:
        find_torch()
    except UserError as error:
        pytest.skip(str(error))
    return ensure_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture(scope="session")
def on_gpu(driver: Driver) -> Iterator[Run]:
    """on_gpu(script, gpu="h100-80gb", count=1, **environment): the script's `result`, from a process on that GPU.

    The script finds `torch` imported. The environment's variables are set in a forked child, after the import.
    """
    with server(driver) as run:
        yield run


@pytest.fixture
def on_gpu_from_start(driver: Driver) -> Callable[..., contextlib.AbstractContextManager[Run]]:
    """with on_gpu_from_start(**environment) as on_gpu: the variables are set before torch is imported."""
    return functools.partial(server, driver)


@contextlib.contextmanager
def server(driver: Driver, **environment_of_server: str) -> Iterator[Run]:
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
        env={
            **{k: v for k, v in os.environ.items() if k not in NOT_INHERITED},
            **driver.environment,
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            **environment_of_server,
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    gpus = load_gpus()

    def run(script: str, gpu: str = "h100-80gb", count: int = 1, **extra: str) -> Any:
        assert process.stdin is not None
        assert process.stdout is not None
        request = {"script": textwrap.dedent(script), "environment": {**environment(gpus[gpu], count), **extra}}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        answer = json.loads(process.stdout.readline())
        if "error" in answer:
            pytest.fail(answer["error"])
        return answer["result"]

    yield run
    process.communicate(timeout=60)  # ends its input
    assert process.returncode == 0
