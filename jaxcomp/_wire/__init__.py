"""Lists and checks the collectives of a compiled step."""
