"""The command that repeats one test as it ran, for a shell."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from .texts import printable

if TYPE_CHECKING:
    import pytest

    from .options import Options

_LEFT_OUT = frozenset(
    [
        # which tests run, how many at a time and how often
        *("file_or_dir", "pyargs", "keyword", "markexpr", "deselect", "lf", "failedfirst", "newfirst", "stepwise"),
        *("stepwise_skip", "stepwise_reset", "maxfail", "numprocesses", "maxprocesses", "dist", "tx", "looponfail"),
        *("reruns", "reruns_delay", "only_rerun", "usepdb", "usepdb_cls", "trace"),
        # what is written
        *("basetemp", "xmlpath", "report_log", "htmlpath", "log_file", "debug"),
        *("mbmem_json", "mbmem_html", "mbmem_snapshots", "mbmem_artifacts", "mbmem_update", "mbmem_reason"),
        *("mbmem_junit", "mbmem_earlier", "mbmem_metrics"),
    ]
)

_VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONHASHSEED",
    "PYTHONPATH",
    "PYTEST_ADDOPTS",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD",
    "PYTEST_PLUGINS",
)
_PREFIXES = ("MBMEM_", "NCCL_")


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that can change what a test does or measures."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if (name in _VARIABLES or name.startswith(_PREFIXES)) and value.isprintable()
    }


def script(item: pytest.Item, options: Options, environment: Mapping[str, str]) -> str:
    """A shell script that repeats the test; it hands its own arguments on to pytest."""
    folder = shlex.quote(str(item.config.invocation_params.dir))
    command = ["env", *(f"{name}={value}" for name, value in environment.items()), sys.executable, "-m"]
    lines = ["#!/bin/sh", f"# Repeats {printable(item.nodeid)}, with the options and variables that it ran with."]
    if options.torchrun is not None:
        here = os.environ.get("LOCAL_WORLD_SIZE", str(options.torchrun.world_size))
        command += ["torch.distributed.run", f"--nproc-per-node={here}", "-m"]
        if int(here) < options.torchrun.world_size:
            lines.append(
                "# To be started on each machine, with torchrun's --nnodes and --rdzv-endpoint of the job added."
            )
    command += ["pytest", test_of(item), *arguments(item.config)]
    return "\n".join([*lines, f"cd {folder} || exit", f'exec {shlex.join(command)} "$@"', ""])


def test_of(item: pytest.Item) -> str:
    """What names the test wherever pytest is called. Its node id may begin elsewhere and have a group of xdist's."""
    parent = item.parent.nodeid if item.parent is not None else ""
    return f"{item.path}::" + f"{parent}::{item.name}".partition("::")[2]


def arguments(config: pytest.Config) -> list[str]:
    """The options that pytest was called with, without those that do not change the test itself."""
    parser = config._parser
    given = vars(parser.parse_known_args(config.invocation_params.args, argparse.Namespace()))
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser.optparser._actions:
        if action.option_strings and action.dest not in _LEFT_OUT:
            actions.setdefault(action.dest, []).append(action)
    found = [part for dest, ways in actions.items() for part in _given(ways, given.get(dest))]
    if "randomly_seed" in actions and not any(part.startswith("--randomly-seed") for part in found):
        seed = getattr(config, "workerinput", {}).get("randomly_seed", config.getoption("randomly_seed", None))
        found += [f"--randomly-seed={seed}"] if isinstance(seed, int) else []
    return found


def _given(ways: list[argparse.Action], value: Any) -> Iterator[str]:
    """An option's value as arguments; `ways` are the options that set it."""
    if value is None or value == ways[0].default:
        return
    for way in ways:
        name = max(way.option_strings, key=len)
        if isinstance(way, argparse._CountAction):
            if value > 0:
                yield from [name] * value
                return
        elif way.nargs == 0 or (way.nargs == "?" and value == way.const):
            several = isinstance(value, list) and way.const in value
            if several or value == way.const:
                yield name
        elif way.nargs in (None, "?"):
            for one in value if isinstance(value, list) else [value]:
                yield from ([f"{name}={one}"] if name.startswith("--") else [name, str(one)])
            return
        else:
            yield from (name, *map(str, value))
            return
