"""Processing of requests that is the same for all transports: parameters, charges, layers to be registered."""
