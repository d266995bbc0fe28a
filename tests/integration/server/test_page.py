"""The status page in a real browser: the link that ``weightsync token`` prints logs in, and leaves the token in no address."""

from __future__ import annotations

import copy
import json
import re
import secrets
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.integration.server.browser import Page, browser, check_accessibility, check_width, page
from tests.integration.server.service_support import RawAgent, engine_hello, free_port, joined, trainer_hello
from tests.integration.server.test_service_theft import Squatter, http
from tests.integration.server.test_sight import SlowAdapter, publish
from tools.screenshots import ADDRESS, DATA, answers

from weightsync.config import ClientSettings, Secret, ServerSettings
from weightsync.model import Manifest, TensorSpec
from weightsync.protocol.messages import Publish
from weightsync.protocol.tokens import login_url
from weightsync.server.page import HTML
from weightsync.server.server import BackgroundServer

__all__ = ["browser", "page"]

pytestmark = pytest.mark.timeout(180)


def text_with(page: Page, words: str | re.Pattern[str]) -> str:
    """The page's text once it contains ``words``."""
    page.get_by_text(words).first.wait_for()
    return str(page.inner_text("body"))


def test_the_link_logs_in_and_the_page_follows_what_happens(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        page.goto(server.url)
        assert "weightsync token" in text_with(page, "This coordinator needs its token.")
        check_accessibility(page)
        page.goto(login_url(server.address, Secret(server.token)))  # in the same tab: only the fragment changes
        assert "nothing published yet" in text_with(page, "run run")
        assert page.inner_text("#chip") == "waiting for replicas"
        assert "needs its token" not in page.inner_text("body")
        assert server.token not in page.evaluate("location.href + JSON.stringify(history.state)")
        settings = ClientSettings(coordinator=server.address)
        with joined(settings, engine_hello("mine-0")), joined(settings, trainer_hello()) as trainer:
            trainer.link.call(Publish(3), 20)
            shown = text_with(page, "16 B")
            assert re.search(r"mine-0\s+serving\s+3\s+0\s+\d+ s\s+\S+\s+\S+ m?s\s+1/1\s+host · \d+", shown)
            assert re.search(r"\d\d:\d\d:\d\d\s+1\s+3\s+ok\s+1/1\s.*\s16 B", shown)
            check_accessibility(page)
        page.locator("#replicas .left").wait_for()
        shown = page.inner_text("body")
        assert re.search(r"mine-0\s+left\s", shown), "it was closed on purpose, which is no error"
        assert "code 1005" not in shown
        page.goto(server.url + "/#token=wrong")
        text_with(page, "This token was not accepted")
        page.locator("#token").fill(server.token)
        page.get_by_role("button", name="Show").click()
        text_with(page, "run run")
        assert not page.evaluate("sessionStorage.length + localStorage.length")
        page.goto(server.url + "/")  # a reload: what is stored would be read by another program's page at this address
        text_with(page, "This coordinator needs its token.")


def test_the_page_of_a_coordinator_that_died_sends_the_token_to_nobody(page: Page, tmp_path: Path) -> None:
    """Another program takes the port while a tab is open: it got the token within seconds, and so did its own page on a reload."""
    settings = ServerSettings(port=free_port(), run="run", token=Secret(secrets.token_hex(16)), shutdown_seconds=0.5)
    given: list[tuple[str, str | None]] = []
    page.on("request", lambda request: given.append((request.url, request.headers.get("authorization"))))
    with BackgroundServer(settings) as server:
        page.goto(login_url(server.address, Secret(server.token)))
        text_with(page, "nothing published yet")
    text_with(page, "does not answer; trying again")
    with BackgroundServer(settings):  # a restart, with the same token
        text_with(page, "nothing published yet")
    text_with(page, "does not answer; trying again")
    with Squatter(settings.port, http("200 OK", b'{"nonce": "%s", "proof": "%s"}' % (b"0" * 96, b"0" * 64))) as squatter:
        text_with(page, "the page has stopped")
        heard = len(squatter.heard)
        page.reload()
        assert page.evaluate("JSON.stringify({...sessionStorage, ...localStorage, name})") == '{"name":""}'
    assert b"GET /v1/challenge" in squatter.heard[:heard]
    assert b"Bearer" not in squatter.heard
    assert server.token.encode() not in squatter.heard
    assert not [one for one in given if server.token in str(one) and "#token=" not in one[0]], "not to the coordinator either"


def test_the_page_says_what_it_needs_where_browsers_offer_no_cryptography(page: Page) -> None:
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        page.add_init_script("Object.defineProperty(Crypto.prototype, 'subtle', { value: undefined })")  # as over http, elsewhere
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.goto(login_url(server.address, Secret(server.token)))
        text_with(page, "over https or on loopback only")
        assert server.token not in page.evaluate("location.href")
        assert not [url for url in requests if "/v1/" in url]


def test_the_page_names_the_slow_rank_fits_any_screen_and_is_accessible(page: Page) -> None:
    assert len(HTML.encode()) < 200_000
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        page.goto(login_url(server.address, Secret(server.token)))
        text_with(page, "No round yet.")
        publish(server, {"a": [SlowAdapter()], "b": [SlowAdapter(), SlowAdapter("flush")]}, rounds=2)
        page.wait_for_function(
            "() => document.body.innerText.includes('Round 2,') && document.querySelectorAll('#rounds tr').length === 2"
        )
        assert re.search(r"Round 2, .*Slowest: flush at b/1, \d+ ms", page.inner_text("#slowest"))
        assert page.inner_text("#rounds").count("flush at b/1") == 2, "of each round"
        lanes = page.locator("#waterfall th").all_text_contents()
        assert set(lanes) == {"coordinator", "trainer/0", "a/0", "b/0", "b/1"}
        label = page.locator("#waterfall tr", has_text="b/1").locator(".lane").get_attribute("aria-label")
        assert re.search(r"flush \d{3} ms", str(label))
        assert page.locator("#chart canvas").count() == 1
        page.locator("#rounds button").last.click()
        text_with(page, "Round 1,")
        assert page.evaluate("location.hash") == "#round=1"
        page.evaluate("drawnRounds = ''")
        page.evaluate("refresh()")  # as after an update: the opened round and the focus stay
        page.wait_for_function("() => drawnRounds !== ''")
        assert "Round 1," in page.inner_text("#slowest")
        assert page.evaluate("document.activeElement.dataset.key") == "run 1"
        page.get_by_role("button", name="Follow live").click()
        text_with(page, "Round 2,")
        check_width(page)
        check_accessibility(page)
        page.evaluate("document.querySelector('main').append(document.createElement('img'))")
        with pytest.raises(AssertionError, match="image-alt"):
            check_accessibility(page)


def test_a_refused_a_killed_and_a_dead_trainer_are_alerts_with_a_fix_and_a_place(page: Page) -> None:
    """A refusal stays visible after its process ended; a lost rank keeps its host and process; a dead trainer is an alarm."""
    other = msgspec.structs.replace(engine_hello("refused-0"), manifest=Manifest([TensorSpec("w", (2, 2), "float16")]).tensors)
    with BackgroundServer(ServerSettings(port=0, run="run")) as server:
        page.goto(login_url(server.address, Secret(server.token)))
        text_with(page, "No replica has joined yet")
        gone = msgspec.structs.replace(other, name="left-0")
        with joined(ClientSettings(coordinator=server.address, token=Secret(server.token)), gone):
            page.locator("#replicas .registered").wait_for()
        page.locator("#replicas .left").wait_for()
        with RawAgent(server.address, server.token) as trainer:
            trainer.say(trainer_hello())
            trainer.hear()
            for hello in (engine_hello("mine-0"), other):
                with RawAgent(server.address, server.token) as agent:
                    agent.say(hello)
                    agent.hear()
            text_with(
                page, re.compile(r"refused-0 was refused\. Last seen: process \d+ on host\. ")
            )  # "Last seen" once it has gone
            shown = text_with(page, "2 problems")
            assert page.locator("#replicas .left").inner_text() == "left", "a later trainer does not refuse what has left"
            assert re.search(r"mine-0/0 disappeared .* Last seen: process \d+ on host\.", shown)
            assert "float16 instead of float32" in shown
            assert "Fix: To publish what the engine holds, use Trainer(..., dtype=torch.float16)" in shown
            assert page.locator("#replicas th").all_inner_texts() == ["mine-0", "refused-0", "left-0"]
        shown = text_with(page, "3 problems")
        assert "trainer/0 disappeared" in shown
        assert page.locator("#tiles div").first.inner_text().split("\n") == ["fine?", "no", "3 problems · trainer ranks 0/1"]
        assert page.title() == "(3) 0/2 serving · weightsync"
        check_accessibility(page)
        check_width(page)
    page.locator("#dead:visible").wait_for()
    assert page.title() == "(!) no answer · weightsync"
    check_accessibility(page)


def crowd(replicas: int, ranks: int) -> dict[str, Any]:
    """The recorded answers, of more replicas, of which ``rollout-27`` has lost rank 3 and ``rollout-5`` is slow."""
    data: dict[str, Any] = json.loads(DATA.read_text())
    status, trace = data["/v1/status"], data["/v1/trace"]
    healthy, track = status["replicas"][1], next(track for track in trace["tracks"] if track["party"] == "engine")
    status["replicas"], trace["tracks"] = [], [track for track in trace["tracks"] if track["party"] != "engine"]
    for number in range(replicas):
        replica = {**copy.deepcopy(healthy), "name": f"rollout-{number}", "world_size": ranks}
        place = {"host": f"gpu-node-{number:02}", "ended": None}
        replica["ranks"] = [
            {**place, "member": f"rollout-{number}/{rank}", "rank": rank, "pid": 4000 + rank} for rank in range(ranks)
        ]
        status["replicas"].append(replica)
        trace["tracks"] += [{**track, "member": rank["member"]} for rank in replica["ranks"]]
    lost = status["replicas"][27]
    lost |= {"state": "lost", "service": "lost", "missing": [3], "gone": [lost["ranks"].pop(3)], "version": None, "verified": ""}
    alert = {"level": "error", "subject": "rollout-27", "kind": "lost", "text": "rollout-27/3 disappeared.", "fix": "Restart it."}
    status["alerts"] = [
        {**status["alerts"][0], **alert, "round": None},
        {**status["alerts"][0], "subject": "rollout-5", "text": "rollout-5 is slow: paused for 0.30 s"},
    ]
    return data


def test_32_replicas_of_8_ranks_fit_a_screen_with_the_problems_first(page: Page) -> None:
    data = crowd(32, 8)
    page.route("**/*", answers(data))
    page.set_viewport_size({"width": 1440, "height": 900})
    page.goto(ADDRESS)
    page.locator("#waterfall .bar").first.wait_for()
    assert page.locator("#replicas th").all_inner_texts() == ["rollout-27", "rollout-5"]
    tiles = [tile.split("\n") for tile in page.locator("#tiles > div").all_inner_texts()]
    assert tiles[0] == ["fine?", "no", "2 problems · trainer ranks 1/1"]
    assert tiles[1] == ["on the newest version", "31 of 32", "replicas · version 7"]
    assert tiles[2][2] == "version 7 · verified at 31 of 32 (installed)"
    assert re.fullmatch(r"yes, [2-9]\.\d times", tiles[3][1]), "the recorded round was slow"
    assert tiles[4] == ["at fault", "rollout-27", "lost · gpu-node-27 · 4003"]
    bottom = "id => document.getElementById(id).getBoundingClientRect().bottom"
    assert page.evaluate(bottom, "more-replicas") < 660
    assert page.evaluate("document.documentElement.scrollHeight") < 2 * 900
    assert page.locator("#waterfall tr").count() == 12, "the coordinator, the trainer and the ten slowest ranks"
    check_width(page)
    check_accessibility(page)

    page.get_by_role("button", name="30 replicas serve the newest version: show them").focus()
    data["/v1/status"]["alerts"].pop()
    page.evaluate("refresh()")
    page.get_by_role("button", name="31 replicas").wait_for()  # the focus is kept
    page.keyboard.press("Enter")
    assert page.locator("#replicas th").count() == 32
    assert page.evaluate("[document.activeElement.textContent, document.activeElement.ariaExpanded].join()") == "Show fewer,true"
    page.get_by_role("button", name="show all").click()
    assert page.locator("#waterfall tr").count() == 2 + 32 * 8
    data["/v1/status"]["alerts"] *= 20
    page.evaluate("refresh()")
    page.get_by_role("button", name="Show 16 more problems").click()
    assert page.locator(".alert").count() == 20


def test_adapters_are_shown_by_name_and_version_where_there_are_any(page: Page) -> None:
    data = json.loads(DATA.read_text())
    page.route("**/*", answers(data))
    page.goto(ADDRESS)
    page.locator("#waterfall .bar").first.wait_for()
    assert not page.locator("#with-adapters").is_visible(), "of a coordinator that knows none"
    served = {"digest": "0" * 16, "rank": 8, "base": "run@7"}
    data["/v1/status"]["adapters"] = [
        {**served, "name": "alice/math", "version": 2, "replicas": [f"r{number}" for number in range(5)]},
        {**served, "name": "alice/math", "version": 3, "replicas": ["r0", "r1"]},
        {**served, "name": "bob/<b>code", "version": 0, "replicas": ["r0"], "base": None},
    ]
    page.evaluate("refresh()")
    page.locator("#adapters tr").nth(1).wait_for()
    assert [text.split("\t") for text in page.locator("#adapters tr").all_inner_texts()] == [
        ["alice/math", "3", "r0, r1", "2 at 5 replicas", "8", "run@7"],
        ["bob/<b>code", "0", "r0", "", "8", "-"],
    ]
    check_accessibility(page)
    check_width(page)
    data["/v1/status"]["adapters"] = [{**served, "name": f"many/{number}", "version": 1, "replicas": []} for number in range(30)]
    page.evaluate("refresh()")
    page.get_by_role("button", name="Show 30 adapters").click()
    assert page.locator("#adapters tr").count() == 30
    data["/v1/status"]["adapters"] = []
    page.evaluate("refresh()")
    page.locator("#with-adapters").wait_for(state="hidden")


def test_the_footer_says_what_runs_explains_the_words_and_saves_what_is_shown(page: Page) -> None:
    data = json.loads(DATA.read_text())
    data["/v1/status"]["started"] = data["/v1/status"]["now"] - 7200
    page.route("**/*", answers(data))
    page.goto(ADDRESS)
    page.locator("#waterfall .bar").first.wait_for()
    release = re.escape(data["/v1/status"]["release"])
    shown = page.locator("footer p").first.inner_text()
    assert re.match(rf"weightsync {release} · coordinator up 2 h · state of \d\d:\d\d:\d\d, \d+ s old", shown)
    page.evaluate("arrived -= 90_000")
    text_with(page, re.compile(r"state of .*, 2 min old"))
    words = page.locator("#words dt").all_text_contents()
    assert {"serving", "out of service", "versions behind", "state since", "verified"} <= set(words)
    heads = set(page.locator("thead th[title]").all_text_contents())
    assert heads == {"versions behind", "state since", "verified", "pause", "ranks", "round"}, "columns have the names explained"
    assert not page.locator("#words").is_visible()
    page.get_by_text("What the words mean").click()
    assert page.locator("#words").is_visible()
    for name in ("status", "rounds", "trace"):
        with page.expect_download() as download:
            page.locator(f"#save-{name}").click()
        assert download.value.suggested_filename == f"weightsync-{name}.json"
        assert json.loads(download.value.path().read_text()) == data[f"/v1/{name}"]
    check_accessibility(page)
    check_width(page)


def test_the_focus_runs_from_the_problems_down_and_a_refresh_leaves_it(page: Page) -> None:
    data = json.loads(DATA.read_text())
    page.route("**/*", answers(data))
    page.goto(ADDRESS)
    page.locator("#waterfall .bar").first.wait_for()
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.slice(0, 20).trim()"))
        data["/v1/status"]["now"] += 1
        page.evaluate("refresh()")
        page.wait_for_function("now => status.now === now", arg=data["/v1/status"]["now"])
    assert reached[0] == "Show round 8"
    assert reached[3:] == ["8", "7", "6"], "after the tables of replicas and of rounds"
