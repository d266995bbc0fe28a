"""Trainer, coordinator and engine in one process. A run has separate ones."""

import torch

import weightsync

policy, served = torch.nn.Linear(16, 4), torch.nn.Linear(16, 4)
adapter = weightsync.ModuleAdapter(served)
with (
    weightsync.Trainer(policy) as trainer,
    weightsync.Engine(adapter, "policy-0", coordinator=trainer.coordinator),
):
    for step in range(1, 4):
        torch.nn.init.normal_(policy.weight)  # a training step
        result = trainer.publish(step)  # returns when the replica serves it
        with adapter.in_use() as version:  # an update waits until this ends
            same = torch.equal(served.weight, policy.weight)
            print(version, result.replicas[0].verified, same)
