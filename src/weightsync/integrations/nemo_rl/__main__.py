"""A program of NeMo-RL whose updates on shared GPUs go through weightsync: takes its path and its arguments."""

import sys
from pathlib import Path
from runpy import run_path

from weightsync.integrations.nemo_rl import enable

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: python -m weightsync.integrations.nemo_rl SCRIPT [ARGUMENTS]")
    enable()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))  # as Python does
    run_path(sys.argv[0], run_name="__main__")
