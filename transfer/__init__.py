"""Moving bytes: the framed channel, regions and descriptors, and the transports behind one interface."""
