"""Train a policy and serve it: trainer, coordinator and engine in one process. In a run they are processes of their own."""

import torch

import weightsync

policy = torch.nn.Linear(16, 4)  # what is trained
served = torch.nn.Linear(16, 4)  # what generates samples
optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
adapter = weightsync.ModuleAdapter(served)

with (
    weightsync.Trainer(policy) as trainer,  # starts a coordinator, because none is named
    weightsync.Engine(adapter, replica="policy-0", coordinator=trainer.coordinator),
):
    for step in range(1, 4):
        policy(torch.randn(32, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        result = trainer.publish(step)  # returns when the replicas serve it
        with adapter.in_use() as version:  # a round waits until this ends
            print(version, result.replicas[0].verified, torch.equal(served.weight, policy.weight))
