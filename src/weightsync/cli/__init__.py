"""Command line. :mod:`weightsync.cli.main` declares the commands; each imports its code when it runs, so that help is fast."""
