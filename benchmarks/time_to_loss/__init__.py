"""Seconds until a held-out loss is reached, over links of a given rate, beside PyTorch's DDP."""
