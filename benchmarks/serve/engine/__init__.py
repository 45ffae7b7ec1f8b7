"""The engine without HTTP: in this process, or one per device in separate processes."""
