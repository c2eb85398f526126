"""An OpenAI-compatible HTTP server over one engine.

Bodies are validated into structs (``requests``), a prompt becomes tokens (``prompts``), tokens come back as text
cut at stop strings (``choice``, ``stops``), and one answer or a stream of events goes out (``completions``,
``chat``, ``stream``). ``app`` puts the routes together, ``daemon`` runs it as a process.
"""
