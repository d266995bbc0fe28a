"""A trainer or an engine in a process that forks, for ``test_forks``: told by a JSON object which, and by lines what to do."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import warnings
from contextlib import ExitStack

import torch

from weightsync.engine.engine import Engine
from weightsync.engines.module import ModuleAdapter
from weightsync.errors import ConfigurationError
from weightsync.trainer.trainer import Trainer


def _work() -> None:
    sys.stdin.read()  # a data loader's worker that waits for its next batch


def _say(text: object) -> None:
    print(text, flush=True)


def main() -> None:
    config = json.loads(sys.argv[1])
    warnings.simplefilter("ignore", DeprecationWarning)  # of newer Pythons, for forking with threads: what is tried here
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 8)
    with ExitStack() as owned:
        if config["role"] == "trainer":
            trainer = owned.enter_context(
                Trainer(model, config["url"], token=config["token"], transports=[config["transport"]])
                if config["url"]
                else Trainer(model, transports=[config["transport"]])
            )
            _say(json.dumps([trainer.coordinator, trainer.environment["WEIGHTSYNC_TOKEN"]]))
        else:
            owned.enter_context(Engine(ModuleAdapter(model), "r", config["url"], token=config["token"]))
            _say("ready")
        for line in sys.stdin:
            match line.split():
                case ["publish", number]:
                    _say(trainer.publish(int(number), timeout=20).ok)
                case ["unwind"]:
                    child = os.fork()
                    if not child:
                        try:
                            trainer.publish(99, timeout=5)
                        except ConfigurationError:
                            sys.exit(0)  # through every block of this process, and then the interpreter's own end
                        sys.exit(4)
                    _say(os.waitpid(child, 0)[1])
                case ["worker"]:
                    worker = multiprocessing.get_context("fork").Process(target=_work, daemon=True)
                    worker.start()
                    _say(worker.pid)
