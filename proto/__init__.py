"""The contract: messages, keys, statuses, framing and errors. Imports nothing of ours."""
