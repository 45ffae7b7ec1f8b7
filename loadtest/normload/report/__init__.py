"""How a result is shown: on the terminal, as a page of plots, and beside another."""
