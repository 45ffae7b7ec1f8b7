"""Whether a request may come in: permits for memory, the shares of tenants, quotas, and API keys."""
