"""An extension in C that answers recurring requests of clients on the same host.

If an equal frame, byte for byte, was received before, and its launch has been captured as a graph, the extension
receives the frame, launches the graph, waits for it and sends the response.  That takes a fraction of the time that
Python code takes.  `extension/serving.h` is the loop; Python calls `replayer.c`.
"""
