"""Host time of one call, and wall time of a loop of calls: functions and modules on small tensors."""
