"""What an operation takes of the host's memory beside the tensors that came.

How the CPU backend cuts its work, from which the model follows.
"""

PIECE_ELEMENTS = 128 * 1024
"""Elements of what is computed at once, so that its float32 intermediates stay in a core's cache."""
