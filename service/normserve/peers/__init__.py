"""Communication between the processes of one server, or between the replicas of one application."""
