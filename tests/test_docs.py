"""README and docs: every example does what it says, and everything that is named exists.

What becomes of a block of code is decided by its language:

    python   its tests run, with made-up figures (fake_launcher.py) unless a comment before the block says otherwise.
             The blocks of a page are one file, or from one that names a file ("# test_memory.py") on another
    console  its commands run, in a folder with the files of the page, and print what is shown below them; "..." stands
             for anything in a line, and for any lines where it is one
    yaml     a recipe, GPUs or a pipeline of a CI system are read as what they are; an excerpt of a file is in that file
    ini      pytest reads it
    bash     the shell parses it

and by the comment before it: `made up` with variables for the made-up launcher, `on the virtual GPU`, `on stand-in
GPUs` with their description, `runs below` (in a console alone), `as on` another page, `from` a file, and `not run` with
a reason.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from doc_pages import DIRECTIVES, PAGES, ROOT, Block, Page
from gpu_stand_ins import share_server, stand_ins

from pytest_mbmem import cli, options
from pytest_mbmem.baseline_file import parse
from pytest_mbmem.growth import Growth, GrowthRule, RankGrowth, Trace
from pytest_mbmem.measure import growth_runs, host
from pytest_mbmem.measure.launch import Launcher
from pytest_mbmem.recipe import Recipe
from pytest_mbmem.virtual_gpu.gpus import load_gpus

BLOCKS = [block for page in PAGES for block in page.blocks]
NOT_RUN = {"needs GPUs", "needs containers", "needs a cluster"}
INSTALL = ["pip", "install", "pytest-mbmem"]
FAKE_LAUNCHER = Path(__file__).with_name("fake_launcher.py")
INI = "[pytest]\naddopts = --strict-markers --strict-config -p no:randomly\n"


# Examples -------------------------------------------------------------------------------------------------------------


def test_every_block_has_a_class() -> None:
    for block in BLOCKS:
        assert block.language in ("python", "console", "yaml", "ini", "bash"), f"{block.where}: what is this?"
        assert block.directive in ("", *DIRECTIVES), f"{block.where}: unknown comment before it: {block.directive}"


def test_what_is_not_run_has_one_of_the_known_reasons() -> None:
    reasons = {block.where: block.argument for block in BLOCKS if block.directive == "not run"}
    print(reasons)
    assert set(reasons.values()) == NOT_RUN
    assert all(block.directive == "not run" for block in BLOCKS if block.language == "bash")


class Examples:
    """Runs the blocks of a page in a folder of their own."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, page: Page) -> None:
        self.pytester, self.monkeypatch = pytester, monkeypatch
        self.folder = pytester.path
        self.blocks = [block for block in page.blocks if block.directive not in ("as on", "not run")]
        self.of_file: dict[str, list[Block]] = {}
        file = f"test_{Path(page.path).stem.replace('-', '_')}.py"
        for block in self.blocks:
            if block.language == "python":
                file = block.file or file
                self.of_file.setdefault(file, []).append(block)
        (self.folder / "tox.ini").write_text(INI)
        for file, blocks in self.of_file.items():
            self._write(file, _at_their_lines(blocks))
        for block in self.blocks:
            if block.language == "yaml" and block.file is not None and not block.file.startswith("."):
                self._write(block.file, block.text)

    def _write(self, file: str, text: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def pytest(self, block: Block, arguments: list[str]) -> pytest.RunResult:
        """Run pytest where the block says."""
        conftest = self.folder / "conftest.py"
        conftest.unlink(missing_ok=True)
        with self.monkeypatch.context() as patch:
            for path in self.folder.rglob("test_*.py"):  # tests of this suite may have the same name
                patch.delitem(sys.modules, path.stem, raising=False)
            if block.directive == "on stand-in GPUs":
                stand_ins(patch, **json.loads(block.argument))
            elif block.directive != "on the virtual GPU":
                shutil.copy(FAKE_LAUNCHER, conftest)
                patch.setattr(growth_runs, "measure_growth", nothing_grows)
                for name, value in json.loads(block.argument or "{}").items():
                    patch.setenv(name, value)
                arguments = ["-p", "no:cacheprovider", *arguments]  # where a failure would leave a snapshot
            return self.pytester.runpytest_inprocess(*arguments)

    def run_tests(self) -> None:
        """All tests of all Python blocks: a session for those with made-up figures, and one for the others."""
        python = [(file, block) for file, blocks in self.of_file.items() for block in blocks]
        for directive in ("", "on the virtual GPU"):
            chosen = [(file, block) for file, block in python if block.directive == directive]
            ids = [f"{file}::{test}" for file, block in chosen for test in block.tests]
            if ids:
                result = self.pytest(chosen[0][1], ["--mbmem-update=new", "--mbmem-baselines=of-the-tests", *ids])
                outcomes = result.parseoutcomes()
                outcomes.pop("warnings", None)
                assert set(outcomes) <= {"passed", "xfailed"}, f"{chosen[0][1].page}: {outcomes}"
                assert sum(outcomes.values()) >= len(ids)

    def run_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        """All commands of all consoles, in the order of the page."""
        for block in self.blocks:
            for command, shown in block.commands if block.language == "console" else ():
                printed = self._run(block, shlex.split(command, comments=True), capsys)
                problem = difference(shown, [line.rstrip() for line in printed.splitlines()])
                assert problem is None, f"{block.where}: {command}\n{problem} of:\n{printed}"

    def _run(self, block: Block, words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
        """What a command prints. Fails for a wrong command line."""
        program, *arguments = words
        if program == "pytest":
            for argument in arguments:
                if argument.startswith("examples/"):  # with the baselines that belong to it
                    shutil.copytree(ROOT / argument, self.folder / argument)
                    shutil.copytree(ROOT / "baselines", self.folder / "baselines", dirs_exist_ok=True)
            result = self.pytest(block, arguments)
            assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED), f"{block.where}: {result.ret}"
            return result.stdout.str()
        if program == "mbmem":
            capsys.readouterr()
            status = cli.main(arguments)
            printed = capsys.readouterr()
            assert status in (0, 1), f"{block.where}: {printed.err}"
            return printed.out
        if program == "cat":
            return Path(arguments[0]).read_text(encoding="utf-8")
        if program == "make":
            return _tried(["make", "--dry-run", *arguments], block)
        assert words == INSTALL, f"{block.where}: what is {program}?"
        return ""


def nothing_grows(launcher: object, recipe: object, rule: GrowthRule, ranks: object = (), name: str = "") -> Growth:
    """Stands in for `measure_growth` where figures are made up."""
    return Growth((RankGrowth(0, Trace(resting=(0,) * 6)),), rule.slack, name)


def _at_their_lines(blocks: list[Block]) -> str:
    """A Python file of the blocks, in which each line has the number that it has on the page."""
    text = ""
    for block in blocks:
        text += "\n" * (block.line - 1 - text.count("\n")) + block.text
    return text


def _tried(command: list[str], block: Block) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{block.where}: {done.stderr}"
    return ""


def difference(shown: list[str], printed: list[str]) -> str | None:
    """Which shown line is not printed where it should be; None if all are. Nothing shown stands for anything."""
    position, anywhere = 0, not shown
    for line in shown:
        if line == "...":
            anywhere = True
            continue
        pattern = re.compile(re.escape(line.rstrip()).replace(re.escape("..."), ".*"))
        reach = len(printed) if anywhere else position + 1
        found = next((n for n in range(position, min(reach, len(printed))) if pattern.fullmatch(printed[n])), None)
        if found is None:
            return f"the line {line!r} is not there"
        position, anywhere = found + 1, False
    rest = [] if anywhere else [line for line in printed[position:] if line]
    return f"the line {rest[0]!r} is not shown" if rest else None


@pytest.mark.parametrize(
    ("shown", "printed", "problem"),
    [
        ([], ["a"], None),
        (["a", "...", "d"], ["a", "b", "c", "d"], None),
        (["a ... d"], ["a b c d"], None),
        (["a", "d"], ["a", "b", "d"], "the line 'd' is not there"),
        (["...", "d"], ["a"], "the line 'd' is not there"),
        (["...", "b", "a"], ["a", "b"], "the line 'a' is not there"),
        (["a"], ["a", "", "b"], "the line 'b' is not shown"),
        (["1.5 GiB"], ["125 GiB"], "the line '1.5 GiB' is not there"),
    ],
)
def test_what_is_shown_is_compared_with_what_is_printed(
    shown: list[str], printed: list[str], problem: str | None
) -> None:
    assert difference(shown, printed) == problem


def test_what_is_as_on_another_page_is_there() -> None:
    pages = {page.path: page for page in PAGES}
    for block in BLOCKS:
        if block.directive == "as on":
            assert block.text in [other.text for other in pages[block.argument].blocks], block.where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_what_runs_below_is_run_there(page: Page) -> None:
    commands = [(b.line, command) for b in page.blocks if b.language == "console" for command, _ in b.commands]
    file = ""
    for block in page.blocks:
        file = block.file or file if block.language == "python" else file
        if block.directive == "runs below":
            assert any(line > block.line and file in command.split() for line, command in commands), block.where


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_the_examples_of_a_page_do_what_they_say(
    page: Page,
    real_project: pytest.Pytester,
    launcher: Launcher,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    share_server(monkeypatch, launcher)

    if page.path == "docs/same-numbers.md":
        host_launcher = request.getfixturevalue("host_launcher")
        monkeypatch.setattr(host, "HostLauncher", lambda *, timeout: host_launcher)
        monkeypatch.setattr(host_launcher, "close", lambda: None)  # at the end of a session in there
    examples = Examples(real_project, monkeypatch, page)
    examples.run_commands(capsys)
    examples.run_tests()


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: f"{block.where}"
)
def test_yaml_is_what_it_says(block: Block, tmp_path: Path) -> None:
    data = yaml.safe_load(block.text)
    path = tmp_path / "file.yaml"
    path.write_text(block.text)
    file = block.file or ""
    if block.directive == "from":
        text = (ROOT / block.argument).read_text()
        parse(text, Path(block.argument))
        assert missing(data, yaml.safe_load(text)) == []
    elif file.startswith(".github/workflows/"):
        assert set(data) == {True, "jobs"}  # "on" is true in YAML 1.1
        steps = [step for job in data["jobs"].values() for step in job["steps"]]
        assert all("uses" in step or "run" in step for step in steps)
        check_shell(*(step["run"] for step in steps if "run" in step))
    elif file == ".gitlab-ci.yml":
        check_shell(*("\n".join(job["script"]) for job in data.values()))
    elif "model" in data:
        Recipe.from_yaml(path)
    else:
        assert set(load_gpus(path)) >= set(data)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=lambda block: f"{block.where}")
