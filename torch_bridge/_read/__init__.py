"""From the bytes of a file to plain values, without executing anything."""
