"""Admission of requests: permits for memory, the shares of tenants, and API keys with their rates."""
