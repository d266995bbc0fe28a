"""``python -m weightsync``: the command line."""

from weightsync.cli.main import main

if __name__ == "__main__":
    main()
