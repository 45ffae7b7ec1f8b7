"""From a plan to the device: how launches are made, repeated and inspected."""
