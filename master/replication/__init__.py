"""How many replicas a block is to have and has: copies after a loss, of what is hot, and off nodes that leave."""
