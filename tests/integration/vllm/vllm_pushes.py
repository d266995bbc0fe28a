"""A program: ``weightsync push --engine vllm`` to a real vLLM server on this CPU; prints what was seen as one line of JSON.

``python vllm_pushes.py RANKS DIRECTORY``. A process of its own, as :mod:`vllm_rounds` says why.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
from tests.integration.vllm.vllm_rounds import Server, build, change, expected, serving


def push(directory: Path, url: str, ranks: int, *more: str) -> dict[str, Any]:
    """What the command says, and with which status it ended."""
    from typer.testing import CliRunner

    from weightsync.cli.main import app

    command = ["push", str(directory), "--to", url, "--engine", "vllm", "--backend", "gloo", "--ranks", str(ranks), "--json"]
    done = CliRunner().invoke(app, [*command, "--bucket", "200KB", "--address", "127.0.0.1", *more])
    found: dict[str, Any] = json.loads(done.stdout)["servers"][0]
    return found | {"status": done.exit_code}


def play(ranks: int, directory: Path) -> dict[str, Any]:
    """Three pushes: one that is right, one whose loading fails, one that heals it."""
    model = build(ranks, str(directory / "first"))
    seen: dict[str, Any] = {"pushes": []}
    with serving(str(directory / "first"), ranks, {}) as vllm:
        url = str(vllm.http.base_url)
        for number in (1, 2, 3):
            warm = vllm.generate()[1] if number != 3 else 0  # the prompts are now cached, under the version before
            change(model, number)
            model.save_pretrained(directory / str(number))
            if number == 2:
                vllm.fail_next_load()
            entry = push(directory / str(number), url, ranks, "--label", f"run@{number}") | {"warm": warm}
            entry["label"] = vllm.label()
            entry["paused"] = vllm.http.get("/is_paused").json()["is_paused"]
            if entry["ok"]:
                answers, cached = vllm.generate()
                entry |= {"equal": answers == expected(model), "cached": cached}
            seen["pushes"].append(entry)
        seen["stranger"] = refuse(vllm)
    return seen


def refuse(vllm: Server) -> list[int]:
    """The statuses of requests that are no good: no group, no session."""
    found = []
    for route, body in (
        ("init_weight_transfer_engine", {"init_info": {"master_address": "127.0.0.1"}}),
        ("update_weights", {"update_info": {"digests": {}}}),
    ):
        answer = httpx.post(f"{vllm.http.base_url}/{route}", json=body, trust_env=False)  # vLLM closes connections after errors
        found.append(answer.status_code)
    return found


if __name__ == "__main__":
    here = Path(__file__).resolve()
    places = [str(here.parent), str(here.parents[3]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, places))  # for what vLLM starts
    print("RESULT " + json.dumps(play(int(sys.argv[1]), Path(sys.argv[2]))), flush=True)
