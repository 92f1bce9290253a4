"""DiLoCo tuned within a stated number of runs, beside data parallel of the same optimizer."""
