"""Blocks between nodes: copies taken and given, what a leaving node offers, and when it may stop."""
