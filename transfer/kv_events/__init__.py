"""KV events over ZMQ, as vLLM speaks them: what a cache has taken in and let go of, for routers."""
