"""``weightsync plan``: what an update would take, computed from shapes, meshes and link rates. No GPU, no tensor library."""
