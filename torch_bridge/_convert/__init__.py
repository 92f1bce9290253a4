"""Conversions between the frameworks, one function for each kind of state and direction."""
