"""What compression costs behind each optimizer, and how that depends on width and length."""
