"""Holds the house rules: public names, what an import may cost, constructs that never appear, documented errors, small files."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from tools import code_lines

import weightsync
from weightsync import errors
from weightsync.server import problems

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "weightsync"
PACKAGES = (SOURCE, *code_lines.BESIDE.values())
FILES = sorted(path for package in PACKAGES for path in package.rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SHIPPED_TESTS = sorted(
    code_lines.BESIDE["weightsync-testing"].rglob("*.py")
)  # a third party inherits these; they assert, as tests do
MAX_LINES = 600
MAX_TEST_LINES = 600

PUBLIC = [
    "Aborted",
    "Adapters",
    "AuthenticationError",
    "Box",
    "BroadcastBroken",
    "Collective",
    "ConfigurationError",
    "CoordinatorUnreachable",
    "CudaIpc",
    "DeadlineExceeded",
    "Engine",
    "EngineAdapter",
    "InProcess",
    "Layout",
    "LayoutError",
    "LoadError",
    "Manifest",
    "ManifestMismatch",
    "MembershipError",
    "ModuleAdapter",
    "Nccl",
    "PauseMode",
    "PeerLost",
    "PlanMismatch",
    "ProtocolError",
    "Receiver",
    "ReplicaResult",
    "RoundFailed",
    "RoundResult",
    "Shard",
    "SharedMemory",
    "SharedMemoryTooSmall",
    "StaleSource",
    "Stream",
    "Tcp",
    "TensorSpec",
    "Timeouts",
    "Trainer",
    "TransportError",
    "TransportUnavailable",
    "VerificationError",
    "Version",
    "VersionError",
    "WeightSyncError",
    "__version__",
    "base_weights",
    "manifest_of",
    "shard",
    "shards_of",
]

FORBIDDEN_IMPORTS = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
OPTIONAL = {
    "areal",
    "deepspeed",
    "nemo_rl",
    "openrlhf",
    "ray",
    "sglang",
    "triton",
    "verl",
    "vllm",
}  # where a module may need more than weightsync declares
FORBIDDEN_CALLS = {
    "eval": "executes what it reads",
    "exec": "executes what it reads",
    "torch.load": "unpickles",
    "time.sleep": "waits without looking; wait for an event with a deadline",
    "os.system": "runs a shell",
    "all_gather_object": "pickles",
    "broadcast_object_list": "pickles",
    "gather_object": "pickles",
    "scatter_object_list": "pickles",
    "send_object_list": "pickles",
    "recv_object_list": "pickles",
}


FORBIDDEN_NAMES = {"eval", "exec", "__import__", "compile"}  # as values, too: they can be called under another name
FORBIDDEN_FROM = {
    ("torch", "load"),
    ("numpy", "load"),
    ("time", "sleep"),
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
}
IMPORTS_BY_NAME = {
    "cli/main.py": "commands of the distributions beside the main one, from a table",
    "first_use.py": "a package's own public names, from its table",
    "integrations/checks.py": "packages of the table of checks",
    "old_names.py": "packages that are distributions now, and their modules, from lists",
    "releases.py": "modules of the table of releases",
    "server/mounts.py": "built-in mounts and installed entry points, by names of the coordinator's own settings",
    "transports/registry.py": "built-in schemes and installed entry points; a name from the wire is only looked up there",
    "fork_server.py": "the child processes of tests, told by their parent",
}


def _by_name(tree: ast.Module) -> Iterator[int]:
    """Lines where something is imported whose name is not written there, or import machinery is passed on."""
    called = {id(node.func): node for node in walked(tree) if isinstance(node, ast.Call)}
    for node in walked(tree):
        machinery = (isinstance(node, ast.Name) and node.id == "import_module") or (
            isinstance(node, ast.Attribute) and node.attr in ("import_module", "spec_from_file_location", "exec_module", "run_path")
        )
        if not machinery:
            continue
        call = called.get(id(node))
        passed = [call for call in called.values() if node in call.args]
        arguments = call.args if call is not None else passed[0].args[1:] if passed else []
        if not (arguments and isinstance(arguments[0], ast.Constant)):
            yield node.lineno  # type: ignore[attr-defined]


@cache
def parsed(path: Path) -> ast.Module:
    """Syntax tree of a file, for all rules."""
    return ast.parse(path.read_text())


@cache
def walked(tree: ast.Module) -> list[ast.AST]:
    """All nodes of a tree, for all rules: walking takes longer than any of them."""
    return list(ast.walk(tree))


def _where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _package(path: Path) -> Path:
    return next(package for package in PACKAGES if path.is_relative_to(package))


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return "?"


def _waits_for_nobody(tree: ast.Module) -> Iterator[int]:
    """Lines where an event is waited for that nobody else can set: a sleep by another name."""
    for node in walked(tree):
        if isinstance(node, ast.Attribute) and node.attr == "wait" and _makes_event(node.value):
            yield node.lineno
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inside = list(ast.walk(node))
            made = {name: line for name, line in _events(inside)}
            if not made:
                continue
            reads = [one for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)]
            looks = {id(one.value) for one in inside if isinstance(one, ast.Attribute) and one.attr in ("wait", "is_set")}
            for name, line in made.items():
                uses = [one for one in reads if one.id == name]
                if uses and all(id(use) in looks for use in uses):
                    yield line


def _makes_event(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in ("threading.Event", "Event", "asyncio.Event")


def _events(function: list[ast.AST]) -> Iterator[tuple[str, int]]:
    """Local names that are given a new event."""
    for node in function:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                tuples = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs = zip(target.elts, node.value.elts, strict=False) if tuples else [(target, node.value)]  # type: ignore[attr-defined]
                yield from ((left.id, node.lineno) for left, right in pairs if isinstance(left, ast.Name) and _makes_event(right))


def _forbidden(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and complaint for each construct that the house forbids."""
    for line in _waits_for_nobody(tree):
        yield line, "Event().wait(): nobody can set it, so it is a sleep; wait for an event with a deadline"
    for node in walked(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in FORBIDDEN_IMPORTS:
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.ImportFrom):
            if (node.module or "").split(".")[0] in FORBIDDEN_IMPORTS:
                yield node.lineno, f"from {node.module} import ..."
            for alias in node.names:
                if (node.module, alias.name) in FORBIDDEN_FROM:
                    yield node.lineno, f"from {node.module} import {alias.name}"
        elif isinstance(node, ast.Name) and node.id in FORBIDDEN_NAMES:
            yield node.lineno, f"{node.id}: executes or imports what it reads"
        elif isinstance(node, ast.Call):
            name = _name(node.func)
            for call, why in FORBIDDEN_CALLS.items():
                if name == call or ("_object" in call and name.endswith(f".{call}")):
                    yield node.lineno, f"{name}(): {why}"
            if any(k.arg == "allow_pickle" or (k.arg == "shell" and ast.unparse(k.value) == "True") for k in node.keywords):
                yield node.lineno, f"{name}() with allow_pickle or shell"
            if any(k.arg == "trust_remote_code" and ast.unparse(k.value) != "False" for k in node.keywords):
                yield node.lineno, f"{name}() with trust_remote_code: runs a checkpoint's own code"
            if isinstance(node.func, ast.Attribute) and node.func.attr == "join" and not node.args and not node.keywords:
                yield node.lineno, f"{name}() without a timeout"
        elif isinstance(node, ast.ExceptHandler) and node.type is None:
            yield node.lineno, "bare except"
        elif isinstance(node, ast.ExceptHandler) and re.search("(?<!Unicode)DecodeError", ast.unparse(node.type or node)):
            yield node.lineno, "except msgspec.DecodeError: catch messages.UNREADABLE, msgspec raises two other errors as well"
        elif isinstance(node, ast.Assert):
            yield node.lineno, "assert: it vanishes under -O; raise an error that says what is wrong"


