"""What a process asks of every launch, whatever it computes."""
