"""What the processes of one server, or the replicas of one application, know of one another."""
