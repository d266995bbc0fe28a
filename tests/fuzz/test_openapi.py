"""The running service answers every request as its own OpenAPI description says: Schemathesis, well-formed and malformed requests.

``/v1/events`` and its like never end, and an order ends when somebody carries it out, so they are asked by tests of their own
(``tests/integration/server/test_service_http.py``, ``test_rollout_mail.py``, ``test_rollout_callbacks.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.integration.server.service_support import engine_hello, joined, trainer_hello

from weightsync.config import ClientSettings, ServerSettings
from weightsync.protocol.messages import Publish
from weightsync.protocol.tokens import bearer
from weightsync.server.app import OPERATIONS
from weightsync.server.server import BackgroundServer
from weightsync_callbacks.broker import RolloutBroker

schemathesis = pytest.importorskip("schemathesis", reason="needs Schemathesis: pip install '.[test]'")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BackgroundServer]:
    """A coordinator with a trainer and a replica, so that a round has something to do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        with BackgroundServer(ServerSettings(port=0, run="run", mounts=("rollouts",))) as server:
            found = ClientSettings(coordinator=server.address)
            with joined(found, engine_hello("a")), joined(found, trainer_hello()) as trainer:
                trainer.link.call(Publish(1), 20)
                yield server


@pytest.fixture(scope="module")
def api(server: BackgroundServer) -> Any:
    """The description, as the service gives it."""
    headers = bearer(server.secrets.operator)
    described = httpx.get(f"{server.url}/v1/openapi.json", headers=headers, trust_env=False).json()
    schema = schemathesis.openapi.from_dict(described)
    schema.config.update(base_url=server.url)
    schema.config.checks.negative_data_rejection.expected_statuses.append("413")  # a body too large is refused before it is parsed
    return schema.exclude(path=list(LASTING))


# The agents' threads in this process use `random` while a strategy draws, which Hypothesis takes for the strategy's doing.
pytestmark = pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisDeprecationWarning")
LASTING = ("/v1/events", *RolloutBroker.lasting)
PATHS = [(one.method, one.path) for one in (*OPERATIONS, *RolloutBroker.operations) if one.path not in LASTING]
PUBLIC = ("/", "/healthz", "/v1/challenge")
several = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(*one, "POSITIVE") for one in PATHS] + [(*one, "NEGATIVE") for one in PATHS if one[1] not in PUBLIC],  # nothing to be wrong
)
@several
@given(data=st.data())
def test_every_answer_is_as_described(
    api: Any, server: BackgroundServer, method: str, path: str, mode: str, data: st.DataObject
) -> None:
    case = data.draw(api[path][method].as_strategy(generation_mode=schemathesis.GenerationMode[mode]))
    if mode == "POSITIVE" and path.endswith("/acknowledge") and isinstance(case.body, dict):
        case.body = {**case.body, "upto": int(case.body["upto"])}  # to JSON Schema 7.0 is an integer, to most parsers it is not
    case.call_and_validate(headers=bearer(server.secrets.operator))


@pytest.mark.parametrize(("method", "path"), PATHS)
@several
@given(data=st.data())
def test_nothing_is_answered_without_the_token(api: Any, method: str, path: str, data: st.DataObject) -> None:
    case = data.draw(api[path][method].as_strategy())
    case.headers = {name: value for name, value in (case.headers or {}).items() if name.lower() != "authorization"}
    status = case.call().status_code
    assert status in ((200, 400, 405) if path in PUBLIC else (400, 401)), case.as_curl_command()


def test_a_number_in_a_path_that_is_none(server: BackgroundServer) -> None:
    """Of more digits than Python's ``int`` takes, and in a script that it takes and we do not mean."""
    headers = {"Authorization": f"Bearer {server.token}"}
    for path in ("completions", "orders"):
        for number in ("9" * 25, "9" * 5000, "%D9%A3"):
            answer = httpx.get(f"{server.url}/v1/rollouts/{path}/{number}", headers=headers, trust_env=False)
            assert answer.status_code in (400, 403, 404), (number[:30], answer.text)  # 403: it follows no mailbox
