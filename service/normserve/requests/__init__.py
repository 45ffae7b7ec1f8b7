"""Processing of requests that all transports share: parameters, charges, layers to be registered."""
