"""One-sided transfers between registered memory, by NIXL: what moves bytes where there is RDMA."""
