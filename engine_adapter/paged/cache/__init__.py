"""The KV cache of one engine: block ids, who holds them, which of them a prefix can reuse."""
