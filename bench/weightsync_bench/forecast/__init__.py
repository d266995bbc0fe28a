"""``weightsync plan``: what a refit would take, computed from shapes, meshes and link rates. No GPU, no tensor library."""
