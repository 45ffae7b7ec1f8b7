"""The engine without HTTP: in this process, or one for each device in processes of their own."""
