"""What runs where the KV memory is: workers, the steps they compute, and ranks as processes."""
