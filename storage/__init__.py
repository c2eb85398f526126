"""The storage node: sealed DRAM slabs, leases and reservations, eviction by tenant, the block channel, the daemon.

Imports nothing: the heartbeat process is ``python -m`` a module of this folder, and must stay light.
"""
