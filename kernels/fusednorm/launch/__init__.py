"""From a decision to the device: launches, how they are made, made again, and looked at."""
