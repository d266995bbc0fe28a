"""Which version of an adapter a request gets."""

from __future__ import annotations

import pytest

from weightsync.errors import ConfigurationError, VersionError
from weightsync.model import Manifest, TensorSpec
from weightsync.model.lora import LoraModule, check_extents, lora_modules, newest_label, served_label

LABELS = ["alice/math@9", "alice/math@10", "alice/mathematics@11", "bob/code@0"]


@pytest.mark.parametrize(
    ("adapter", "label"),
    [
        ("alice/math", "alice/math@10"), ("alice/math@9", "alice/math@9"), ("bob/code", "bob/code@0"), ("alice", None),
        ("alice/math@1", None), ("alice/math@", None), ("", None), ("@0", None),
    ],
)  # fmt: skip
def test_a_name_is_its_newest_version_and_a_label_is_itself(adapter: str, label: str | None) -> None:
    assert newest_label(adapter, LABELS) == label
    if label is not None:
        assert served_label(adapter, LABELS) == label


def test_what_is_not_served_is_an_error_that_names_versions_of_this_adapter_and_no_other_tenant() -> None:
    with pytest.raises(VersionError, match=r"does not serve alice/math@1; it serves alice/math@10, alice/math@9$"):
        served_label("alice/math@1", LABELS)
    with pytest.raises(VersionError, match=r"it serves n/m@0, n/m@1, n/m@2, n/m@3, n/m@4, and 3 more"):
        served_label("n/m@9", [f"n/m@{number}" for number in range(8)])
    for name in ("alice/mathematic", "alice/math@", "", "bob/cod@7", "@"):
        with pytest.raises(VersionError) as raised:
            served_label(name, LABELS[2:])
        assert str(raised.value) == f"this engine does not serve {name}; it serves no version of {name.partition('@')[0]}"


@pytest.mark.parametrize(("output", "inputs", "most"), [(9, 6, 4), (7, 6, 4), (8, 7, 4), (8, 5, 4), (8, 6, 3)])
def test_matrices_fit_exactly(output: int, inputs: int, most: int) -> None:
    module = LoraModule("layer", TensorSpec("a", (4, 6), "float32"), TensorSpec("b", (8, 4), "float32"))
    check_extents("alice/math", module, 8, 6, 4)
    with pytest.raises(ConfigurationError, match="alice/math changes layer"):
        check_extents("alice/math", module, output, inputs, most)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "bfloat16", "float32"])
def test_quantized_matrices_are_no_adapter(dtype: str) -> None:
    specs = [TensorSpec(f"base_model.model.q.lora_{part}.weight", (4, 4), dtype) for part in "AB"]
    if dtype in ("bfloat16", "float32"):
        assert len(lora_modules(Manifest(specs))) == 1
    else:
        with pytest.raises(ConfigurationError, match=rf"q.lora_A.weight is {dtype}, and engines take float64"):
            lora_modules(Manifest(specs))
