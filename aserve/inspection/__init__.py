"""What a model folder holds and what is wrong with it, without loading it. Called by ``aserve inspect``."""
