"""How bytes cross from a trainer rank's region to an engine rank's memory; :mod:`~weightsync.transports.registry` knows each scheme."""
