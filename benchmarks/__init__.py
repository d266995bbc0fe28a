"""Profiles, sweeps and floors for development, run from a clone. What users measure is ``weightsync bench``."""
