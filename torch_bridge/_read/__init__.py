"""Reads the bytes of a file into plain values, without executing anything."""
