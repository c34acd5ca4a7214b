"""How much memory a model takes, from its sizes alone, and what of it is left for KV: arithmetic on plain numbers.

The start of a server and ``aserve plan`` ask the same functions, so that they cannot disagree. Standard library only.
"""
