"""Asynchronous RL, whole and small: GRPO on a string task, rollouts on replicas that are updated while they generate.

Run ``python -m examples.grpo --help``. Read ``trainer.py`` first: what an RL trainer looks like with weightsync. ``task.py`` is
the task and its reward, ``learning.py`` the loss, ``learner.py`` the optimizer, ``policy.py`` the model. ``sampler.py`` and
``replica.py`` are an engine of one's own, ``vllm_replica.py`` starts vLLM's server. ``run.py`` starts all processes, ``view.py``
shows them, ``outcome.py`` sums up.
"""

from __future__ import annotations

__all__: list[str] = []
