"""What the installed Megatron Core takes: labels of modules to recompute or offload, and names of settings.

They differ between versions, so they are read from the source of its configuration classes; importing it would take
seconds and torch. Labels are the set that a check there subtracts from what it was given (core 0.16 to 0.19).
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

from .errors import UserError


def recompute_labels() -> tuple[str, ...]:
    """What `Memory.recompute_modules` may name, sorted. Raises `UserError` where the installed version hides it."""
    return _allowed("recompute_modules")


def offload_labels() -> tuple[str, ...]:
    """What `Memory.offload_modules` may name, sorted. Raises `UserError` where the installed version hides it."""
    return _allowed("offload_modules")


def setting_names() -> frozenset[str]:
    """The fields of Megatron's configuration classes. Raises `UserError` where it is not installed."""
    core = _config_source().parents[1]
    trees = (ast.parse(core.joinpath(file).read_text(encoding="utf-8")) for file in _CONFIGS if (core / file).is_file())
    return frozenset(
        node.target.id
        for tree in trees
        for made in ast.walk(tree)
        if isinstance(made, ast.ClassDef)
        for node in made.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    )


_CONFIGS = (
    "transformer/transformer_config.py",
    "model_parallel_config.py",
    "distributed/distributed_data_parallel_config.py",
    "optimizer/optimizer_config.py",
)


def _allowed(field: str) -> tuple[str, ...]:
    path = _config_source()
    # The sets of texts that a name stands for, and the line from which on it does.
    sets: list[tuple[int, str, tuple[str, ...]]] = []
    uses: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Set) and isinstance(node.targets[0], ast.Name):
            texts = [e.value for e in node.value.elts if isinstance(e, ast.Constant) and isinstance(e.value, str)]
            sets.append((node.lineno, node.targets[0].id, tuple(sorted(texts))))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and isinstance(node.right, ast.Name):
            fields = {child.attr for child in ast.walk(node.left) if isinstance(child, ast.Attribute)}
            if field in fields:
                uses.append((node.lineno, node.right.id))
    for line, name in uses:
        before = [(at, texts) for at, other, texts in sets if other == name and at < line]
        if before:
            return max(before)[1]
    raise UserError(f"{path}: the labels of {field} are not where megatron-core 0.16 to 0.19 have them")


def _config_source() -> Path:
    spec = importlib.util.find_spec("megatron")  # a namespace package: nothing is imported
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "core/transformer/transformer_config.py")
        if path.is_file():
            return path
    raise UserError("megatron-core is not installed: pip install megatron-core")
