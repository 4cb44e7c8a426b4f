"""YAML files as people write them by hand: errors name the line, and a key given twice is one."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import UserError

_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""A number of YAML 1.2 that PyYAML, which knows 1.1, takes as text."""


def read_yaml(path: str | Path) -> tuple[object, dict[str, int]]:
    """The data of a YAML file of one document, and the line of each dotted key.

    Numbers like 1e-4 are numbers, as in YAML 1.2. Raises `UserError` naming file and line for a file that cannot be
    read, for wrong syntax and for a key given twice.
    """
    import yaml

    lines: dict[str, int] = {}
    visited: set[int] = set()  # aliases can make a loop

    def is_number(node: yaml.ScalarNode) -> bool:
        plain_text = node.tag == "tag:yaml.org,2002:str" and not node.style
        return plain_text and _NUMBER.fullmatch(node.value) is not None

    def visit(node: yaml.Node, key: str) -> None:
        if id(node) in visited:
            return
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            first: dict[tuple[str, str], int] = {}
            for name, value in node.value:
                dotted = f"{key}.{name.value}" if key else str(name.value)
                line = name.start_mark.line + 1
                identity = (name.tag, str(name.value))
                if identity in first:
                    raise UserError(f"{path}:{line}: {dotted}: given twice (first on line {first[identity]})")
                first[identity] = line
                lines.setdefault(dotted, line)
                visit(value, dotted)
        elif isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                visit(item, f"{key}.{index}")
        elif isinstance(node, yaml.ScalarNode) and is_number(node):
            node.tag = "tag:yaml.org,2002:float"

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
        if root is None:
            raise UserError(f"{path}: the file is empty")
        visit(root, "")
        return loader.construct_document(root), lines
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise UserError(f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML: {error.problem}") from None
    # PyYAML lets Python's own errors through: bytes that are not UTF-8, dates like 2024-99-99, `!!int ""`, deep nests.
    except (yaml.YAMLError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {error}") from None


def to_yaml(data: object) -> str:
    """Text that `read_yaml` reads back as the same data: what it takes as a number is quoted where it is text."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(f"{_NUMBER.pattern}$"), list("-+0123456789"))
    return yaml.dump(data, Dumper=Dumper, sort_keys=False, allow_unicode=True)
