"""Who leads: a lease in the state store, an epoch that every order carries, and the change from one to the next."""