def test_what_cannot_run_is_at_least_shell(block: Block) -> None:
    check_shell(block.text)


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "ini"], ids=lambda block: f"{block.where}")
def test_pytest_reads_what_is_shown_of_its_configuration(block: Block, pytester: pytest.Pytester) -> None:
    pytester.path.joinpath("pytest.ini").write_text(block.text)
    assert pytester.runpytest_inprocess("--strict-config", "--collect-only").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def check_shell(*scripts: str) -> None:
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def missing(excerpt: Any, whole: Any, where: str = "") -> list[str]:
    """The keys of an excerpt whose values are others in the whole; "..." leaves something out."""
    if not isinstance(excerpt, Mapping):
        return [] if excerpt == whole else [where]
    whole = whole if isinstance(whole, Mapping) else {}
    return [
        problem
        for key, value in excerpt.items()
        if key != "..."
        for problem in (missing(value, whole[key], f"{where}/{key}") if key in whole else [f"{where}/{key}"])
    ]


def test_an_excerpt_is_a_part_of_the_whole() -> None:
    whole = {"a": {"b": 1, "c": 2}}
    assert missing({"a": {"b": 1, "...": "..."}}, whole) == []
    assert missing({"a": {"b": 2, "d": 1}, "e": {"f": 1}}, whole) == ["/a/b", "/a/d", "/e"]


