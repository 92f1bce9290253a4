"""Measures step times and bytes over slow links, jaxcomp beside PyTorch's DDP."""
