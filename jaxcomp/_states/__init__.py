"""States across replicas, meshes, checkpoints and ranks."""
