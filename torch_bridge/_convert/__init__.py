"""Conversions between the frameworks, one for each kind of state and direction."""