def test_public_names_are_exactly_these() -> None:
    assert weightsync.__all__ == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves_and_says_what_it_is(name: str) -> None:
    found = getattr(weightsync, name)
    if name not in ("__version__", "PauseMode"):  # neither a class nor a function
        assert inspect.getdoc(found), f"{name} has no docstring"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = weightsync.Nonsense  # type: ignore[attr-defined]


def test_all_errors_are_public() -> None:
    assert set(errors.__all__) <= set(weightsync.__all__)


@pytest.mark.parametrize(
    "code",
    [
        "import weightsync",
        "import weightsync; weightsync.Version; weightsync.Layout; weightsync.PeerLost",
        "import weightsync.coordinator, weightsync.server, weightsync.planning",
        "import weightsync_rollouts",
        "import weightsync_callbacks.orders, weightsync.external.clients.vllm, weightsync_disaggregated.clients.vllm",
        "from weightsync.cli.main import app; app(['--help'], standalone_mode=False)",
        "from weightsync.cli.main import app; app(['serve', '--help'], standalone_mode=False)",
        "from weightsync.cli.main import app; app(['status', '--help'], standalone_mode=False)",
        "from weightsync.cli.main import app; app(['bench', '--help'], standalone_mode=False)",
        "from weightsync.cli.main import app; app(['plan', 'kimi-k2', '--source', 'fsdp=8'], standalone_mode=False)",
    ],
)
def test_needs_no_tensor_library(code: str) -> None:
    check = (
        "import sys; heavy = {'torch', 'numba', 'transformers'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", f"{code}\n{check}"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_no_forbidden_construct() -> None:
    found = [
        f"{_where(path)}:{line}: {what}"
        for path in FILES
        for line, what in _forbidden(parsed(path))
        if not (path in SHIPPED_TESTS and (what.startswith("assert") or what == "timer.join() without a timeout"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from pickle import loads",
        "import os, dill.detect",
        "eval('1')",
        "torch.load('x')",
        "torch.distributed.all_gather_object(a, b)",
        "import time\ntime.sleep(1)",
        "from time import sleep",
        "try:\n    f()\nexcept:\n    raise",
        "assert x",
        "np.load(f, allow_pickle=True)",
        "subprocess.run('ls', shell=True)",
        "thread.join()",
        "run = eval",
        "f(exec)",
        "__import__(name)",
        "from torch import load",
        "from os import system",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=flag)",
        "try:\n    f()\nexcept msgspec.DecodeError:\n    raise",
        "threading.Event().wait(0.1)",
        "def f():\n    pause = threading.Event()\n    while look():\n        pause.wait(0.1)",
        "def f():\n    pause, left = threading.Event(), 5\n    while not pause.is_set():\n        pause.wait(left)",
    ],
)
def test_the_search_for_forbidden_constructs_finds_them(code: str) -> None:
    assert list(_forbidden(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "def f():\n    done = threading.Event()\n    start(done)\n    done.wait(1)",
        "def f():\n    done = threading.Event()\n    def run():\n        done.set()\n    start(run)\n    done.wait(1)",
        "self.over.wait(1)",
    ],
)
def test_an_event_that_somebody_can_set_may_be_waited_for(code: str) -> None:
    assert not list(_forbidden(ast.parse(code)))


def test_nothing_is_imported_by_a_name_that_could_come_from_outside() -> None:
    found = []
    for path in FILES:
        if path.relative_to(_package(path)).as_posix() not in IMPORTS_BY_NAME:
            found += [f"{_where(path)}:{line}: import by a name that is not written there" for line in _by_name(parsed(path))]
        for node in walked(parsed(path)):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(name.split(".")[0] == "multiprocessing" for name in names):
                found.append(f"{_where(path)}:{node.lineno}: multiprocessing pickles what it sends")  # type: ignore[attr-defined]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import_module(message.module)", True),
        ("importlib.import_module(name)", True),
        ("f = importlib.import_module", True),
        ("asyncio.to_thread(import_module, name)", True),
        ("spec.loader.exec_module(module)", True),
        ("importlib.import_module('examples.demo')", False),
        ("asyncio.to_thread(import_module, 'examples.demo')", False),
    ],
)
def test_the_search_for_imports_by_name_finds_them(code: str, found: bool) -> None:
    assert bool(list(_by_name(ast.parse(code)))) is found


