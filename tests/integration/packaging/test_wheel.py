"""What a user installs: the wheel holds the product alone, and works where nothing else of this checkout can be imported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIP = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
EXTRAS = sorted(
    {re.split(r"\W", text.replace("-", "_"))[0] for texts in PROJECT["optional-dependencies"].values() for text in texts}
    - {re.split(r"\W", text.replace("-", "_"))[0] for text in PROJECT["dependencies"]}
)

ABSENT = f"""
import importlib.abc, runpy, sys

sys.modules.update(dict.fromkeys({[*EXTRAS, "nixl_cu13", "ray", "triton", "vllm"]}))

class Undistributed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch.distributed":
            for part in ("_c10d_init", "_rpc_init", "_dist_autograd_init", "_faulty_agent_init"):
                vars(sys.modules["torch._C"]).pop(part, None)

sys.modules["torch._C._distributed_c10d"] = None
sys.meta_path.insert(0, Undistributed())
"""
"""Hides the packages of every extra, Triton, and torch's distributed part, as in a build of torch without it."""


pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def _run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Standard output of a program in which this checkout's source cannot be imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("WEIGHTSYNC_", "PYTHON"))}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from this checkout by the tools that are installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(*PIP, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The programs of a fresh environment: the wheel, and what it depends on from the environment of the tests."""
    environment = wheel.parent / "environment"
    _run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=wheel.parent)
    _run(*PIP, "--python", environment / "bin" / "python", "install", "--no-index", "--no-deps", wheel, cwd=wheel.parent)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A line in a .pth file adds a folder, but not what the .pth files in it add: no editable install of this checkout.
    others = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "dependencies.pth").write_text("\n".join(others) + "\n")
    _share_compiled(ROOT / "src/weightsync/tensors", packages / "weightsync/tensors")
    return environment / "bin"


def _share_compiled(source: Path, target: Path) -> None:
    """Give the installed kernels what Numba compiled for the checkout's, which it knows by the file's time and size."""
    assert (target / "kernels.py").read_bytes() == (source / "kernels.py").read_bytes()
    stamp = (source / "kernels.py").stat()
    os.utime(target / "kernels.py", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (target / "__pycache__").mkdir(exist_ok=True)
    for compiled in (source / "__pycache__").glob("kernels.*.nb[ci]"):
        shutil.copy(compiled, target / "__pycache__")


def test_the_wheel_holds_the_product_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    shipped = {path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert names == {path.relative_to(source).as_posix() for path in shipped}
    words = {word for name in names for word in re.split(r"[/._]", name)}
    assert not words & {"demo", "faults", "simulation", "examples", "benchmarks", "tests", "test", "conftest"}


def test_the_minimal_example_prints_what_the_readme_says(installed: Path, tmp_path: Path) -> None:
    """With the dependencies alone: no extra, no Triton, and a torch that was built without its distributed part."""
    example = ROOT / "examples" / "minimal.py"
    code = ABSENT + (
        "import torch, weightsync; print(weightsync.__file__, torch.distributed.is_available())\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    where = {"XDG_RUNTIME_DIR": str(tmp_path), "WEIGHTSYNC_PORT": "0"}  # tests run beside each other
    printed = _run(installed / "python", "-c", code, example, cwd=tmp_path, **where)
    first, _, lines = printed.partition("\n")
    imported, distributed = first.split()
    assert distributed == "False"
    assert Path(imported).is_relative_to(installed.parent), "the wheel was imported, not the checkout"
    (promised,) = re.findall(r"^```\n(run-.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert re.sub(r"run-[0-9a-f]+", "run", lines) == re.sub(r"run-[0-9a-f]+", "run", promised)


def test_the_command_lists_what_it_can_do(installed: Path, tmp_path: Path) -> None:
    text = _run(installed / "weightsync", "--help", cwd=tmp_path, TERM="dumb", COLUMNS="120")
    assert re.search(r"\bserve\b", text)
    assert not re.search(r"\b(demo|faults|simulate)\b", text)


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here")
BESIDE = [
    ("testing.adapter_contract", "testing"),
    ("rollouts.controller", "rollouts"),
    ("transports.nixl.transport", "transport-nixl"),
    ("ray.manager", "ray-manager"),
    ("external.push", "disaggregated-updates"),
    ("trainer.relay", "relay"),
]


@pytest.mark.parametrize(("module", "folder"), BESIDE)
def test_without_a_package_beside_the_error_names_it(installed: Path, tmp_path: Path, module: str, folder: str) -> None:
    code = f"try:\n    import weightsync.{module}\nexcept ModuleNotFoundError as error:\n    print(error)"
    assert f"pip install ./{folder}" in _run(installed / "python", "-c", ABSENT + code, cwd=tmp_path)


@pytest.mark.parametrize(
    ("folder", "package", "modules"),
    [
        ("testing", "weightsync_testing", "adapter_contract, transport_contract"),
        ("rollouts", "weightsync_rollouts", "controller"),
        ("transport-nixl", "weightsync_nixl", "transport"),
        ("disaggregated-updates", "weightsync_disaggregated", "push, weight_updates"),
        ("relay", "weightsync_relay", "commands, Relay"),
        pytest.param(
            "ray-manager", "weightsync_ray", "manager", marks=pytest.mark.skipif(find_spec("ray") is None, reason="no Ray")
        ),
    ],
)
def test_a_package_beside_is_installed_beside_the_wheel(
    installed: Path, tmp_path: Path, folder: str, package: str, modules: str
) -> None:
    options = ("--no-index", "--no-deps", "--no-build-isolation", "--target", tmp_path)
    _run(*PIP, "install", *options, ROOT / folder, cwd=tmp_path)
    code = f"from {package} import {modules}; import {package}; print({package}.__file__)"
    printed = _run(installed / "python", "-c", code, cwd=tmp_path)
    assert Path(printed.strip()).is_relative_to(tmp_path), "the installed package was imported, not the checkout's"
    assert (tmp_path / package / "py.typed").exists()
