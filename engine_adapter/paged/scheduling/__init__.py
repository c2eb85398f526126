"""What each step computes, who waits, and who gives way."""
