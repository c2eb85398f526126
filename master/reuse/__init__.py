"""What other quotas would hit: sampled reuse distances."""
