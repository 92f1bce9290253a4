"""Local SGD: replicas average parameters now and then, instead of gradients in every step."""
