"""What compression costs by itself on one device."""
