"""The pages of the documentation, taken apart: blocks of code with what stands before them, links, and prose.

A block of code is in a fence with a language. A comment right before the fence says how the tests treat it (see
test_docs.py); what it may say is in `DIRECTIVES`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIRECTIVES = ("made up", "on the virtual GPU", "on stand-in GPUs", "runs below", "as on", "from", "not run")


@dataclass(frozen=True)
class Block:
    """A block of code of a page."""

    page: str  # as in "docs/ci.md"
    line: int  # of its first line, from 1
    language: str
    directive: str  # one of DIRECTIVES; "" where nothing is said
    argument: str  # behind the directive's colon
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that the first line names, as in "# recipe.yaml"."""
        match = re.match(r"# ([\w./-]+\.\w+)$", self.text.partition("\n")[0])
        return match[1] if match else None

    @cached_property
    def tests(self) -> list[str]:
        """The names of the test functions of a block of Python."""
        defined = (node for node in ast.parse(self.text).body if isinstance(node, ast.FunctionDef))
        return [node.name for node in defined if node.name.startswith("test_")]

    @property
    def commands(self) -> Iterator[tuple[str, list[str]]]:
        """The commands of a console, behind "$ ", each with the lines that are shown below it."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command, *shown = part.splitlines()
            yield command, shown


@dataclass(frozen=True)
class Page:
    """A file in Markdown."""

    path: str

    @cached_property
    def text(self) -> str:
        return (ROOT / self.path).read_text(encoding="utf-8")

    @cached_property
    def blocks(self) -> list[Block]:
        found = []
        directive, opened, lines = "", None, self.text.splitlines()
        for number, line in enumerate(lines, 1):
            if opened is None and line.startswith("```"):
                opened = number
            elif line == "```":
                assert opened is not None, f"{self.path}:{number}: a fence without a language"
                comment = re.fullmatch(r"<!-- (.*) -->", lines[opened - 2])
                directive, _, argument = (comment[1] if comment else "").partition(": ")
                text = "\n".join(lines[opened : number - 1]) + "\n"
                found.append(Block(self.path, opened + 1, lines[opened - 1][3:], directive, argument, text))
                opened = None
        assert opened is None, f"{self.path}:{opened}: a fence that does not end"
        return found

    @cached_property
    def prose(self) -> list[tuple[int, str]]:
        """Number and text of each line outside of the blocks."""
        inside = {n for block in self.blocks for n in range(block.line - 1, block.line + block.text.count("\n") + 1)}
        return [(n, line) for n, line in enumerate(self.text.splitlines(), 1) if n not in inside]

    @cached_property
    def anchors(self) -> set[str]:
        """What a link behind "#" can name: the headings, as GitHub writes them."""
        headings = (re.match(r"#+ (.*)", line) for _, line in self.prose)
        slugs = (re.sub(r"[^\w\- ]", "", heading[1].lower()) for heading in headings if heading)
        return {slug.replace(" ", "-") for slug in slugs}

    @cached_property
    def links(self) -> list[tuple[int, str]]:
        """Line and target of each link that is not to the web."""
        found = [(n, link) for n, line in self.prose for link in re.findall(r"\]\(([^)]+)\)", line)]
        return [(n, link) for n, link in found if not re.match(r"https?:", link)]


PAGES = [Page("README.md"), *(Page(f"docs/{path.name}") for path in sorted((ROOT / "docs").glob("*.md")))]
