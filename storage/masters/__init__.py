"""The node's side of its masters: the link, what is told, what is ordered, what is kept."""
