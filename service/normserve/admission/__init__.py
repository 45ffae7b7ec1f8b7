"""Admission of requests: permits for memory, the shares of tenants, quotas, and API keys."""
