"""A problem on which PowerSGD does not converge, and which options do."""
