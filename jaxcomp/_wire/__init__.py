"""What a compiled step really sends."""
