"""Content as such: epochs, drops, listings, and why a block is not there."""