# Names ----------------------------------------------------------------------------------------------------------------


class Declared:
    """Takes the place of pytest's parser: what options and ini keys are declared."""

    def __init__(self) -> None:
        self.options: set[str] = set()
        self.keys: set[str] = set()
        options.add(cast(pytest.Parser, self))

    def getgroup(self, *names: str) -> Declared:
        return self

    def addoption(self, name: str, **settings: object) -> None:
        self.options.add(name)

    def addini(self, name: str, text: str, **settings: object) -> None:
        self.keys.add(name)


def commands() -> dict[str, set[str]]:
    """Each subcommand of `mbmem` (those of a subcommand as "junit merge"), with its options."""

    def below(parser: argparse.ArgumentParser, name: str) -> dict[str, set[str]]:
        found = {name: {option for action in parser._actions for option in action.option_strings}}
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for word, sub in action.choices.items():
                    found |= below(sub, f"{name} {word}".strip())
        return found

    return below(cli._parser(), "")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_options_and_commands_exist(page: Page) -> None:
    declared, known = Declared(), commands()
    assert set(re.findall(r"--mbmem-[a-z-]*[a-z]", page.text)) <= declared.options
    for words in re.findall(r"(?:`|\$ |- |run: )mbmem ([a-z][^`\n]*)", page.text):
        names = [" ".join(words.split()[:number]) for number in (2, 1)]
        name = next((name for name in names if name in known), None)
        assert name is not None, f"{page.path}: mbmem {words}: no such command"
        assert set(re.findall(r"(?<!\S)--[a-z-]+", words)) <= known[name], f"{page.path}: mbmem {words}"


