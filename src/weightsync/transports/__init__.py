"""How bytes cross from a trainer rank's region to an engine rank's memory. ``registry`` knows the class of each scheme."""
