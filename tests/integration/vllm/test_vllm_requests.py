"""vLLM's own HTTP application, without an engine: the versions that requests name are checked around it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]


def test_vllms_own_application_checks_the_versions_that_requests_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    from vllm.entrypoints.launchers import app as launcher
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from weightsync.engines.vllm.versioned_server import add_to_servers

    for module in (launcher, entry):
        monkeypatch.setattr(module, "build_app", launcher.build_app)  # and put back after the test
    plain = launcher.build_app
    add_to_servers()
    wrapped = launcher.build_app, entry.build_app
    add_to_servers()
    assert (launcher.build_app, entry.build_app) == wrapped
    assert all(build.__wrapped__ is plain for build in wrapped)
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    app: Any = entry.build_app(arguments, ("generate",), None)

    async def ask() -> list[tuple[int, str | None]]:
        chosen = SimpleNamespace(weight_transfer_config=SimpleNamespace(backend="weightsync"))
        loras = SimpleNamespace(live={"alice/math@2": None, "alice/math@10": None})
        app.state.engine_client = SimpleNamespace(_weightsync_label="run@3", vllm_config=chosen, _weightsync_loras=loras)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://vllm") as http:
            answers = [
                await http.get("/health/weights"),
                await http.get("/version", headers={"X-Weightsync-Min-Version": "run@3"}),
                await http.get("/version", headers={"X-Weightsync-Min-Version": "run@4"}),
                await http.get("/version", headers={"X-Weightsync-Version": "alice/math@10"}),
                await http.get("/version", headers={"X-Weightsync-Version": "alice/math@2"}),
            ]
            app.state.engine_client._weightsync_label = None
            answers.append(await http.get("/health/weights"))
            chosen.weight_transfer_config = None  # a vLLM that does not use weightsync is as it was
            answers.append(await http.get("/health/weights"))
        return [(answer.status_code, answer.headers.get("X-Weightsync-Version")) for answer in answers]

    assert asyncio.run(ask()) == [
        *[(200, "run@3"), (200, "run@3"), (409, "run@3")],
        *[(200, "run@3"), (409, "run@3"), (503, None), (404, None)],
    ]
