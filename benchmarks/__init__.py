"""Kernel timing against peers, on the machine it runs on."""
