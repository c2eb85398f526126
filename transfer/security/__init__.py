"""Who may do what: roles and rights, tokens, tickets for the channel, TLS.

A *token* is a secret that an operator gives to a person or a process; masters know its hash, its role and what it
may touch (:mod:`.tokens`). It is shown over HTTPS and gRPC only. A *ticket* is what the channel wants: a process
gets one for its token from a master, and proves on each connection that it has it, without showing its secret
(:mod:`.tickets`). Both end up as :class:`.rights.Rights`.
"""
