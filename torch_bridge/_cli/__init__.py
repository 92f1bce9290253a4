"""The command line's own parts."""
