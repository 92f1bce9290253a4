"""What a step puts on the wire."""
