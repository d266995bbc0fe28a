"""Other systems' weight transfer beside weightsync's, in one run on one host: ``python -m benchmarks.peers`` (see ``__main__``).

Their code is imported from where it is installed, or loaded from a path. What is absent becomes a row that says so.
"""
