"""What a training run loses when processes are killed, stopped or hang, and disks fill or rot."""
