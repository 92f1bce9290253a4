"""What an update and a training step cost on a GPU, and whether every form is right there."""
