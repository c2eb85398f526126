"""Engines on the pool: a bundled paged-attention engine, and the connector that any paged engine can use."""
