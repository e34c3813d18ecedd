"""What `gptfast prepare` can be given."""

NAMES = ("shakespeare",)
"""Corpora that are known by name."""
