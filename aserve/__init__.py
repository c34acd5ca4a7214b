"""aserve: an LLM inference server in which every request is a scope."""
