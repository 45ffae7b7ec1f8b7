"""Load tests for any server that speaks normserve's HTTP API."""