def test_modules_say_what_they_are() -> None:
    assert not [_where(path) for path in FILES if not ast.get_docstring(parsed(path))]


@pytest.mark.filterwarnings(r"ignore:weightsync\.\S+ is in the package weightsync-\w+ now:DeprecationWarning")
@pytest.mark.parametrize("path", [p for p in FILES if p.name != "__main__.py"], ids=_where)
def test_all_names_what_exists(path: Path) -> None:
    module_name = ".".join(path.relative_to(_package(path).parent).with_suffix("").parts).removesuffix(".__init__")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name in OPTIONAL:
            pytest.skip(f"needs {error.name}, which is not installed here")
        raise
    missing = [name for name in getattr(module, "__all__", []) if not hasattr(module, name)]
    assert not missing


def _private_names_imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of each import of a name with an underscore from a module of ours."""
    for node in walked(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in {package.name for package in PACKAGES}:
            yield from ((node.lineno, alias.name) for alias in node.names if re.match("_[^_]", alias.name))


def test_a_name_with_an_underscore_is_used_by_its_module_alone() -> None:
    assert not [(_where(path), *use) for path in FILES for use in _private_names_imported(parsed(path))]


def test_the_search_for_imports_of_private_names_finds_them() -> None:
    tree = ast.parse("from weightsync.errors import _kinds, readable\nfrom weightsync import __version__\nfrom os import _exit")
    assert list(_private_names_imported(tree)) == [(1, "_kinds")]


def test_files_are_short_enough_to_read_in_a_sitting() -> None:
    most = {path: MAX_TEST_LINES if path in (*TESTS, *SHIPPED_TESTS) else MAX_LINES for path in [*FILES, *TESTS]}
    lines = {path: len(path.read_text().splitlines()) for path in most}
    long = [f"{_where(path)} has {lines[path]} lines; split it by idea" for path in most if lines[path] > most[path]]
    assert not long, "\n".join(long)


def test_no_package_is_above_its_ceiling_of_code_lines() -> None:
    advice = """These packages do not keep to [tool.weightsync.ceiling] in pyproject.toml:
  {}
