"""Errors that fusednorm raises.

KernelInputError (a ValueError)      an argument breaks the input contract
└── UnsupportedShapeError            well-formed, but no kernel here handles this shape or layout
"""


class KernelInputError(ValueError):
    """An argument breaks the input contract; the message has the expected and the actual value."""


class UnsupportedShapeError(KernelInputError):
    """The argument is well-formed, but no kernel handles its shape or memory layout."""
