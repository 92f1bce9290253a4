"""Measures the seconds until a held-out loss, over links of a given rate, beside PyTorch's DDP."""
