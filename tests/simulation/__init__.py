"""Everything but the network and the disks, run by one seeded scheduler in virtual time, with faults at every step.

The coordinator, the service's socket endpoint, the agents' links, the roles and the digests are the real ones. Simulated are what
they stand on: time, threads, the wires between them, the memory copy of the data plane, engines and trainers. See
docs/simulation.md; ``python -m tests.simulation --help``.
"""
