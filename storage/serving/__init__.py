"""What clients ask of a node: the channel's handlers, and bytes between slots and clients."""
