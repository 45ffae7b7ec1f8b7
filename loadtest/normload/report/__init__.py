"""Presentation of results: on the terminal, as a page of plots, and compared with other results."""
