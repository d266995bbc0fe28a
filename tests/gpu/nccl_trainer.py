"""A trainer rank in a process of its own that publishes by NCCL: ``python -m tests.gpu.nccl_trainer VERSIONS``.

Its allocator makes what CUDA IPC cannot share. Prints the transports of each round, and the SHA-256 of what was published.
"""

from __future__ import annotations

import json
import sys

import torch
from tests.gpu.engine_process import Model, fingerprint

from weightsync.trainer.trainer import Trainer


def main() -> None:
    model = Model().to("cuda:0")
    with Trainer(model, transports=["cuda_ipc", "nccl"]) as trainer:
        for version in range(1, int(sys.argv[1]) + 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_()
            result = trainer.publish(version, timeout=60)
            (replica,) = result.replicas
            said = {
                "ok": result.ok, "transports": replica.transports, "schemes": [one.scheme for one in trainer._role.offers],
                "published": fingerprint(model),
            }  # fmt: skip
            print(json.dumps(said), flush=True)
            sys.stdin.readline()


if __name__ == "__main__":
    main()
