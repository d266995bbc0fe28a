"""The alert rules, the scrape configuration and the dashboard: what they name exists, and Prometheus accepts them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools import reference

from weightsync.coordinator.status import Gauges
from weightsync.server.metrics import COORDINATOR_METRICS, CoordinatorMetrics

CONTRIB = Path(__file__).resolve().parents[3] / "contrib"
RULES, SCRAPES, DASHBOARD = (
    CONTRIB / "prometheus/alerts.yml",
    CONTRIB / "prometheus/prometheus.yml",
    CONTRIB / "grafana/dashboard.json",
)


def expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield from (target["expr"] for target in panel["targets"])


@pytest.mark.parametrize("path", [RULES, DASHBOARD], ids=lambda path: path.name)
def test_every_metric_that_is_used_exists(path: Path) -> None:
    names = set(re.findall(r"weightsync_[a-z_]+", path.read_text()))
    assert len(names) > 5
    assert names <= reference.exposed_names(), names - reference.exposed_names()


def test_the_dashboard_shows_every_kind_of_metric_and_reads_one_source() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {panel["datasource"]["uid"] for panel in panels} == {"${datasource}"}
    shown = " ".join(expressions(panels))
    left_out = [m.name for m in COORDINATOR_METRICS if f"weightsync_{m.name}" not in shown]
    assert {name for name in left_out if not name.endswith("_info")} == {
        "published_epoch", "trainer_ranks", "replica_state", "replica_state_since_timestamp_seconds",
        "round_running", "router_settled",
    }  # fmt: skip


def promtool(*arguments: str, text: str | None = None) -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=30, check=False, input=text)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_prometheus_accepts_the_rules() -> None:
    assert "SUCCESS: 12 rules found" in promtool("check", "rules", str(RULES))


def test_prometheus_accepts_the_scrape_configuration(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    (tmp_path / "alerts.yml").write_text(RULES.read_text())
    config = tmp_path / "prometheus.yml"
    config.write_text(
        SCRAPES.read_text().replace("credentials_file: /run/secrets/weightsync-metrics", f"credentials_file: {token}")
    )
    assert "SUCCESS" in promtool("check", "config", str(config))


def test_prometheus_accepts_what_the_dashboard_asks(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "5m").replace("$job", "weightsync")}
        for number, expression in enumerate(expressions(json.loads(DASHBOARD.read_text())["panels"]))
    ]
    path = tmp_path / "rules.json"  # JSON is YAML
    path.write_text(json.dumps({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", str(path))


def test_prometheus_accepts_what_a_coordinator_exposes() -> None:
    promtool("check", "metrics", text=CoordinatorMetrics().text(Gauges("run", 4, False, (), 1, 0, ())).decode())
