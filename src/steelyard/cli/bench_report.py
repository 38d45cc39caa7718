"""`steelyard bench report`: saved runs side by side, as one page, Markdown and CSV. Measures nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from steelyard.cli.values import old_file
from steelyard.errors import InvalidRequest, reason


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reports", nargs="+", type=old_file, metavar="REPORT", help="JSON files of `bench serve`")
    parser.add_argument("--title", default="", help="of the page (default: the first run's name)")
    parser.add_argument("--out", type=Path, default=Path("report.html"), metavar="FILE", help="its .md and .csv beside")


def run(args: argparse.Namespace) -> int:
    """Write the three files. Raises InvalidRequest naming a file that is no report."""
    from steelyard.bench.export import compare_markdown, to_csv, to_markdown
    from steelyard.bench.session import SCHEMA
    from steelyard.cli.bench_page import page

    reports = []
    for path in args.reports:
        try:
            report = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{path}: cannot be read as JSON ({reason(error)})", param="reports") from error
        if not isinstance(report, dict) or report.get("schema") != SCHEMA:
            raise InvalidRequest(f"{path}: is no report of `steelyard bench serve`", param="reports")
        reports.append(report)
    side_by_side = compare_markdown(reports) if len(reports) > 1 else ""
    texts = {
        ".html": page(reports, args.title),
        ".md": "\n".join([side_by_side, *(to_markdown(r) for r in reports)]),
        ".csv": to_csv(reports),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for suffix, text in texts.items():
        path = args.out.with_suffix(suffix)
        path.write_text(text)
        print(f"wrote {path}")
    return 0
