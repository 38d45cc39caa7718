"""What is shipped to run the server with: every metric and flag it names exists."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from steelyard.cli import serve

ROOT = Path(__file__).parents[2]
DOCUMENTED = set(re.findall(r"^\| `([\w:]+)` \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))


def test_every_metric_on_the_board_is_exposed() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "steelyard.json").read_text())
    named = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for panel in board["panels"]
        for target in panel["targets"]
        for name in re.findall(r"(?:vllm|steelyard):\w+", target["expr"])
    }
    assert len(named) > 12
    assert named <= DOCUMENTED


def test_panels_do_not_overlap_and_have_queries_of_the_chosen_model() -> None:
    board = json.loads((ROOT / "deploy" / "grafana" / "steelyard.json").read_text())
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)
    assert all('model_name="$model"' in t["expr"] for p in board["panels"] for t in p["targets"])


def test_every_flag_in_the_shipped_files_is_a_flag() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    known = set(parser._option_string_actions)
    for name in ("Dockerfile", "kubernetes.yaml"):
        text = (ROOT / "deploy" / name).read_text()
        lines = [line for line in text.splitlines() if not re.match(r"\s*(RUN|&&|# *kubectl|# *docker)", line)]
        flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines))) - {"--no-cache-dir", "--gpus"}
        assert flags
        assert flags <= known, flags - known
