"""Settings of a process that apply to all launches."""
