"""What is done with a request whatever transport it came by: its parameters, its charges, the layer it brings."""
