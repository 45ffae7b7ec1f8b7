"""The devices that kernels run on or are planned for: what is known of one, and a table of models."""
