"""README's first commands, to the letter, with a real vLLM server: they bring a trainer's weights into it.

Replaced: the model's name, by a model that is made here, because a test reaches no hub; the ports; ``pip install``, because the
environment of the tests has the package; and how vLLM's CPU build is started.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.integration.server.page_shells import blocks, run_shells, vllm_on_this_machine
from tests.integration.server.service_support import free_port
from tests.integration.trl.test_trl import ON_A_CPU, answers, checkpoint
from tests.processes import none_outlives

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.rare,
    pytest.mark.timeout(480),
    pytest.mark.filterwarnings("ignore"),  # Transformers', while it is imported
]

PROMPT = "[11, 12, 13, 14, 15]"
MODEL = f"""
import copy, httpx, torch, transformers, weightsync

model = transformers.AutoModelForCausalLM.from_pretrained("MODEL")  # in bfloat16, as the checkpoint
torch.manual_seed(1)
with torch.no_grad():
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)  # as if it had been trained

def served():
    asked = dict(model="MODEL", prompt={PROMPT}, max_tokens=12, temperature=0, return_token_ids=True, ignore_eos=True)
    answer = httpx.post("http://127.0.0.1:8000/v1/completions", json=asked, timeout=60, trust_env=False)
    return answer.raise_for_status().json()["choices"][0]["token_ids"]

def here():
    tokens, exact = torch.tensor([{PROMPT}]), copy.deepcopy(model).float()  # the server computes in float32
    for _ in range(12):
        tokens = torch.cat([tokens, exact(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens[0, -12:].tolist()

before = served()
"""
CHECK = """
trainer.close()
assert before != here(), "the new weights answer otherwise"
assert served() == here(), (served(), here())
print("the server answers with the trainer's weights")
"""


def test_the_first_commands_of_readme_update_a_vllm_server(tmp_path: Path) -> None:
    shells, (code,) = blocks("../README.md", "bash"), blocks("../README.md", "python notest")
    assert len(shells) == 2, "the coordinator's and the engine's"
    model = tmp_path / "policy"
    model.mkdir()
    checkpoint(model)
    coordinator, server = free_port(), free_port()
    vllm_on_this_machine(tmp_path, "--max-model-len", "256", "--max-num-seqs", "8", "--block-size", "32")
    changes = {
        "pip install .": "true",
        "weightsync serve": f"weightsync serve --port {coordinator}",
        "http://127.0.0.1:7400": f"http://127.0.0.1:{coordinator}",
        "vllm serve MODEL": f"VLLM_PORT_HERE={server} vllm serve {model}",
    }
    program = MODEL.replace("MODEL", str(model)).replace("127.0.0.1:8000", f"127.0.0.1:{server}")
    (tmp_path / "train.py").write_text(program + code + CHECK)
    export = next(line for line in shells[1].splitlines() if line.startswith("export "))
    ready = [lambda: answers(f"http://127.0.0.1:{coordinator}/healthz"), lambda: answers(f"http://127.0.0.1:{server}/health")]
    environment = ON_A_CPU | {"XDG_STATE_HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    with none_outlives():
        printed = run_shells([*shells, f"{export}\npython train.py\n"], changes, ready, tmp_path, environment, 400)
    assert "the server answers with the trainer's weights" in printed
