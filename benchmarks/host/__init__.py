"""What one call costs the host, and what a loop of calls costs in all: functions and modules over small work."""
