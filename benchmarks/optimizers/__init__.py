"""Measures the loss that compression costs behind each optimizer, by width and length."""
