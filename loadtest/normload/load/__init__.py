"""The load: phases of a scenario, its requests and their tensors, and the schedule."""
