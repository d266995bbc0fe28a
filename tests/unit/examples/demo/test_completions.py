"""The replica's HTTP interface: OpenAI's shape, clear refusals, versions on every token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from examples.demo.completions import completions_app
from examples.demo.generation import Generator, greedy
from examples.demo.models import build_model
from examples.demo.tokenizer import build_tokenizer, encode
from tests.unit.examples.demo.models import version


@pytest.fixture(scope="module")
def generator_model() -> Generator:
    import torch

    torch.set_num_threads(1)
    return Generator(build_model("qwen2", tied=True, seed=0))


@pytest.fixture
def generator(generator_model: Generator) -> Generator:
    return Generator(generator_model.model)  # a new gate


@pytest.fixture
async def client(generator: Generator) -> AsyncIterator[httpx.AsyncClient]:
    app = completions_app("replica-7", generator, build_tokenizer(0))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://replica") as found,
    ):
        yield found


def seed(generator: Generator, number: int) -> None:
    generator.pause("abort", 5)
    generator.label(version(number))
    generator.resume()


async def test_before_the_first_version_it_refuses(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/completions", json={"prompt": "copy abc ="})
    assert answer.status_code == 503
    assert answer.json()["error"]["type"] == "not_seeded"
    assert "noise" in answer.json()["error"]["message"]
    health = await client.get("/health")
    assert (health.status_code, health.json()) == (503, {"replica": "replica-7", "state": "not seeded", "version": None})


async def test_an_answer_has_openais_fields_and_a_version_for_every_token(client: httpx.AsyncClient, generator: Generator) -> None:
    seed(generator, 3)
    answer = await client.post("/v1/completions", json={"prompt": "copy abc =", "max_tokens": 5, "temperature": 0, "user": "me"})
    assert answer.status_code == 200
    body = answer.json()
    prompt = encode(build_tokenizer(0), "copy abc =")
    tokens = greedy(generator.model, prompt, 5)
    assert body["weightsync"] == {
        "replica": "replica-7", "prompt_tokens": prompt, "tokens": tokens, "token_versions": [3] * 5,
        "token_epochs": [1] * 5, "prefills": [0], "adapter": "",
    }  # fmt: skip
    assert body["object"] == "text_completion"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 5, "total_tokens": len(prompt) + 5}
    other = await client.post("/v1/completions", json={"prompt": "copy abc =", "model": "alice/math@2"})
    assert (other.status_code, other.json()["error"]["type"]) == (404, "model_not_found")
    assert "alice/math@2" in other.json()["error"]["message"]
    again = await client.post("/v1/completions", json={"prompt": prompt + tokens[:2], "max_tokens": 3})
    assert len(again.json()["weightsync"]["tokens"]) == 3
    assert (await client.get("/health")).json() == {"replica": "replica-7", "state": "serving", "version": 3}
    assert (await client.get("/v1/models")).json()["data"][0]["version"] == 3


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"prompt": 5}',
        b'{"prompt": ""}',
        b'{"prompt": []}',
        b'{"prompt": [-1]}',
        b'{"prompt": [100000]}',
        b'{"prompt": "x", "max_tokens": 0}',
        b'{"prompt": "x", "max_tokens": 256}',
        b'{"prompt": "x", "temperature": 0.7}',
        b'{"prompt": "x", "n": 2}',
        b'{"prompt": "x", "stream": true}',
    ],
)
async def test_requests_that_make_no_sense_get_400(client: httpx.AsyncClient, generator: Generator, body: bytes) -> None:
    seed(generator, 1)
    answer = await client.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["message"]


async def test_too_large_a_body_is_not_read_to_its_end(client: httpx.AsyncClient, generator: Generator) -> None:
    seed(generator, 1)
    assert (await client.post("/v1/completions", content=b" " * 100_000)).status_code == 413


async def test_requests_wait_out_a_pause(client: httpx.AsyncClient, generator: Generator) -> None:
    seed(generator, 1)
    generator.pause("wait", 5)
    held = asyncio.create_task(client.post("/v1/completions", json={"prompt": "1+1 =", "max_tokens": 2}))
    await asyncio.wait([held], timeout=0.2)
    assert not held.done()
    assert (await client.get("/health")).json()["state"] == "paused"
    generator.label(version(2))
    generator.resume()
    answer = await asyncio.wait_for(held, 20)
    assert answer.json()["weightsync"]["token_versions"] == [2, 2]