First look for code that already does this, and for code that can go; `python -m tools.code_lines` prints where each package stands.
If the growth is wanted, raise the row in the commit that needs it, and say why in its message."""
    wrong = code_lines.over(code_lines.measured(), code_lines.ceilings())
    assert not wrong, advice.format("\n  ".join(wrong))


def test_the_count_of_code_lines_leaves_out_what_explains() -> None:
    explained = '"""Doc."""\n\n# why\nx = 1  # a number\n"""Of x."""\n\n\ndef f():\n    """Doc,\n\n    longer."""\n'
    assert code_lines.code_lines(explained + '    g(\n        """two\nlines"""\n    )\n') == 6
    assert [m.partition(":")[0] for m in code_lines.over({"a": 3, "b": 1, "c": 1}, {"a": 2, "c": 1, "d": 1})] == ["b", "d", "a"]


@pytest.mark.parametrize("kind", ["unit", "contract"])
def test_folders_of_tests_are_those_of_the_source(kind: str) -> None:
    source = {path.name for path in SOURCE.iterdir() if path.is_dir()}
    source |= {"bench", "benchmarks", "callbacks", "disaggregated", "examples", "relay"}
    assert {path.parent.name for path in (ROOT / "tests" / kind).glob("*/*.py")} <= source


def _error_classes() -> list[type[errors.WeightSyncError]]:
    found = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.WeightSyncError)]
    assert len(found) > 10
    return found


@pytest.mark.parametrize("error", _error_classes(), ids=lambda e: e.__name__)
def test_error_is_in_the_tree_of_the_docstring_under_its_parent(error: type[errors.WeightSyncError]) -> None:
    lines = (errors.__doc__ or "").splitlines()
    depth = {m[2]: len(m[1]) for line in lines if (m := re.match(r"    ([│├└─ ]*)([A-Z]\w+)\b", line))}
    order = list(depth)
    assert error.__name__ in depth, f"{error.__name__} is missing from the tree in errors.py"
    if error is errors.WeightSyncError:
        return
    above = order[: order.index(error.__name__)]
    parent = next(name for name in reversed(above) if depth[name] < depth[error.__name__])
    assert parent == error.__bases__[0].__name__


@pytest.mark.parametrize("error", _error_classes(), ids=lambda e: e.__name__)
def test_error_crosses_a_process_as_its_name_and_message(error: type[errors.WeightSyncError]) -> None:
    back = errors.from_wire(*errors.to_wire(error("what happened")))
    assert type(back) is error
    assert str(back) == "what happened"


@pytest.mark.parametrize("error", _error_classes(), ids=lambda e: e.__name__)
def test_error_has_a_status_code_of_its_own_choice(error: type[errors.WeightSyncError]) -> None:
    assert error in problems.STATUS, f"{error.__name__} is missing from weightsync.server.problems.STATUS"


def _tracked() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    return [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file() and path != Path(__file__).resolve()]


def test_no_file_names_the_machine_it_was_written_on() -> None:
    folders = re.compile(r"(?<![\w.])/(root|home|work|Users)/[A-Za-z.]|(?<![\w.])/tmp/[A-Za-z]")  # tempfile knows where
    hosts = re.compile(r"(?<!==)\b(10|192\.168|172\.(1[6-9]|2\d|3[01]))(\.\d{1,3}){2,3}\b|\b[\w-]+\.(internal|corp)\b(?!\()")
    found = []
    for path in _tracked():
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:
            continue
        searches = [folders] if "tests" in path.parts else [folders, hosts]  # a test may need an address that is not loopback
        found += [
            f"{_where(path)}:{n}: {m[0]}" for n, line in enumerate(lines, 1) for search in searches if (m := search.search(line))
        ]
    assert not found, "\n".join(found)


def test_no_file_is_what_a_run_has_written() -> None:
    assert not [_where(path) for path in _tracked() if path.stat().st_size > 500_000 or path.suffix in (".safetensors", ".bin")]


def test_constraints_pin_everything_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert lines
    loose = [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+( ; .+)?", line)]
    assert not loose


def test_nothing_is_installed_without_its_hash() -> None:
    makefile = (ROOT / "Makefile").read_text()
    loose = makefile.partition("locks/vllm.txt is for Python 3.11")[2].partition("fi\n")[0]  # said aloud, on other Pythons only
    installs = [
        line for line in makefile.replace(loose, "").splitlines() if re.search(r"PIP\) (install|\$\(INSTALL\))|pip install", line)
    ]
    assert len(installs) >= 2
    ours = "$(INSTALL) --no-deps --no-build-isolation -e ."
    assert not [line for line in installs if "$(INSTALL) $(LOCKED) " not in line and ours not in line]
    recipes = [line for line in makefile.splitlines() if re.search(r"^\t.*locks/\w", line.partition("echo ")[0])]
    assert len(recipes) > 10
    assert not [line for line in recipes if "$(LOCKS_INTO) " not in line and "ON_TOP" not in line]
    assert re.search(r"^LOCKS_INTO = \$\(PYTHON\) tools/install.py$", makefile, re.MULTILINE)
    assert re.search(r"^LOCKED := --no-deps --require-hashes$", makefile, re.MULTILINE)
    assert re.search(r"^INSTALL := install --no-compile$", makefile, re.MULTILINE)


ADAPTER_CALLS = ("engine/adapter_calls.py", "engine/session.py", "engine/lora_role.py")
"""The engine session: its calls, and who alone makes them. Those about LoRA adapters run beside them, from one place."""
ADAPTER_METHODS = {name for name, value in vars(weightsync.EngineAdapter).items() if inspect.isfunction(value) and name[0] != "_"}


def _adapters_called(tree: ast.Module) -> Iterator[int]:
    """Lines where a method of an adapter is called, except where an adapter's method calls the one that it replaces or wraps."""
    passed_on: set[int] = set()
    named: set[str] = set()
    for node in walked(tree):
        if isinstance(node, ast.ClassDef) and any(_name(base).endswith("Adapter") for base in node.bases):
            for method in node.body:
                calls = [one for one in ast.walk(method) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute)]
                passed_on |= {id(call) for call in calls if call.func.attr == getattr(method, "name", "")}  # type: ignore[attr-defined]
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None and "Adapter" in ast.unparse(node.annotation):
            named.add(node.arg if isinstance(node, ast.arg) else _name(node.target).rpartition(".")[2])
    for node in walked(tree):  # what such an argument is kept as
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in named:
            named |= {_name(target).rpartition(".")[2] for target in node.targets}
    for node in walked(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and id(node) not in passed_on:
            owner, called = _name(node.func.value).rpartition(".")[2], node.func.attr
            if called in ADAPTER_METHODS and ("adapter" in owner.lower() or owner in named or called.startswith("wake_")):
                yield node.lineno


def test_an_adapter_is_called_by_the_engine_session_alone() -> None:
    found = []
    for path in FILES:
        if path not in SHIPPED_TESTS and path.relative_to(_package(path)).as_posix() not in ADAPTER_CALLS:
            found += [f"{_where(path)}:{line}" for line in _adapters_called(parsed(path))]
            imports = [node for node in walked(parsed(path)) if isinstance(node, ast.ImportFrom)]
            assert "AdapterCalls" not in {alias.name for node in imports for alias in node.names}, _where(path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("adapter.pause('abort', 5)", True),
        ("self._adapter.load(tensors)", True),
        ("def f(one: EngineAdapter): one.flush()", True),
        ("class A:\n def __init__(self, inner: VllmWorkerAdapter): self.it = inner\n def f(self): self.it.resume()", True),
        ("engine.wake_cache()", True),
        ("class Mine(EngineAdapter):\n def flush(self): return self.adapter.flush()", False),
        ("class Mine(EngineAdapter):\n def flush(self): self.adapter.resume()", True),
        ("adapter.in_use()", False),
        ("file.flush()", False),
    ],
)
def test_the_search_for_calls_of_an_adapter_finds_them(code: str, found: bool) -> None:
    assert bool(list(_adapters_called(ast.parse(code)))) == found


def test_class_names_are_unique_also_without_their_underscore() -> None:
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in walked(parsed(path)):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{_where(path)}:{node.lineno}")
    repeated = [f"{name}: {', '.join(lines)}" for name, lines in sorted(places.items()) if len(lines) > 1]
    assert not repeated, "\n".join(repeated)


HOUSEHOLD = {"found", "one", "said", "told", "wish"}
MOST_HOUSEHOLD_LOCALS = 4


def test_locals_name_what_they_hold() -> None:
    household = []
    for path in FILES:
        for node in walked(parsed(path)):
            name = node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else getattr(node, "arg", None)
            if name in HOUSEHOLD and isinstance(node, ast.Name | ast.arg):
                household.append(f"{_where(path)}:{node.lineno}: {name}")
    assert len(household) <= MOST_HOUSEHOLD_LOCALS, "\n".join(household)
