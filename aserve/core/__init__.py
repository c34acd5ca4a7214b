"""Vocabulary: the frozen values and protocols every other package speaks. Standard library only, no behaviour."""
