"""The bundled paged-attention engine: small, complete, and bit-reproducible.

``engine`` puts it together and ``engine_loop`` turns it in a thread. A step goes from ``scheduling`` (what to
compute, over the block ids of ``cache``) to ``ranks`` (who hold the KV memory and run the ``model``) and back.
"""
