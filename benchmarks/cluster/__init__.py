"""Step times and bytes over shaped links, jaxcomp beside PyTorch's DDP."""
