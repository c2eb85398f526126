"""The directory for others to follow: a log of its changes, who watches it, and which engine has what."""
