"""The client: processes, their connections and requests, and the check of responses."""
