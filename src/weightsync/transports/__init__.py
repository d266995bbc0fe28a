"""How bytes cross from a trainer rank's shelf to an engine rank's memory; one file a scheme."""
