"""The commands of `mbmem` that read what test runs left: compare, trend, junit."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cli_files import check_outputs, write
from .errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report.fail_on import Rule
    from .report.trend import Series

_FILES = "what `pytest --mbmem-json`, --mbmem-junit or --junitxml wrote"

_FAIL_ON = 'exit with 1 if a figure is worse by more, as in "allocated:1%%", "reserved:100 MiB", "throughput:5%%"'


def add(commands: Any) -> None:
    """Declare them."""
    compare = commands.add_parser("compare", help="show the figures of two files side by side")
    what = "what `mbmem measure --json` or `pytest --mbmem-json` wrote, or a JUnit file with its figures"
    compare.add_argument("first", type=Path, metavar="A.json", help=what)
    compare.add_argument("second", type=Path, metavar="B.json", help="the same; differences are B's from A's")
    compare.add_argument("--phases", action="store_true", help="show every phase instead of each rank's peaks")
    compare.add_argument("--figures", action="store_true", help="show each test's figures, and which are worse")
    compare.add_argument("--html", type=Path, metavar="FILE", help="write these as a page for a browser")
    compare.add_argument("--markdown", type=Path, metavar="FILE", help="write these as a comment for a pull request")
    compare.add_argument("--fail-on", action="append", default=[], metavar="RULE", help=f'{_FAIL_ON}, or "missing"')
    compare.set_defaults(run=_compare)

    trend = commands.add_parser("trend", help="show the figures of tests over several runs")
    trend.add_argument("files", type=Path, nargs="+", metavar="FILE", help=f"{_FILES}; or a folder of these")
    trend.add_argument("--metric", action="append", default=[], metavar="METRIC", help="show this one (several times)")
    trend.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser")
    trend.add_argument("--markdown", type=Path, metavar="FILE", help="write a table for a comment")
    trend.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    trend.add_argument(
        "--fail-on", action="append", default=[], metavar="RULE", help=f"{_FAIL_ON}, than in the run before"
    )
    trend.set_defaults(run=_trend)

    junit = commands.add_parser("junit", help="merge JUnit files, or add figures to one").add_subparsers(
        required=True, metavar="COMMAND"
    )
    merge = junit.add_parser("merge", help="files of ranks, shards and reruns as one, with each case once")
    merge.add_argument("--out", type=Path, required=True, metavar="FILE", help="write here; may be one of them")
    merge.add_argument("files", type=Path, nargs="+", metavar="FILE.xml")
    merge.add_argument("--same-run", action="store_true", help="all files are of one run: a failure in any counts")
    merge.set_defaults(run=_merge)
    add_to = junit.add_parser("add", help="add the figures of a run to the JUnit file that pytest wrote")
    add_to.add_argument("results", type=Path, metavar="RESULTS.json", help="what `pytest --mbmem-json` wrote")
    add_to.add_argument("junit", type=Path, metavar="PYTEST.xml", help="what `pytest --junitxml` wrote")
    add_to.add_argument("--out", type=Path, metavar="FILE", help="write here (default: PYTEST.xml itself)")
    add_to.set_defaults(run=_add)


def _compare(arguments: argparse.Namespace) -> int:
    from .report import comments, pages
    from .report.compared import Compared, broken_rules
    from .report.run_figures import File
    from .report.two_files import compare_lines, notes

    rules = _rules(arguments.fail_on)
    outputs = {"--html": arguments.html, "--markdown": arguments.markdown}
    check_outputs(outputs, (arguments.first, arguments.second))
    files = File.load(arguments.first), File.load(arguments.second)
    xml = [file.path for file in files if file.is_junit]
    if xml and arguments.phases:
        raise UserError(f"--phases: {xml[0]} is a JUnit file, which has no phases; name a file of --mbmem-json")
    if not xml:
        print("\n".join(compare_lines(*files, every_phase=arguments.phases)))
    if not (xml or rules or arguments.figures or arguments.html or arguments.markdown):
        return 0
    compared = Compared.of(*files)
    broken = broken_rules(compared.rows, rules)
    if xml or rules or arguments.figures:
        print("\n".join([*([] if xml else [""]), *compared.lines(), *broken]))
    if arguments.html is not None:
        write(arguments.html, pages.compare_page(compared))
    if arguments.markdown is not None:
        write(
            arguments.markdown,
            comments.comparison(compared, notes(*files, ("base", "head")), broken if rules else None),
        )
    return 1 if broken else 0


def _trend(arguments: argparse.Namespace) -> int:
    from .report import comments, pages
    from .report.compared import broken_rules, trend_rows
    from .report.fail_on import MISSING
    from .report.run_figures import files_of
    from .report.trend import lines_of, read_series

    rules = _rules(arguments.fail_on)
    if any(rule.metric == MISSING for rule in rules):
        raise UserError(f"--fail-on: {MISSING} is for `mbmem compare`; runs of a trend may have different tests")
    outputs = {"--html": arguments.html, "--markdown": arguments.markdown, "--json": arguments.json}
    check_outputs(outputs, files_of(arguments.files))
    series = read_series(arguments.files)
    if not series:
        raise UserError(f"{', '.join(map(str, arguments.files))}: no test has figures")
    broken = broken_rules(trend_rows(series), rules)
    shown = _chosen(series, arguments.metric)
    print("\n".join([*lines_of(shown), *broken]))
    if arguments.html is not None:
        write(arguments.html, pages.trend_page(shown))
    if arguments.markdown is not None:
        write(arguments.markdown, comments.trend(shown))
    if arguments.json is not None:
        write(arguments.json, json.dumps([dataclasses.asdict(one) for one in shown], indent=1) + "\n")
    return 1 if broken else 0


def _chosen(series: Sequence[Series], metrics: Sequence[str]) -> list[Series]:
    known = dict.fromkeys(one.metric for one in series)
    for metric in metrics:
        if metric not in known:
            raise UserError(f"--metric: no test has a figure {metric!r}; they have {', '.join(known)}")
    return [one for one in series if not metrics or one.metric in metrics]


def _rules(texts: Sequence[str]) -> list[Rule]:
    from .report.fail_on import Rule

    return [Rule.parse(text) for text in texts]


def _merge(arguments: argparse.Namespace) -> int:
    from .report import junit_xml
    from .report.junit_merge import merge

    check_outputs({"--out": arguments.out})
    xml = merge(arguments.files, same_run=arguments.same_run)
    write(arguments.out, junit_xml.text(xml))
    files = "1 file" if len(arguments.files) == 1 else f"{len(arguments.files)} files"
    print(f"cases of {files}: {xml.tests}, failures: {xml.failures}, errors: {xml.errors}")
    return 0


def _add(arguments: argparse.Namespace) -> int:
    from .report import junit_xml
    from .report.junit_add import add

    output = arguments.out or arguments.junit
    check_outputs({"PYTEST.xml" if arguments.out is None else "--out": output}, [arguments.results])
    added = add(arguments.results, arguments.junit)
    write(output, junit_xml.text(added.xml))
    print(f"tests that got their figures: {added.tests}")
    for test in added.without:
        print(f"no case in {arguments.junit}: {test}")
    return 0
