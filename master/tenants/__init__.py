"""Tenants: policies, node shares by demand, and what people see of them."""
