"""Moves between DRAM and SSD: what moves, who moves it, what is found again."""
