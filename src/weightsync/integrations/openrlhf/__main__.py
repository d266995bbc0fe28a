"""OpenRLHF's program, updated through weightsync: takes the arguments of ``python -m openrlhf.cli.train_ppo_ray``."""

from runpy import run_module

from weightsync.integrations.openrlhf import PROGRAM, enable

if __name__ == "__main__":
    enable()
    run_module(PROGRAM, run_name="__main__", alter_sys=True)
