"""What the load is: a scenario's phases, the requests that it draws and their tensors, and when each is due."""
