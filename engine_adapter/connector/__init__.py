"""Between a paged engine and the pool: what to load, what to store, and what holds blocks meanwhile.

``base`` has the two protocols and what goes between them. The scheduler's half is ``scheduler_side``, each rank's
half ``worker_side``; they meet in messages only, and know no engine.
"""
