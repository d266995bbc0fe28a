"""``python -m weightsync.simulation``."""

from weightsync.simulation.main import main

if __name__ == "__main__":
    main()
