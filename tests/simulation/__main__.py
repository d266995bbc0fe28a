"""``python -m tests.simulation``."""

from tests.simulation.main import main

if __name__ == "__main__":
    main()
