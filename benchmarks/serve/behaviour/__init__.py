"""How the server bears up under load, loss and mixtures of requests."""
