"""The teeth of the demo's check: torn weights, wrong labels and broken records are found and told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from examples.demo.checking import Checker, Verdict
from examples.demo.generation import Generator, greedy
from examples.demo.oracle import ALPHA, RANK, Oracle, adapter_path
from examples.demo.records import Response
from examples.demo.tenants import adapter_tensors, draw
from safetensors.torch import save_file
from tests.unit.examples.demo.models import save_version, tiny_model, version
from transformers import PreTrainedModel

from weightsync.deadline import Deadline
from weightsync.errors import Aborted, ConfigurationError, VersionError
from weightsync.model import Version
from weightsync.model.lora import PREFIX, AdapterSpec, LoraConfig, LoraSlots, adapter_label

PROMPT = (5, 17, 3)
COUNT = 16


def mixture(one: PreTrainedModel, other: PreTrainedModel, names: tuple[str, ...]) -> PreTrainedModel:
    """``one`` with those tensors of ``other`` whose names contain one of ``names``."""
    mixed = tiny_model(0)
    state = dict(one.state_dict())
    state |= {name: tensor for name, tensor in other.state_dict().items() if any(part in name for part in names)}
    mixed.load_state_dict(state)
    return mixed


def made_by(model: PreTrainedModel, label: int, prompt: tuple[int, ...] = PROMPT) -> Response:
    return Response("replica-0", prompt, tuple(greedy(model, prompt, COUNT)), (label,) * COUNT, (0,))


@pytest.fixture
def checker(tmp_path: Path) -> Checker:
    for number in (1, 2, 3):
        save_version(tmp_path, number, tiny_model(number))
    return Checker(Oracle(tmp_path, tiny_model(0)))


def test_what_is_right_is_sound(checker: Checker) -> None:
    findings = checker.check([made_by(tiny_model(number), number) for number in (1, 2, 3)])
    assert (findings.checked, findings.torn, findings.mislabelled, findings.wrong) == (3, 0, 0, [])


def test_an_answer_over_two_versions_is_sound_if_each_run_is(checker: Checker) -> None:
    first = tuple(greedy(tiny_model(1), PROMPT, 6))
    second = tuple(greedy(tiny_model(2), PROMPT + first, 10))
    good = Response("replica-0", PROMPT, first + second, (1,) * 6 + (2,) * 10, (0, 6))
    assert checker.verdict(good) is Verdict.SOUND
    assert checker.verdict(replace(good, token_versions=(2,) * 6 + (2,) * 10)) is Verdict.MISLABELLED
    assert checker.verdict(replace(good, token_versions=(1,) * 7 + (2,) * 9)) is Verdict.TORN  # the label changes inside a run


@pytest.mark.parametrize("names", [("mlp",), ("self_attn.q_proj",), ("embed_tokens",), ("lm_head",)])
def test_a_mixture_of_two_checkpoints_is_torn(checker: Checker, names: tuple[str, ...]) -> None:
    torn = mixture(tiny_model(1), tiny_model(2), names)
    findings = checker.check([made_by(torn, 1), made_by(torn, 2), made_by(tiny_model(1), 1)])
    assert (findings.checked, findings.torn, findings.mislabelled) == (3, 2, 0)


def test_half_a_tensor_of_another_version_is_torn(checker: Checker) -> None:
    model = tiny_model(1)
    with torch.no_grad():
        model.lm_head.weight[:32] = tiny_model(2).lm_head.weight[:32]
    assert checker.verdict(made_by(model, 1)) is Verdict.TORN


def test_weights_swapped_during_an_answer_are_torn(checker: Checker) -> None:
    """What a server without a gate would do: write while it generates, keep the cache, keep the label."""
    first = greedy(tiny_model(1), PROMPT, 6)
    rest = greedy(tiny_model(2), [*PROMPT, *first], COUNT - 6)
    one_run = Response("replica-0", PROMPT, (*first, *rest), (1,) * COUNT, (0,))
    assert checker.verdict(one_run) is Verdict.TORN


def test_a_wrong_label_is_mislabelled(checker: Checker) -> None:
    findings = checker.check([made_by(tiny_model(1), 2), made_by(tiny_model(2), 1), made_by(tiny_model(3), 3)])
    assert (findings.checked, findings.torn, findings.mislabelled) == (3, 0, 2)
    assert [verdict for _, verdict in findings.wrong] == [Verdict.MISLABELLED] * 2


def test_a_label_that_was_never_published_is_mislabelled_and_unpublished_weights_are_torn(checker: Checker) -> None:
    assert checker.verdict(made_by(tiny_model(1), 9)) is Verdict.MISLABELLED
    assert checker.verdict(made_by(tiny_model(9), 1)) is Verdict.TORN
    assert checker.verdict(made_by(tiny_model(9), 9)) is Verdict.TORN


def test_one_number_in_two_epochs_is_two_versions(tmp_path: Path) -> None:
    save_version(tmp_path, 1, tiny_model(1))
    save_version(tmp_path, 1, tiny_model(2), epoch=2)
    checker = Checker(Oracle(tmp_path, tiny_model(0)))
    second = replace(made_by(tiny_model(2), 1), token_epochs=(2,) * COUNT)
    assert checker.verdict(second) is Verdict.SOUND
    assert checker.verdict(replace(second, token_epochs=(1,) * COUNT)) is Verdict.MISLABELLED
    assert checker.verdict(replace(second, token_epochs=(1,) * 5 + (2,) * (COUNT - 5))) is Verdict.TORN, (
        "the label changes inside a run"
    )
    assert checker.verdict(replace(second, token_epochs=(2,))) is Verdict.TORN, "a broken record"


def test_one_changed_token_is_torn(checker: Checker) -> None:
    good = made_by(tiny_model(1), 1)
    for position in (0, COUNT // 2, COUNT - 1):
        tokens = list(good.tokens)
        tokens[position] = (tokens[position] + 1) % 64
        assert checker.verdict(replace(good, tokens=tuple(tokens))) is Verdict.TORN


@pytest.mark.parametrize(
    "broken",
    [
        {"token_versions": (1,) * (COUNT - 1)},
        {"prefills": ()},
        {"prefills": (1,)},
        {"prefills": (0, 5, 5)},
        {"prefills": (0, COUNT)},
    ],
)
def test_a_broken_record_is_torn(checker: Checker, broken: dict[str, tuple[int, ...]]) -> None:
    assert checker.verdict(replace(made_by(tiny_model(1), 1), **broken)) is Verdict.TORN  # type: ignore[arg-type]


def test_an_answer_without_tokens_says_nothing(checker: Checker) -> None:
    assert checker.check([Response("replica-0", PROMPT, (), (), ())]).checked == 0


def test_probes_must_be_of_their_version_and_right(checker: Checker) -> None:
    good = replace(made_by(tiny_model(2), 2), probe_of=(1, 2))
    stale = replace(made_by(tiny_model(1), 1), probe_of=(1, 2), replica="replica-1")
    wrong = replace(made_by(tiny_model(1), 2), probe_of=(1, 2), replica="replica-2")
    findings = checker.check([good, stale, wrong, replace(good, replica="replica-2")])
    assert findings.probes == {((1, 2), "replica-0"): True, ((1, 2), "replica-1"): False, ((1, 2), "replica-2"): False}


def test_equal_continuations_are_generated_once(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []

    def counted(model: PreTrainedModel, prefix: tuple[int, ...], count: int) -> list[int]:
        runs.append(count)
        return greedy(model, prefix, count)

    monkeypatch.setattr("examples.demo.checking.greedy", counted)
    whole = made_by(tiny_model(1), 1)
    short = replace(whole, tokens=whole.tokens[:5], token_versions=(1,) * 5)
    assert checker.check([short, whole, short, whole]).checked == 4
    assert runs == [COUNT]


def test_checking_can_be_stopped(tmp_path: Path) -> None:
    save_version(tmp_path, 1, tiny_model(1))
    with pytest.raises(Aborted):
        Checker(Oracle(tmp_path, tiny_model(0)), lambda: True).check([made_by(tiny_model(1), 1)])


def test_the_oracle_refuses_what_does_not_fit(tmp_path: Path) -> None:
    oracle = Oracle(tmp_path, tiny_model(0))
    assert oracle.versions() == []
    with pytest.raises(ConfigurationError, match="version 1 of epoch 1 has no checkpoint"):
        oracle.model((1, 1))
    from safetensors.torch import save_file

    save_file({"surprise": torch.zeros(1)}, tmp_path / "version-1-00001.safetensors")
    with pytest.raises(ConfigurationError, match="surprise"):
        oracle.model((1, 1))


def test_a_server_that_writes_while_it_generates_is_caught(checker: Checker) -> None:
    """The real thing, sabotaged: the weights change under a running answer, past the gate."""
    model, new = tiny_model(1), tiny_model(2).state_dict()
    generator = Generator(model)
    generator.label(version(1))
    generator.resume()
    forwards = 0

    def sabotage(*_: object) -> None:
        nonlocal forwards
        forwards += 1
        if forwards == COUNT // 2:
            for name, parameter in model.named_parameters():
                parameter.data.copy_(new[name])

    model.register_forward_pre_hook(sabotage)
    answer = generator.complete(PROMPT, COUNT, Deadline(20))
    assert answer.token_versions == [1] * COUNT
    recorded = Response("replica-0", PROMPT, tuple(answer.tokens), tuple(answer.token_versions), tuple(answer.prefills))
    assert checker.verdict(recorded) is Verdict.TORN


def test_an_answer_of_an_adapter_is_sound_only_by_the_version_that_was_asked_for(tmp_path: Path) -> None:
    save_version(tmp_path, 1, tiny_model(1))
    generator = Generator(tiny_model(1), LoraSlots(2, RANK))
    generator.label(version(1))
    generator.resume()
    assert generator.loras is not None
    tensors = adapter_tensors(generator.model)
    for number in (1, 2):
        draw(tensors, number)
        label = adapter_label("a/b", number)
        save_file(tensors, adapter_path(tmp_path, label))
        named = {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()}
        generator.loras.stage(label, AdapterSpec("a/b", LoraConfig(RANK, ALPHA)), named)
        generator.loras.register(Version("a/b", number, "", ""))
    checker = Checker(Oracle(tmp_path, tiny_model(0)))

    def answer(asked: str) -> Response:
        made = generator.complete(PROMPT, COUNT, Deadline(20), asked)
        tokens, versions = tuple(made.tokens), tuple(made.token_versions)
        return Response("replica-0", PROMPT, tokens, versions, tuple(made.prefills), asked=asked, adapter=made.adapter)

    good = [answer(asked) for asked in ("", "a/b@1", "a/b@2", "a/b")]
    base, first, _, newest = good
    assert [response.adapter for response in good] == ["", "a/b@1", "a/b@2", "a/b@2"]
    findings = checker.check(good)
    assert (findings.checked, findings.wrong) == (4, [])
    assert findings.adapted == {("replica-0", "a/b@1"): 1, ("replica-0", "a/b@2"): 2}
    for wrong in (
        replace(newest, adapter="a/b@1"),  # the label of another version
        replace(newest, tokens=base.tokens),  # the base answered
        replace(base, tokens=newest.tokens),  # an adapter answered a request for the base
        replace(first, asked="a/b@2"),
        replace(first, asked="a/b", at_least=2),  # every replica had a newer one
        replace(newest, asked="c/d"),  # another tenant's
    ):
        assert checker.verdict(wrong) is Verdict.MISLABELLED
    assert checker.verdict(replace(first, asked="a/b", at_least=1)) is Verdict.SOUND
    with pytest.raises(VersionError, match="does not serve a/b@3; it serves a/b@1, a/b@2"):
        answer("a/b@3")
    with pytest.raises(VersionError, match="serves no adapters, so not a/b"):
        Generator(tiny_model(1)).complete(PROMPT, COUNT, Deadline(20), "a/b")


@pytest.mark.vllm  # whose environment has PEFT
def test_the_oracle_computes_with_an_adapter_as_peft_does(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = tiny_model(1)
    save_version(tmp_path, 1, model)
    tensors = adapter_tensors(model, torch.float32)
    draw(tensors, 7)
    save_file(tensors, adapter_path(tmp_path, "a/b@1"))
    layers = {name.partition(".lora_")[0] for name in tensors}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=sorted(layers)))
    peft.set_peft_model_state_dict(adapted, {f"{PREFIX}{name}": tensor for name, tensor in tensors.items()})
    ids = torch.tensor([PROMPT])
    with torch.no_grad(), Oracle(tmp_path, tiny_model(0)).adapted((1, 1), "a/b@1") as ours:
        torch.testing.assert_close(ours(ids).logits, adapted(ids).logits)
