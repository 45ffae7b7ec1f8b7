"""Registered layers: parameters that stay on the device, the same in every process."""
