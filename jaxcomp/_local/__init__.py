"""Local SGD: averages of parameters instead of gradients."""
