"""The shell blocks of a page run as its reader would run them: servers stay until the end, a block that fails fails the test."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.integration.server.page_shells import blocks, run_shells
from tests.integration.server.service_support import free_port


def test_a_server_of_the_page_runs_until_the_last_block_has_ended(tmp_path: Path) -> None:
    port = free_port()

    def there() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/page.txt") as answer:
                return bool(answer.read())
        except (urllib.error.URLError, ConnectionError):
            return False

    (tmp_path / "page.txt").write_text("hello")
    commands = ["export PORT=8000\npython -m http.server $PORT --bind 127.0.0.1", "cat page.txt; echo $GREETED"]
    printed = run_shells(commands, {"8000": str(port)}, [there], tmp_path, {"GREETED": "reader"}, 50)
    assert printed == "helloreader\n"
    assert not there()


def test_a_block_that_fails_or_a_change_that_does_not_apply_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="shell 0 ended with 3: broken"):
        run_shells(["echo broken; exit 3", "true"], {}, [lambda: False], tmp_path, {}, 20)
    with pytest.raises(RuntimeError, match="shell 0 ended with 4"):
        run_shells(["exit 4"], {}, [], tmp_path, {}, 20)
    with pytest.raises(AssertionError, match="does not contain"):
        run_shells(["true"], {"absent": ""}, [], tmp_path, {}, 20)


def test_the_blocks_of_a_page_are_found_by_language_and_section() -> None:
    serve, vllm, train = blocks("integrations/trl.md", "bash", "A complete example")
    assert (serve.strip(), "VLLM_SERVER_DEV_MODE=1" in vllm, "train.py" in train) == ("weightsync serve", True, True)
    assert len(blocks("integrations/trl.md", "python", "A complete example")) == 1
