"""OpenRLHF: its policy actors publish through weightsync instead of broadcasting one parameter after the other.

``python -m weightsync.integrations.openrlhf`` takes the arguments of ``python -m openrlhf.cli.train_ppo_ray``; or call
:func:`enable` before that module is imported. See ``docs/integrations/openrlhf.md``.
"""

import sys
from typing import Any

from weightsync.errors import ConfigurationError

__all__ = ["PROGRAM", "actor_class", "enable"]

PROGRAM = "openrlhf.cli.train_ppo_ray"


def actor_class(actor: Any) -> Any:  # noqa: ANN401 - Ray's, and a class made by OpenRLHF
    """Return the class that was given to ``ray.remote`` for ``actor``."""
    return actor.__ray_metadata__.modified_class.__ray_actor_class__


def enable() -> None:
    """Make OpenRLHF's Ray actors those of weightsync, in the program that starts them. Idempotent.

    Raises:
        ImportError: OpenRLHF is not installed.
        ConfigurationError: It lacks what is replaced, or its program has been imported, so that it is too late.
    """
    import ray
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    from weightsync.integrations.openrlhf.policy import PublishingPolicyActor
    from weightsync.integrations.openrlhf.rollout import JoiningRolloutActor
    from weightsync.releases import check_interface, warn_if_untested

    check_interface("openrlhf")
    warn_if_untested("openrlhf")
    if actor_class(ppo_actor.PolicyModelActor) is PublishingPolicyActor:
        return
    if PROGRAM in sys.modules:
        raise ConfigurationError(f"{PROGRAM} is imported already: call weightsync.integrations.openrlhf.enable() before that")
    ppo_actor.PolicyModelActor = ray.remote(num_gpus=1)(PublishingPolicyActor)
    vllm_engine.RolloutRayActor = ray.remote(JoiningRolloutActor)
