"""A program of NeMo-RL whose updates on shared GPUs go through weightsync: takes its path and its arguments."""

import sys
from runpy import run_path

from weightsync.integrations.nemo_rl import enable

if __name__ == "__main__":
    enable()
    sys.argv = sys.argv[1:]
    run_path(sys.argv[0], run_name="__main__")
