"""What is shipped to run the server with: every metric and flag it names exists."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

from steelyard.cli import serve
from steelyard.cli.server_options import server_config
from steelyard.config import ServerConfig
from steelyard.server.metrics import Metrics

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def exposed() -> dict[str, str]:
    """Kind of each metric on a server's page, by its name in a query."""
    families = text_string_to_metric_families(Metrics().page("m", None, None, None))
    return {family.name + ("_total" if family.type == "counter" else ""): family.type for family in families}


def test_every_metric_on_the_board_is_exposed() -> None:
    board = json.loads((DEPLOY / "grafana" / "steelyard.json").read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    named = {name for expr in expressions for name in re.findall(r"(?:vllm|steelyard):\w+", expr)}
    kinds = exposed()
    assert len(named) > 12
    for name in named:
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert kinds.get(base) == "histogram" if base != name else name in kinds, name
    for expr in expressions:
        assert all(expr.count(a) == expr.count(b) for a, b in ("()", "{}", "[]")), expr


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


def serve_arguments(words: list[str]) -> argparse.Namespace:
    """As `steelyard serve` reads them. Raises SystemExit for a flag it does not know or a value it does not take."""
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile, with continued lines joined."""
    text = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(None, 1)[1]) for line in lines]


def test_the_dockerfile_is_sound_and_its_command_starts_a_server() -> None:
    steps = instructions()
    assert steps[0][0] == "FROM" and re.fullmatch(r"python:3\.1[12]-slim", steps[0][1])
    kinds = {"FROM", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT", "CMD", "ENV", "LABEL"}
    assert {kind for kind, _ in steps} <= kinds
    for kind, rest in steps:
        if kind == "COPY":
            assert all((ROOT / source).exists() for source in rest.split()[:-1]), rest
        if kind == "RUN" and "apt-get" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists/*" in rest
    users = [rest for kind, rest in steps if kind == "USER"]
    assert users[-1:] and users[-1] != "root"
    [command] = [json.loads(rest) for kind, rest in steps if kind == "ENTRYPOINT"]
    assert command[:2] == ["steelyard", "serve"]
    config = server_config(serve_arguments(command[2:]))
    assert (config.host, config.log_format) == ("0.0.0.0", "json")
    assert [rest for kind, rest in steps if kind == "EXPOSE"] == [str(config.port)]


def test_the_kubernetes_example_is_of_one_piece() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = deployment["spec"]["template"]
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    [container] = pod["spec"]["containers"]
    config = server_config(serve_arguments(container["args"]))
    assert config.shutdown_timeout_s < pod["spec"]["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.port}
    assert service["spec"]["ports"][0]["targetPort"] in ports
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "readiness", "liveness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/health",
        "liveness": "/live",
    }
    assert all(probe["port"] in ports for probe in probes.values())
    volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == volumes
    assert config.tenants is not None and config.tenants.startswith(mounts["tenants"])


def test_prometheus_scrapes_the_default_port_where_metrics_are() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    [job] = config["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    assert job["static_configs"] == [{"targets": [f"localhost:{ServerConfig().port}"]}]
