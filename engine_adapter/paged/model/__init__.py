"""A Llama-architecture decoder over paged KV, whose bits depend on a token's prefix alone."""