def test_every_option_ini_key_and_command_is_in_the_readme() -> None:
    text, declared = PAGES[0].text, Declared()
    assert {option for option in declared.options if f"`{option}" not in text} == set()
    assert {key for key in declared.keys if f"`{key}`" not in text} == set()
    everywhere = "".join(page.text for page in PAGES)
    assert {name for name in commands() if f"mbmem {name}" not in everywhere} == set()


def test_ini_keys_and_names_in_reports_exist() -> None:
    known = Declared().keys
    sources = "".join(path.read_text() for path in (ROOT / "pytest_mbmem" / "report").glob("*.py"))
    for page in PAGES:
        for name in set(re.findall(r"\bmbmem_([a-z_]*[a-z])", page.text)):
            assert f"mbmem_{name}" in known or f'"{name}' in sources or f'"mbmem_{name}' in sources, (
                f"{page.path}: mbmem_{name}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_links_lead_somewhere(page: Page) -> None:
    pages = {ROOT / other.path: other for other in PAGES}
    for number, link in page.links:
        file, _, anchor = link.partition("#")
        target = (ROOT / page.path).parent / file if file else ROOT / page.path
        assert target.exists(), f"{page.path}:{number}: {link}"
        if anchor:
            assert anchor in pages[target.resolve()].anchors, f"{page.path}:{number}: {link}"


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {link.partition("#")[0] for _, link in PAGES[0].links}
    assert {page.path for page in PAGES[1:]} <= linked


# Form -----------------------------------------------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert PAGES[0].text.count("\n") < 250


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path)
def test_lines_are_short(page: Page) -> None:
    assert [n for n, line in page.prose if len(line) > 120 and not line.startswith(("|", "<!--"))] == []
    assert [block.where for block in page.blocks if block.language != "console" and too_wide(block)] == []


def too_wide(block: Block) -> bool:
    return any(len(line) > 120 for line in block.text.splitlines())


def test_the_readmes_summary_is_that_of_the_published_table() -> None:
    table = next(page.text for page in PAGES if page.path == "docs/virtual-against-real.md")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if re.match(r"\| gpt3\w+ \(", line)]
    for name, column in {"with Transformer Engine": 3, "without it, equivalents for memory": 5}.items():
        errors = sorted(float(row[column].split(" / ")[-1].rstrip("%")) for row in rows)
        median = sorted(map(abs, errors))[len(errors) // 2]
        assert f"| {name} | {errors[0]:+.2f}% | {errors[-1]:+.2f}% | {median:.2f}% |" in PAGES[0].text
    assert f"Of {len(rows)} Megatron-LM runs whose peak memory NVIDIA published" in PAGES[0].text
