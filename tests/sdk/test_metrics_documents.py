"""What is written about the metrics, held to what is exported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prometheus_client.metrics_core import Metric

from motet.sdk.metrics import EngineCollector

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "metrics.md").read_text()
DASHBOARD = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())


def exported() -> dict[str, Metric]:
    """Every family, by the name under which its value is asked for."""
    families = EngineCollector().describe()
    return {family.name + ("_total" if family.type == "counter" else ""): family for family in families}


def values_of(key: str, tree: Any) -> Iterator[str]:
    """All strings under a key, anywhere in a JSON document."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            if name == key and isinstance(value, str):
                yield value
            yield from values_of(key, value)
    elif isinstance(tree, list):
        for value in tree:
            yield from values_of(key, value)


def family_of(name: str) -> str:
    """A sample's family: only a histogram's samples have other names than itself."""
    base = re.sub("_(bucket|sum|count)$", "", name)
    family = exported().get(base)
    return base if family is not None and family.type == "histogram" and base != name else name


def test_the_table_is_what_is_exported():
    rows = re.findall(r"^\| `(motet_\w+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE, re.MULTILINE)
    expected = []
    for name, family in exported().items():
        engine, *labels = family._labelnames
        assert engine == "engine"
        expected.append(
            (name, family.type, ", ".join(f"`{label}`" for label in labels), family.documentation)
        )
    assert rows == expected


def test_the_dashboard_asks_for_what_is_exported_and_leaves_nothing_out():
    queries = [*values_of("expr", DASHBOARD), *values_of("query", DASHBOARD)]
    asked = [name for query in queries for name in re.findall(r"motet_\w+", query)]
    assert {family_of(name) for name in asked} == set(exported())
    histograms = {name for name, family in exported().items() if family.type == "histogram"}
    assert not histograms & set(asked), "a histogram has no sample of its own name"


def test_every_panel_looks_at_the_chosen_engines():
    queries = list(values_of("expr", DASHBOARD))
    assert len(queries) > 30
    for query in queries:
        assert len(re.findall(r"motet_\w+", query)) == query.count('{engine=~"$engine"}')


def test_panels_lie_side_by_side():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == ""
    assert 'motet_tenant_output_tokens_total{engine="chat",tenant="acme"} 8.0' in done.stdout
    assert done.stdout.rstrip().endswith("{'acme': 11, 'umbrella': 11}")
