"""Who sends the load: processes, their connections and the requests they send, and whether answers are right."""
