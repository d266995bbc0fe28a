"""How bytes cross from a trainer rank's region to an engine rank's memory; one file a scheme."""
