"""Who leaves, and when: shares, queues, and the orders behind a seam."""
