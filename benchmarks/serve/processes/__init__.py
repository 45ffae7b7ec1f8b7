"""One server over several processes or devices."""
