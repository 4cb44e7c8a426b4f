"""What `make demo` runs: the examples on the virtual GPU, then a pull request that costs memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "demo-report.html"


def pytest(*arguments: str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", *arguments]
    print(f"\n$ {' '.join(['pytest', *arguments])}\n", flush=True)
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    print("1. Recipe tests of real Megatron Core models, on a GPU that is not there.")
    # A module stays in one process, where its tests share what they compare.
    parallel = ("-n", "2", "--dist", "loadfile")
    passed = pytest("examples", "--ignore=examples/pull_request", *parallel, f"--mbmem-html={REPORT.name}")
    print("\n2. A pull request that keeps activations alive, against the baseline from before it: this must fail.")
    failed = pytest("examples/pull_request")
    if passed != 0 or failed != 1:
        print(f"\nThe demo did not go as planned: exit codes {passed} (expected 0) and {failed} (expected 1).")
        return 1
    print(
        "\nShown: the examples passed against their baselines, and the pull request was stopped with the figures above."
    )
    print(f"The report of the first run: {REPORT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
