"""The command line. :mod:`weightsync.cli.main` has the commands; each imports what it needs when it runs, so that help is fast."""
