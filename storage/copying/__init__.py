"""Blocks from node to node: copies that a master orders, and what a node offers before it leaves."""
