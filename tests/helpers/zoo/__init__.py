"""Models with their authors' names, written once for torch and Flax."""
