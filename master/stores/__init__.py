"""Where policy lives: a file for one master, Redis for several."""
