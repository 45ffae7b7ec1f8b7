"""An extension in C that answers recurring requests of clients on the same host.

If a request's frame has come before, byte for byte, and its launch has been captured as a graph, the extension
receives the frame, launches the graph, waits for it and sends the answer.  That takes a fraction of the time that
Python code takes.  `extension/serving.h` is the loop, `replayer.c` what Python calls.
"""
