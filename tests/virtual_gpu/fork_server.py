"""Runs Python text in forked children of a process that has torch loaded and CUDA untouched.

One JSON request a line on stdin: {"script": ..., "environment": {...}}; one answer a line on stdout: the variable
`result` of the script, or the error it ended in. A child's environment is set before its first CUDA call, as a worker
of a fork server does it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback

import torch

torch.cuda.is_available()  # asks NVML; must leave the children free


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.environ.update(request["environment"])
            scope: dict[str, object] = {"torch": torch}
            try:
                exec(compile(request["script"], "script", "exec"), scope)
                answer = json.dumps({"result": scope["result"]})
            except BaseException:
                answer = json.dumps({"error": traceback.format_exc()})
            with os.fdopen(writer, "w") as pipe:
                pipe.write(answer)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        print(answer or json.dumps({"error": f"the child died (status {status})"}), flush=True)


serve()
