"""The node looks at itself: invariants of its state, and whether blocks still are what was stored."""
