"""The trainer's and the engine's part of a round, inside one process."""
