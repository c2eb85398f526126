"""The ``kvstrata`` command. One module a command family; heavy imports happen inside the commands."""
