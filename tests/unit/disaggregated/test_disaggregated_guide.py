"""Holds the guide of the disaggregated update to what it says: its server is built, and its routes and options exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
from starlette.routing import Route
from typer.main import get_command

from weightsync.cli.main import app
from weightsync_disaggregated import requests

PAGE = (Path(__file__).resolve().parents[3] / "docs/guides/disaggregated-update.md").read_text()


def _server() -> dict[str, Any]:
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    namespace: dict[str, Any] = {"__name__": "guide"}
    exec(compile(block, "disaggregated-update.md", "exec"), namespace)
    return namespace


async def test_the_guides_server_answers_and_asks_for_its_token() -> None:
    made = _server()
    token = {"Authorization": "Bearer a-long-random-token"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(made["app"]), base_url="http://guide") as client:
        assert (await client.get("/weight_update")).status_code == 401
        state = (await client.get("/weight_update", headers=token)).json()
        assert (state["state"], state["tensors"], state["weight_version"]) == ("serving", 2, None)
        refused = await client.post("/commit_weight_update", headers=token, json={})
        assert (refused.status_code, refused.json()["success"]) == (400, False)


def test_the_guide_lists_every_route() -> None:
    listed = set(re.findall(r"^\| `(/\w+)`", PAGE, re.MULTILINE)) | {"/weight_update"}
    assert listed == {route.path for route in _server()["app"].routes if isinstance(route, Route)}


def test_the_guide_names_fields_that_exist() -> None:
    kinds = (
        requests.InitGroupRequest,
        requests.BeginRequest,
        requests.UpdateRequest,
        requests.CommitRequest,
        requests.DestroyRequest,
    )
    known = {field for kind in kinds for field in kind.__struct_fields__}
    rows = re.findall(r"^\| `/\w+`\*? \| ([^|]*) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)} - {"nccl", "gloo", "null", "flattened_bucket"}
    assert named
    assert named <= known


def test_the_guides_commands_have_the_options_that_they_use() -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    options = {option for parameter in commands["push"].params for option in parameter.opts}
    lines = re.findall(r"^weightsync push (.*)$", PAGE, re.MULTILINE)
    assert len(lines) == 4
    assert {word for line in lines for word in line.split() if word.startswith("--")} <= options
