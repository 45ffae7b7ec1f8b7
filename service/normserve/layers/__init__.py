"""Registered layers: parameters that stay on the device, with equal content in all processes."""
