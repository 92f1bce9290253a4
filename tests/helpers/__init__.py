"""What tests of more than one subject use: runners of steps, oracles, tolerances, processes."""
