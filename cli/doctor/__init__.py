"""``kvstrata doctor``: what of this machine and of the cluster is not as it should be, and what to do."""
