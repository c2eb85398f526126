"""The SSD tier: extents of devices, cut into slots that describe themselves."""
