"""Two checkouts in turns: whose code runs, in which order, and what the interval of the median covers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.pairs import compare, main, median_interval

from weightsync.errors import ConfigurationError, RoundFailed

# In the place of `weightsync bench`: takes 0.1 s in one checkout and FACTOR times as long in the other, and records its call.
_FAKE = """
import json, pathlib, sys
log = pathlib.Path({log!r})
log.write_text(log.read_text() + {label!r} + " " + " ".join(sys.argv[1:]) + chr(10))
print("progress", file=sys.stderr)
seconds = 0.1 * {factor}
print(json.dumps(dict(cases=[dict(name="a/direct/1", seconds=seconds, ratio=seconds / 0.05)])))
sys.exit({status})
"""


def _checkout(folder: Path, label: str, factor: float = 1.0, status: int = 0) -> Path:
    package = folder / label / "src" / "weightsync"
    package.mkdir(parents=True)
    (folder / "log").touch()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(_FAKE.format(log=str(folder / "log"), label=label, factor=factor, status=status))
    return folder / label


def test_checkouts_run_in_turns_with_their_own_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = _checkout(tmp_path, "old"), _checkout(tmp_path, "new", 1.2)
    assert main([str(old), str(new), "--pairs", "6", "--", "--only", "direct"]) == 1, "it became slower"
    calls = (tmp_path / "log").read_text().splitlines()
    assert [call.split()[0] for call in calls[:4]] == ["old", "new", "new", "old"]
    assert len(calls) == 12
    assert calls[0] == "old bench --only direct --json"
    written = capsys.readouterr()
    (case,) = json.loads(written.out.splitlines()[-1])["cases"]
    assert (case["name"], case["pairs"], case["no_slower"]) == ("a/direct/1", 6, False)
    for interval in (case["time"], case["over_floor"]):
        assert [interval[key] for key in ("median", "low", "high")] == pytest.approx([1.2] * 3)
    assert "1.200 [1.200, 1.200]" in written.err
    assert "pair 6 of 6, new: a/direct/1 120 ms (2.40)" in written.err


def test_too_few_pairs_decide_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(_checkout(tmp_path, "old")), str(_checkout(tmp_path, "new", 1.2)), "--pairs", "3"]) == 0
    (case,) = json.loads(capsys.readouterr().out.splitlines()[-1])["cases"]
    assert case["no_slower"] is None
    assert case["time"]["coverage"] == 0.75


def test_a_failed_run_and_a_checkout_that_is_none_are_errors(tmp_path: Path) -> None:
    old = _checkout(tmp_path, "old")
    with pytest.raises(RoundFailed, match="exit status 3: progress"):
        main([str(old), str(_checkout(tmp_path, "new", status=3)), "--pairs", "1"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match="does not import weightsync from"):
        main([str(old), str(tmp_path / "empty"), "--pairs", "1"])
    with pytest.raises(ConfigurationError, match="at least one pair"):
        main([str(old), str(old), "--pairs", "0"])


@pytest.mark.parametrize(
    ("count", "left", "coverage"), [(1, 0, 0.0), (3, 0, 0.75), (6, 0, 0.96875), (10, 1, 0.9785), (20, 5, 0.9586)]
)
def test_the_interval_of_a_median_goes_from_one_order_statistic_to_another(count: int, left: int, coverage: float) -> None:
    interval = median_interval([float(value) for value in reversed(range(count))])
    assert (interval.low, interval.high) == (left, count - 1 - left)
    assert interval.median == (count - 1) / 2
    assert interval.coverage == pytest.approx(coverage, abs=1e-4)


@pytest.mark.parametrize(
    ("factors", "no_slower"),
    [
        ([0.9, 1.1, 1.1, 1.1, 1.1, 1.1], True),  # the interval includes 1.00
        ([1.01, 1.02, 1.02, 1.02, 1.02, 1.02], True),  # it lies below 1.03
        ([0.8] * 6, True),
        ([1.01, 1.02, 1.02, 1.02, 1.02, 1.04], False),
    ],
)
def test_what_counts_as_no_slower(factors: list[float], no_slower: bool) -> None:
    old = [{"a": {"seconds": 0.1, "ratio": 2.0}} for _ in factors]
    new = [{"a": {"seconds": 0.1 * factor, "ratio": 2.0}} for factor in factors]
    (case,) = compare(old, new)
    assert case.no_slower is no_slower
    assert case.over_floor.median == 1
    with pytest.raises(ConfigurationError, match="different cases: a, b"):
        compare(old, [{"b": run["a"]} for run in new])
