"""Which revision of the code is under test."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_OF_CI = ("GITHUB_SHA", "CI_COMMIT_SHA")
"""Set by GitHub Actions and by GitLab CI."""


def revision_of(folder: Path) -> str:
    """As the CI names it, or git's HEAD of the folder; empty where neither knows."""
    for variable in _OF_CI:
        if os.environ.get(variable):
            return os.environ[variable]
    command = ["git", "-C", str(folder), "rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return ended.stdout.strip() if ended.returncode == 0 else ""
