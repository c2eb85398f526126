"""Which node has which block, and why others have left."""
