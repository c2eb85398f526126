"""Device memory: what it is, how its pieces are gathered and scattered, and the pinned ring between it and the host."""
